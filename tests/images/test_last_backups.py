"""The last backup of an image's guests: from a scan to pages, answers and plans."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from images import backups as of_images
from images.models import Image
from storage_admin.guests import backups
from storage_admin.guests.models import Guest, GuestBackup
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox.backups import Backup, Backups
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from storage_admin.jobs import services
from storage_admin.jobs.plan_and_progress import Plan
from tests.factories import GuestFactory, HostFactory, ImageFactory, ImageUseFactory, JobFactory, StoragePoolFactory
from tests.harness.proxmox.server import ProxmoxServer
from tests.hosts.proxmox.test_backups import NOVEMBER, snapshot
from tests.images.by_api import STORE, add_and_scan, at, scan, server
from tests.working import ADMIN, OPERATOR, VIEWER, at_most_queries, client_as

__all__ = ["server"]

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]
NOW = timezone.now().replace(microsecond=0)
AGO = timedelta(days=2)
PBS = "pbs:backup/vm/100/x"


def recorded(host: Host, *vmids: int, ago: timedelta = AGO) -> None:
    at = int((NOW - ago).timestamp())
    told = Backups(tuple(Backup(vmid, "vm", at, f"pbs:backup/vm/{vmid}/x") for vmid in vmids), ("local", "pbs"))
    backups.record(host, ProxmoxFacts("pve1", backups=told), NOW)


def image(name: str = "vm-100-disk-0.qcow2", *, first_seen: timedelta = timedelta(days=30), **columns: Any) -> Image:
    """An image on a node that was told of a backup of guest 100, made two days ago."""
    one = ImageFactory.create(name=name, reclaimable_bytes=1 << 30, first_seen=NOW - first_seen, **columns)
    on_proxmox(one.host)
    recorded(one.host, 100)
    return one


def on_proxmox(host: Host) -> None:
    Host.objects.filter(pk=host.pk).update(capabilities=host.capabilities | {"proxmox": True})


def used_by(one: Image, uid: str = "100", *, in_backups: bool | None = True, **guest: Any) -> Guest:
    values = {"host": one.host, "kind": "vm", "name": "web"} | guest
    owner = GuestFactory.create(uid=uid, **values)
    ImageUseFactory.create(image=one, disk__guest=owner, disk__in_backups=in_backups, disk__target="scsi0")
    return owner


def told(one: Image) -> list[tuple[str, str, bool | None]]:
    return [(last.guest, last.volume, last.included) for last in of_images.of_image(Image.every.get(pk=one.pk))]


def test_the_last_backup_of_the_guest_that_uses_it_is_told() -> None:
    one = image()
    used_by(one)
    assert told(one) == [("web (100)", PBS, True)]


def test_a_disk_that_its_guests_backups_leave_out_is_said() -> None:
    one = image()
    used_by(one, in_backups=False)
    assert told(one) == [("web (100)", PBS, False)]
    assert "scsi0" in of_images.of_image(one)[0].detail


def test_of_a_disk_whose_guest_is_gone_the_number_in_its_name_tells() -> None:
    one = image()
    assert told(one) == [("100", PBS, None)]
    assert of_images.of_image(one)[0].detail
    assert told(image("disk.qcow2")) == []


def test_on_hosts_of_libvirt_nothing_is_said() -> None:
    one = ImageFactory.create(name="vm-100-disk-0.qcow2")
    used_by(one, kind="domain")
    with at_most_queries(1):
        assert of_images.of_images([one]) == {}
    assert client_as().get(f"/images/{one.pk}/").content.decode().count("backup") == 0


@pytest.mark.parametrize(
    ("first_seen", "scanned", "included"),
    [(timedelta(days=1), timedelta(days=1.5), None), (timedelta(days=1), timedelta(days=3), True),
     (timedelta(days=3), timedelta(days=1.5), True)],
)  # fmt: skip
def test_an_image_that_a_scan_after_the_backup_had_not_found_may_not_be_in_it(
    first_seen: timedelta, scanned: timedelta, included: bool | None
) -> None:
    one = image(first_seen=first_seen)
    used_by(one)
    one.pool.samples.create(at=NOW - scanned, capacity_bytes=100, available_bytes=40)
    assert told(one) == [("web (100)", PBS, included)]


def test_a_guest_of_a_stranger_host_with_that_number_is_another_one() -> None:
    one, other = image(), HostFactory.create()
    recorded(other, 100, ago=timedelta(hours=1))
    used_by(one, host=other)
    assert told(one) == []
    Host.objects.filter(pk__in=[one.host_id, other.pk]).update(cluster="lab")
    found = of_images.of_image(Image.every.get(pk=one.pk))
    assert [(last.guest, last.at) for last in found] == [("100", NOW - timedelta(hours=1))]


def test_of_several_guests_the_one_whose_backup_helps_least_comes_first() -> None:
    one = image()
    used_by(one)
    used_by(one, "101", name="never")
    assert [guest for guest, *_rest in told(one)] == ["never (101)", "web (100)"]
    answer = client_as().get(f"/api/v1/images/{one.pk}/").json()["last_backup"]
    assert (answer["guest"], answer["at"], bool(answer["detail"])) == ("never (101)", None, True)


def plan_of(kind: str, one: Image, **options: Any) -> Plan:
    return services.plan(ADMIN, kind, one.pk, options)


@pytest.mark.parametrize("kind", ["reclaim", "flatten", "convert", "check", "grow", "shrink", "commit", "set_aside"])
def test_it_stands_beside_every_plan_that_rewrites(kind: str) -> None:
    one = image()
    used_by(one)
    options = {"size_bytes": 1 << 40} if kind == "grow" else {"format": "raw"} if kind == "convert" else {}
    plan = plan_of(kind, one, **options)
    assert [(last.guest, last.volume) for last in plan.backups] == [("web (100)", PBS)]
    assert plan.as_json()["backups"][0]["at"] == (NOW - AGO).isoformat().replace("+00:00", "Z")


def test_it_stands_beside_plans_that_delete() -> None:
    one = image(state="set_aside", aside_since=NOW - AGO, aside_until=NOW - AGO)
    assert [last.volume for last in plan_of("delete_aside", one).backups] == [PBS]
    job = JobFactory.create(target=one, kind="reclaim", state="succeeded", undo_state="available", undo_bytes=5)
    for kind in ("undo", "discard_undo"):
        assert [last.volume for last in services.plan(ADMIN, kind, job.pk, {}).backups] == [PBS], kind


def test_plans_that_only_look_say_nothing_of_it() -> None:
    one = image()
    used_by(one)
    assert plan_of("analyze", one).backups == ()


def test_a_plan_on_a_base_tells_of_the_guests_above_it() -> None:
    base = image("base-101-disk-0.qcow2")
    overlay = ImageFactory.create(name="vm-100-disk-0.qcow2", backing=base, first_seen=NOW - timedelta(days=9))
    Image.every.filter(pk=base.pk).update(overlays_count=1)
    used_by(overlay)
    found = plan_of("reclaim", base).backups
    assert [(last.guest, last.at is None) for last in found] == [("101", True), ("web (100)", False)]


def test_what_is_written_over_is_told_of_before_a_device_is_overwritten() -> None:
    source = ImageFactory.create(name="new.qcow2")
    pool = StoragePoolFactory.create(host=source.host, path="/dev/vg", kind="lvm")
    ImageFactory.create(pool=pool, name="vm-100-disk-0", path="/dev/vg/vm-100-disk-0", first_seen=NOW - AGO * 2)
    on_proxmox(source.host)
    recorded(source.host, 100)
    plan = plan_of("to_device", source, device="/dev/vg/vm-100-disk-0")
    assert [last.guest for last in plan.backups] == ["100"]
    assert plan_of("to_device", source, device="/dev/vg/other").backups == ()


def test_snapshots_of_a_vm_are_deleted_and_reverted_beside_it() -> None:
    one = image()
    Host.objects.filter(pk=one.host_id).update(kind="proxmox", transport="api")
    guest = used_by(one)
    for kind in ("delete_snapshot", "revert_snapshot", "delete_old_snapshots"):
        options = {"older_than_days": 3} if kind == "delete_old_snapshots" else {"name": "monday"}
        plan = services.plan(OPERATOR, kind, guest.pk, options)
        assert [(last.guest, last.included) for last in plan.backups] == [("web (100)", True)], kind


def test_many_images_cost_no_more_queries_than_one() -> None:
    one = image()
    used_by(one)
    rows = [one, *(ImageFactory.create(pool=one.pool, name=f"vm-{n}-disk-0.qcow2") for n in range(101, 130))]
    for row in rows[1:]:
        used_by(row, row.name[3:6], name=f"n{row.pk}")
    client = client_as()
    client.get("/api/v1/images/")
    with at_most_queries(17):
        answer = client.get("/api/v1/images/?limit=100").json()
    assert sorted(row["last_backup"]["at"] is None for row in answer["results"]) == [False, *[True] * 29]


def test_pages_show_it_and_names_of_strangers_as_text() -> None:
    one = image()
    guest = used_by(one, name="<script>alert(1)</script>")
    GuestBackup.objects.update(volume="<script>x:backup/vm/100/x")
    client = client_as(role="admin")
    pages = ("/images/{}/", "/images/{}/reclaim/")
    for path in (*(page.format(one.pk) for page in pages), f"/guests/{guest.pk}/", "/guests/"):
        answer = client.get(path)
        html = answer.content.decode()
        assert answer.status_code == 200, path
        assert f'datetime="{(NOW - AGO).isoformat()}"' in html, path
        assert "<script>x" not in html
        assert "<script>alert" not in html


def test_who_does_not_see_the_host_sees_no_backup() -> None:
    one = image()
    used_by(one)
    other = HostFactory.create()
    assert client_as(hosts=[other.slug]).get(f"/api/v1/images/{one.pk}/").status_code == 404
    assert services.plan(VIEWER, "reclaim", one.pk, {}).backups != ()


def test_a_scan_by_the_api_brings_it_to_images_and_guests(server: ProxmoxServer) -> None:
    world, day = server.world, 86400
    world.storages.append({"storage": "pbs", "type": "pbs", "content": "backup", "digest": "0" * 40})
    world.statuses.append({**world.statuses[0], "storage": "pbs", "type": "pbs", "content": "backup"})
    world.volumes["pbs"] = [snapshot(100, NOVEMBER), snapshot(100, NOVEMBER - day), snapshot(999, NOVEMBER - day)]
    host = add_and_scan(server)
    client = client_as()
    disk, left = at(f"{STORE}/100/vm-100-disk-0.qcow2"), at(f"{STORE}/999/vm-999-disk-0.qcow2")
    answer = client.get(f"/api/v1/images/{disk.pk}/").json()["last_backup"]
    assert (answer["guest"], answer["volume"]) == ("db1 (100)", snapshot(100, NOVEMBER)["volid"])
    assert (answer["included"], "nfs-dead" in answer["detail"]) == (True, True)
    orphan = client.get(f"/api/v1/images/{left.pk}/").json()["last_backup"]
    assert (orphan["guest"], orphan["at"], orphan["included"]) == (
        "999", f"{datetime.fromtimestamp(NOVEMBER - day, UTC):%Y-%m-%dT%H:%M:%SZ}", None,
    )  # fmt: skip
    guests = {row["uid"]: row["last_backup"] for row in client.get("/api/v1/guests/").json()["results"]}
    assert (guests["100"]["volume"], guests["101"]["at"]) == (snapshot(100, NOVEMBER)["volid"], None)
    world.broken["pbs"] = ""
    scan(host)
    gone = client.get(f"/api/v1/images/{disk.pk}/").json()["last_backup"]
    assert (gone["at"], "pbs" in gone["detail"]) == (None, True)


def test_a_token_that_may_not_see_backups_makes_them_unknown_and_fails_no_scan(server: ProxmoxServer) -> None:
    server.world.allow("Sys.Audit", "Datastore.Audit", "VM.Audit", "VM.Config.Disk")
    host = add_and_scan(server)
    assert host.status == "ok"
    guest = client_as().get("/api/v1/guests/").json()["results"][0]
    assert (guest["last_backup"]["at"], "VM.Backup" in guest["last_backup"]["detail"]) == (None, True)
    assert "backups" in {right["feature"] for right in host.capabilities["missing_rights"]}
