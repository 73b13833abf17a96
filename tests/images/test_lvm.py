"""Volumes of LVM as rows: by the real agent, and what LVM said on a real machine (lvm2 2.03.16)."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images.alert_rules.looking import look
from images.models import Image
from images.orphans import rows
from images.rewrite.space import due_for_exclusive_sizes, record_estimate
from images.selectors.overview import overview
from storage_admin.events.models import Alert
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.agent.test_lvm import GROUPS, MIB, VOLUMES
from tests.agent.test_thin import NUMBERED, Tools, pool
from tests.factories import HostFactory, JobFactory, StoragePoolFactory
from tests.guests.test_other_pools import LOGICAL, Node, disk, domain, image, node
from tests.working import ADMIN, client_as, codes, run, scan, scanned_machine, this_machine, work

__all__ = ["node", "pool"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet"), pytest.mark.sql]

Line = dict[str, str]
Says = Callable[[list[Line], list[Line]], None]


@pytest.fixture
def lvm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """``lvm_says(groups, volumes)``: what LVM answers from now on; of neither, it fails."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    (tmp_path / "bin").mkdir(exist_ok=True)

    def says(groups: list[Line], volumes: list[Line]) -> None:
        for tool, kind, lines in (("vgs", "vg", groups), ("lvs", "lv", volumes)):
            program = tmp_path / "bin" / tool
            (tmp_path / f"{tool}.json").write_text(json.dumps({"report": [{kind: lines}]}))
            program.write_text(f"#!/bin/sh\ncat {tmp_path}/{tool}.json\n" if groups or volumes else "#!/bin/sh\nexit 5")
            program.chmod(0o755)

    says(GROUPS, VOLUMES)
    return says


def changed(name: str, **columns: str) -> list[Line]:
    """The volumes with other columns of one of them."""
    return [line | columns if line["lv_name"] == name else line for line in VOLUMES]


def pools() -> dict[str, StoragePool]:
    return {pool.name: pool for pool in StoragePool.objects.order_by("pk")}


def listed() -> dict[str, str]:
    return {one.name: one.pool.name for one in Image.objects.filter(missing_since=None).select_related("pool")}


def test_groups_and_thin_pools_are_pools_and_their_volumes_images(lvm_says: Says) -> None:
    host = this_machine()
    assert scan(host)["images"] == 9
    group, thin = pools()["vg0"], pools()["vg0/pool0"]
    assert (group.kind, group.source, group.state, group.path) == ("lvm", "lvm", "ok", "/dev/vg0")
    assert (group.capacity_bytes, group.available_bytes) == (1065353216, 830472192)
    assert (group.images_count, group.allocated_bytes, group.metadata_percent) == (7, 152 * MIB, None)
    assert group.shares == {
        "used": 1065353216 - 830472192, "images": 152 * MIB, "others": 68 * MIB, "remainder": 4 * MIB,
    }  # fmt: skip
    assert (thin.kind, thin.capacity_bytes, thin.metadata_bytes, thin.metadata_percent) == (
        "lvmthin", 64 * MIB, 4 * MIB, 10.94,
    )  # fmt: skip
    assert round(thin.used_percent or 0, 2) == 7.81
    assert thin.virtual_bytes == 80 * MIB
    mirrored, snap = image("mirrored"), image("snap1")
    assert (mirrored.virtual_size, mirrored.allocated_size, mirrored.exclusive_bytes) == (16 * MIB, 40 * MIB, 40 * MIB)
    assert (snap.allocated_size, snap.exclusive_bytes, snap.backing) == (None, None, image("thin1"))
    assert (image("classic").backing, image("thick").overlays_count) == (image("thick"), 1)
    assert {one.state for one in Image.objects.all()} == {"ok"}
    assert {one.orphan for one in Image.objects.all()} <= {None, False}
    assert scan(host)["read"] == 0


def test_a_group_with_nothing_in_it_is_a_pool_to_move_disks_to(lvm_says: Says) -> None:
    empty = GROUPS[0] | {"vg_name": "vg9", "vg_uuid": "u9", "vg_size": "1000", "vg_free": "1000"}
    only_thin = [line for line in VOLUMES if "thin" in line["lv_layout"] or "thin" in line["lv_role"]]
    lvm_says([*GROUPS, empty], [line for line in only_thin if line["lv_name"] != "classic"])
    scan(this_machine())
    assert set(pools()) == {"vg0/pool0", "vg9"}
    assert (pools()["vg9"].kind, pools()["vg9"].available_bytes, pools()["vg9"].images_count) == ("lvm", 1000, 0)


@pytest.mark.parametrize(
    "changes", [{"vg_lock_type": "sanlock"}, {"vg_systemid": "node2"}, {"vg_tags": "RHAT_storage_domain"}]
)
def test_no_plan_changes_a_group_that_others_manage(lvm_says: Says, changes: dict[str, str]) -> None:
    host = this_machine()
    for more, refused in (({}, set()), (changes, {"shared_pool"})):
        lvm_says([GROUPS[0] | more] * 2, VOLUMES)  # a line for each disk
        scan(host)
        assert pools()["vg0"].capacity_bytes == 1065353216
        for one in pools().values():
            told = client_as().get(f"/api/v1/pools/{one.pk}/").json()["changes_refused"]
            assert bool(told) is bool(refused)
            assert not told or told in client_as().get(f"/pools/{one.pk}/").content.decode()
        for name in ("thick", "thin1"):
            assert codes("set_aside", image(name), ADMIN) & {"shared_pool"} == refused
        for name in ("vg0", "vg0/pool0"):
            found = codes("move", image("idle"), ADMIN, target_pool=pools()[name].pk)
            assert found & {"shared_pool"} == refused


def test_sums_count_a_thin_pool_within_its_group_and_a_group_that_two_hosts_see_once(lvm_says: Says) -> None:
    for host in (this_machine(), HostFactory.create(slug="other", kind="local", last_seen=None, capabilities={})):
        scan(host)
        found = overview(ADMIN).totals
        assert found.capacity_bytes == 1065353216
        assert found.available_bytes == 830472192 + 64 * MIB - 64 * MIB * 781 // 10_000
        assert found.used_bytes == found.capacity_bytes - found.available_bytes
        assert (found.images_count, found.allocated_bytes) == (9, 157 * MIB)


def test_pages_and_rest_show_what_lvm_says(lvm_says: Says) -> None:
    scan(this_machine())
    client, thin = client_as(role="admin"), pools()["vg0/pool0"]
    told = client.get(f"/api/v1/pools/{thin.pk}/").json()
    assert (told["metadata_bytes"], told["metadata_percent"], told["source"]) == (4 * MIB, 10.94, "lvm")
    page = client.get(f"/pools/{thin.pk}/").content.decode()
    assert "10.94 % of 4 MiB used" in page
    assert f"/pools/{thin.pk}/create" not in page
    volumes = {one["name"]: one["exclusive_bytes"] for one in client.get("/api/v1/images/").json()["results"]}
    assert (volumes["thick"], volumes["thin1"]) == (32 * MIB, None)
    assert "8,388,608" in client.get(f"/images/{image('classic').pk}/").content.decode()


def test_a_pool_of_libvirt_gets_the_facts_and_no_volume_is_listed_twice(node: Node, lvm_says: Says) -> None:
    node(LOGICAL)
    host = this_machine()
    assert scan(host)["images"] == 9
    assert {name: pool.source for name, pool in pools().items()} == {"vg0": "libvirt", "vg0/pool0": "lvm"}
    assert (pools()["vg0"].capacity_bytes, pools()["vg0"].images_count) == (1065353216, 7)
    # What libvirt alone tells of is none of LVM's.
    assert set(listed()) == {line["lv_name"] for line in VOLUMES if "public" in line["lv_role"]}
    assert scan(host)["read"] == 0


def test_a_pool_that_libvirt_gets_later_takes_the_volumes_over_with_their_history(node: Node, lvm_says: Says) -> None:
    node()
    host = scanned_machine()
    known = {one.name: one.pk for one in Image.objects.all()}
    node(LOGICAL)
    assert scan(host)["vanished"] == 0
    assert listed() == dict.fromkeys(known, "vg0") | {"thin1": "vg0/pool0", "snap1": "vg0/pool0"}
    assert {one.name: one.pk for one in Image.objects.all()} == known
    assert scan(host)["read"] == 0
    assert {pool.source for pool in StoragePool.objects.filter(kind="lvm")} == {"libvirt"}


@pytest.mark.parametrize("shared", [False, True])
def test_a_storage_of_proxmox_gets_the_facts_unless_nodes_share_it(lvm_says: Says, shared: bool) -> None:
    host, thin = this_machine(), ("local-lvm", "lvmthin", "lvmthin vg0/pool0")
    for name, kind, path in (thin, ("san", "lvm", "lvm vg0")):
        StoragePoolFactory.create(
            volumes=True, host=host, name=name, kind=kind, path=path, network=shared and name == "san"
        )
    scan(host)
    assert set(pools()) == {"local-lvm", "san"}
    assert (pools()["local-lvm"].images_count, pools()["local-lvm"].metadata_percent) == (2, 10.94)
    assert (pools()["san"].images_count, pools()["san"].capacity_bytes) == ((0, None) if shared else (7, 1065353216))


def test_two_storages_of_one_thin_pool_list_its_volumes_once_and_have_one_size(lvm_says: Says) -> None:
    host = this_machine()
    for name in ("first", "second"):
        StoragePoolFactory.create(volumes=True, host=host, name=name, kind="lvmthin", path="lvmthin vg0/pool0")
    scan(host)
    first, second = pools()["first"], pools()["second"]
    assert (first.images_count, second.images_count) == (2, 0)
    assert (first.capacity_bytes, second.capacity_bytes) == (64 * MIB, 64 * MIB)
    assert overview(ADMIN).totals.capacity_bytes == 1065353216
    assert scan(host)["read"] == 0


@pytest.mark.parametrize("path", ["/dev/vg0/thick", "/dev/mapper/vg0-thick"])
def test_a_guest_is_linked_to_its_volume_by_each_of_its_names(node: Node, lvm_says: Says, path: str) -> None:
    node(domain("web", disk(f"dev='{path}'", "vda", "qcow2")))
    scan(this_machine())
    volume = image("thick")
    assert [use.disk.guest.name for use in volume.uses.all()] == ["web"]
    assert (volume.in_use, volume.orphan, volume.format, volume.state) == (True, False, "qcow2", "ok")


def test_volumes_go_and_come_and_a_group_that_is_away_keeps_its_volumes(lvm_says: Says) -> None:
    host = scanned_machine()
    lvm_says(GROUPS, [line for line in VOLUMES if line["lv_name"] != "idle"])
    assert scan(host)["vanished"] == 1
    assert image("idle").state == "missing"
    lvm_says([GROUPS[0] | {"vg_name": "other"}], [])
    assert scan(host)["vanished"] == 0
    assert [pools()[name].state for name in ("vg0", "vg0/pool0")] == ["missing", "missing"]
    assert (pools()["vg0"].capacity_bytes, image("thick").state) == (None, "ok")
    lvm_says(GROUPS, VOLUMES)
    scan(host)
    assert [pools()[name].state for name in ("vg0", "vg0/pool0")] == ["ok", "ok"]
    assert image("idle").state == "ok"


def test_where_lvm_does_not_answer_all_is_as_last_seen(lvm_says: Says) -> None:
    host = scanned_machine()
    before = listed()
    lvm_says([], [])
    assert scan(host)["vanished"] == 0
    assert {pool.state for pool in pools().values()} == {"unreadable"}
    assert listed() == before
    assert (pools()["vg0"].capacity_bytes, pools()["vg0/pool0"].metadata_percent) == (1065353216, 10.94)
    assert image("thick").exclusive_bytes == 32 * MIB


def test_space_that_no_scan_could_see_anew_is_no_sample_of_today(lvm_says: Says) -> None:
    host = scanned_machine()
    lvm_says([], [])
    scan(host)
    group = pools()["vg0"]
    assert (group.state, group.samples.get().at) == ("unreadable", group.space_seen)
    # A look in the middle of a scan is newer than what that one asked for.
    StoragePool.objects.filter(pk=group.pk).update(space_seen=timezone.now() + timedelta(minutes=1))
    scan(host)
    assert group.samples.latest("at").at == pools()["vg0"].space_seen


@pytest.mark.parametrize("kind", ["reclaim", "flatten", "convert", "check", "analyze", "commit", "grow"])
def test_no_job_on_files_works_on_a_volume(lvm_says: Says, kind: str) -> None:
    scan(this_machine())
    given: dict[str, dict[str, Any]] = {"convert": {"format": "qcow2"}, "grow": {"size_bytes": 64 * MIB}}
    for name in ("thick", *(("snap1",) if kind not in {"reclaim", "analyze"} else ())):
        plan = services.plan(ADMIN, kind, image(name).pk, given.get(kind, {}))
        assert "unsupported_pool" in {one.code for one in plan.refusals}, (kind, name)
        assert not plan.undo_bytes, (kind, name)
        if kind not in {"analyze", "commit"}:
            page = client_as(role="admin").get(f"/images/{image(name).pk}/{kind}/")
            assert not page.context["possible"], (kind, name)
            assert not any(f'id="{part}"' in page.content.decode() for part in ("guarantee", "options")), (kind, name)


@pytest.mark.parametrize(
    ("data", "metadata", "severity", "told"),
    [
        ("84.90", "84.90", "", ()), ("90.00", "10.00", "warning", ("Data of",)),
        ("10.00", "97.00", "danger", ("Metadata of", "97.0 % of 4 MiB")), ("96.00", "90.00", "danger", ("Data and",)),
    ],
)  # fmt: skip
def test_a_thin_pool_that_fills_up_is_told_of_with_what_is_full(
    lvm_says: Says, data: str, metadata: str, severity: str, told: tuple[str, ...]
) -> None:
    host = this_machine()
    lvm_says(GROUPS, changed("pool0", data_percent=data, metadata_percent=metadata))
    scan(host)
    look(timezone.now())
    alerts = Alert.objects.filter(closed=None, key=f"pool_over_threshold:{pools()['vg0/pool0'].pk}")
    assert [one.severity for one in alerts] == ([severity] if severity else [])
    assert all(words in one.detail for words in told for one in alerts)


def test_a_group_that_is_divided_up_is_no_trouble_until_an_admin_says_so(lvm_says: Says) -> None:
    host = this_machine()
    lvm_says([GROUPS[0] | {"vg_free": "0"}], VOLUMES)
    scan(host)
    look(timezone.now())
    assert not Alert.objects.filter(closed=None, target_id=pools()["vg0"].pk).exists()
    assert "pool_over_threshold" not in {one.code for one in overview(ADMIN).needs_a_look}
    StoragePool.objects.filter(name="vg0").update(warn_percent=90)
    assert "pool_over_threshold" in {one.code for one in overview(ADMIN).needs_a_look}
    look(timezone.now())
    assert Alert.objects.get(closed=None, target_kind="pool", target_id=pools()["vg0"].pk).severity == "danger"


def test_exclusive_sizes_of_thin_volumes_are_measured_once_an_hour_and_dated(
    lvm_says: Says, pool: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool()
    lvm_says(GROUPS, NUMBERED)
    host = scanned_machine()
    job = run(Job.objects.get(kind="exclusive"))  # the scan has submitted it
    assert (job.state, job.result) == ("succeeded", {"measured": 1, "skipped": []})
    assert not due_for_exclusive_sizes(host.pk)
    client = client_as(role="viewer")
    told = {one["name"]: one for one in client.get("/api/v1/images/").json()["results"]}
    assert [told[name]["exclusive_bytes"] for name in ("thin1", "snap1", "thick")] == [4 * MIB, MIB, 32 * MIB]
    assert [told[name]["exclusive_at"] is None for name in ("thin1", "snap1", "thick")] == [False, False, True]
    assert "4,194,304" in client.get(f"/images/{image('thin1').pk}/").content.decode()
    pool(used=900, says="1 65536\n")
    result = work("exclusive", host.pk).result or {}
    assert [one["pool"] for one in result["skipped"]] == ["vg0/pool0"]
    assert image("thin1").deletion_frees == 4 * MIB
    pool(says="1 65536\n")
    work("exclusive", host.pk)
    assert (image("thin1").deletion_frees, image("snap1").deletion_frees) == (65536, None)
    Job.objects.update(created=timezone.now() - timedelta(hours=1))
    assert due_for_exclusive_sizes(host.pk)
    lvm_says([], [])
    assert work("exclusive", host.pk).state == "failed"


def test_one_that_is_set_aside_has_its_own_size_and_not_that_of_what_has_its_name_now(
    lvm_says: Says, pool: Tools
) -> None:
    pool()
    lvm_says(GROUPS, NUMBERED)
    host = scanned_machine()
    volume = image("thin1")
    job = JobFactory.create(kind="set_aside", target=volume, state="succeeded")
    rows.set_aside(volume, job)
    usual = next(line for line in NUMBERED if line["lv_name"] == "thin1")
    waits, new = {"lv_name": f".sa-{job.uid}.aside"}, {"lv_uuid": "new", "thin_id": "7"}
    lvm_says(GROUPS, [*(line for line in NUMBERED if line != usual), usual | waits, usual | new])
    scan(host)
    work("exclusive", host.pk)
    found = Image.every.filter(name="thin1")
    assert {one.state: one.deletion_frees for one in found} == {"set_aside": 4 * MIB, "ok": 65536}


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [("thick", "move", "has_overlays"), ("classic", "move", "unsupported_pool"), ("thin1", "move", ""),
     ("snap1", "move", ""), ("idle", "move", ""), ("thin1", "reclaim", "")],
)  # fmt: skip
def test_what_a_snapshot_with_blocks_of_its_own_stands_on_is_refused_in_the_plan(
    lvm_says: Says, name: str, kind: str, code: str
) -> None:
    scan(this_machine())
    other = StoragePoolFactory.create(host=image(name).host, kind="lvm", path="/dev/vg9", path_bytes=b"")
    StoragePool.objects.filter(pk=other.pk).update(shared_key="lvm u9")
    options = {"target_pool": other.pk} if kind == "move" else {}
    assert codes(kind, image(name), ADMIN, **options) == ({code} if code else set())


def test_zeros_that_others_share_are_nothing_that_a_thin_volume_could_give_back(lvm_says: Says, pool: Tools) -> None:
    pool()
    lvm_says(GROUPS, NUMBERED)
    host = scanned_machine()
    predicted = {"reclaimable_bytes": 5 * MIB, "reclaimable_low": 3 * MIB, "reclaimable_high": 6 * MIB}
    estimate = {"allocated_size": 8 * MIB, "methods": {"in_place": predicted}}

    def offered(look: bool) -> list[int | None]:
        one = image("thin1")
        if look:
            record_estimate(one, bytes(one.fingerprint), estimate, timezone.now())
        one = image("thin1")
        return [one.reclaimable_bytes, one.reclaimable_low, one.reclaimable_high]

    assert offered(look=True) == [5 * MIB, 3 * MIB, 6 * MIB]
    work("exclusive", host.pk)  # it has 4 MiB alone
    assert offered(look=False) == offered(look=True) == [4 * MIB, 3 * MIB, 4 * MIB]
    assert pools()["vg0/pool0"].reclaimable_bytes == 4 * MIB


def test_a_volume_that_was_made_anew_has_not_the_size_that_was_measured_of_the_one_before(
    lvm_says: Says, pool: Tools
) -> None:
    pool()
    lvm_says(GROUPS, NUMBERED)
    host = scanned_machine()
    work("exclusive", host.pk)
    assert (image("thin1").deletion_frees, image("snap1").deletion_frees) == (4 * MIB, MIB)
    lvm_says(GROUPS, [line | ({"lv_uuid": "new"} if line["lv_name"] == "thin1" else {}) for line in NUMBERED])
    scan(host)
    assert (image("thin1").deletion_frees, image("snap1").deletion_frees) == (None, MIB)
    assert image("thin1").alone_at is None
