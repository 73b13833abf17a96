"""Snapshots of VMs of Proxmox VE as jobs, by a server held to the official schema."""

import time
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from images.policies.rules import choose
from images.policies.shape import Rules
from storage_admin.errors import InvalidError
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host
from storage_admin.hosts.proxmox import snapshots
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan
from tests.factories import PolicyFactory
from tests.guests.vms import cancelled_meanwhile, conf, good, host, reached, server, stopped_meanwhile, submit, web
from tests.harness.patching import do_before
from tests.harness.proxmox import confs, world
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import ALL
from tests.working import OPERATOR, against, client_as, run, said, succeeded

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

__all__ = ["host", "server", "web"]
DAY = 24 * 3600
CONTAINER = "arch: amd64\nhostname: bct\nrootfs: btr:210/subvol-210-disk-0.subvol\nlxc.cap.drop: a\nlxc.cap.drop: b\n"


@pytest.fixture
def vm(server: ProxmoxServer, web: Guest) -> Guest:
    """Its disks can keep snapshots, and it is off."""
    one = server.world.guests["vm", 120]
    one.text = one.text.replace("scsi1: local-lvm:vm-120-disk-1,size=1G\n", "")
    return web


def names(server: ProxmoxServer) -> list[str]:
    return list(server.world.guests["vm", 120].conf.snapshots)


def keep(server: ProxmoxServer, name: str, days: int = 0, **more: str) -> None:
    """The VM has a snapshot that is so old."""
    one = server.world.guests["vm", 120]
    known = one.conf
    before = {"parent": known.now["parent"]} if "parent" in known.now else {}
    drives = {key: value for key, value in known.now.items() if key.startswith("scsi")}
    known.snapshots[name] = drives | before | {"snaptime": str(int(time.time()) - days * DAY)} | more
    known.now["parent"] = name
    one.text = confs.write_vm(known)


def plan(kind: str, guest: Guest, **options: Any) -> Plan:
    return services.plan(OPERATOR, kind, guest.pk, options)


def test_one_is_made_gone_back_to_and_deleted(server: ProxmoxServer, vm: Guest) -> None:
    assert plan("snapshot", vm, name="before").commands == ("qm snapshot 120 before",)
    result = good(run(submit("snapshot", vm, name="before")))
    assert result["name"] == "before"
    assert result["task"].split(":")[5] == "qmsnapshot"
    assert names(server) == ["before"]
    server.world.guests["vm", 120].text = server.world.guests["vm", 120].text.replace("name: web", "name: changed", 1)
    good(run(submit("revert_snapshot", vm, name="before")))
    assert conf(server)["name"] == "web"
    assert good(run(submit("delete_snapshot", vm, name="before")))["names"] == ["before"]
    assert names(server) == []
    assert Job.objects.filter(kind="scan", state="queued").exists()


@pytest.mark.parametrize("kind", ["delete_snapshot", "revert_snapshot"])
def test_a_later_snapshot_of_the_same_name_is_another_one(server: ProxmoxServer, vm: Guest, kind: str) -> None:
    keep(server, "nightly", 2)
    seen = str(plan(kind, vm, name="nightly").options["created"])
    job = submit(kind, vm, name="nightly")
    assert job.options["created"] == seen
    keep(server, "nightly", 1)
    ended = run(job)
    assert (ended.state, ended.error_code, names(server)) == ("failed", "stale_plan", ["nightly"])
    assert against(kind, vm, name="nightly", created=seen) == ["stale_plan"]
    assert against(kind, vm, name="nightly") == []
    with pytest.raises(InvalidError):
        submit(kind, vm, name="nightly", created="yesterday")
    assert against(kind, vm, name="nightly", created="2026-13-41T00:00:00Z") == ["invalid"]


def test_one_that_is_made_anew_while_older_ones_are_deleted_stays(
    server: ProxmoxServer, vm: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(server, "old", 60)
    keep(server, "monthly", 50)

    def the_other_is_made_anew(_client: object, _ref: object, name: str) -> None:
        if name == "old":
            keep(server, "monthly", 0)

    do_before(monkeypatch, snapshots, "delete", the_other_is_made_anew)
    job = run(submit("delete_old_snapshots", vm, older_than_days=30))
    assert (good(job)["names"], names(server)) == (["old"], ["monthly"])
    assert [line for line in said(job) if "monthly" in line and "left alone" in line]


def test_the_page_of_a_name_alone_is_confirmed_for_the_snapshot_that_its_plan_has_shown(
    server: ProxmoxServer, vm: Guest
) -> None:
    browser, address = client_as(role="operator"), f"/guests/{vm.pk}/delete-snapshot/"
    keep(server, "nightly", 2)
    form = browser.get(address, {"name": "nightly"}).context
    assert form["values"]["created"] == form["plan"].options["created"]
    keep(server, "nightly", 1)
    confirmed = {"name": "nightly", "created": form["values"]["created"], "planned": form["planned"]}
    browser.post(address, confirmed | {"confirm_name": vm.name, "key": form["key"]})
    assert not Job.objects.filter(kind="delete_snapshot").exists()
    (against,) = plan("delete_snapshot", vm, **{name: confirmed[name] for name in ("name", "created")}).refusals
    assert form["values"]["created"] in against.detail


def test_what_stands_against_it_is_told_before_a_task_begins(server: ProxmoxServer, vm: Guest) -> None:
    keep(server, "there")
    assert against("snapshot", vm, name="there") == ["target_exists"]
    assert against("snapshot", vm, name="1st") == ["invalid"]
    for reserved in ("current", "pending", "PENDING"):
        assert against("snapshot", vm, name=reserved) == ["invalid"]
    assert against("snapshot", vm, name="Current") == []
    assert against("snapshot", vm, name="now", disks=["scsi0"]) == ["invalid"]
    assert against("delete_snapshot", vm, name="gone") == ["stale_plan"]
    assert against("revert_snapshot", vm, name="gone") == ["stale_plan"]
    assert against("delete_old_snapshots", vm, older_than_days=1) == ["nothing_to_free"]
    one = server.world.guests["vm", 120]
    one.running = True
    assert against("revert_snapshot", vm, name="there") == ["image_in_use"]
    assert against("delete_snapshot", vm, name="there") == []
    one.running, text = False, one.text
    one.text = text.replace(".qcow2", ".raw")
    assert against("snapshot", vm, name="now") == ["unsupported_subformat"]
    one.text = "template: 1\n" + text
    assert against("snapshot", vm, name="now") == ["immutable"]
    one.text = "lock: backup\n" + text
    for kind in ("snapshot", "delete_snapshot", "revert_snapshot"):
        assert against(kind, vm, name="there") == ["guest_locked"]


@pytest.fixture
def container(server: ProxmoxServer, host: Host) -> Guest:
    """One of a storage that keeps its snapshots, with lines for LXC."""
    server.world.guests["container", 210] = world.Guest("container", 210, CONTAINER)
    scanned(host)
    return Guest.objects.get(kind="container", uid="210")


def scanned(host: Host) -> None:
    """By the API alone: no agent of the test tells of images."""
    reached(host, Host.Transport.API)
    succeeded(run(services.submit(OPERATOR, "scan", host.pk, {})))
    reached(host, Host.Transport.API_SSH)


def test_a_containers_snapshot_is_made_gone_back_to_and_deleted_and_no_line_for_lxc_is_lost(
    server: ProxmoxServer, container: Guest
) -> None:
    one = server.world.guests["container", 210]
    assert plan("snapshot", container, name="before").commands == ("pct snapshot 210 before",)
    assert plan("snapshot", container, name="before").warnings[-1:] != ("Filesystems are not quiesced",)
    result = good(run(submit("snapshot", container, name="before")))
    assert result["task"].split(":")[5] == "vzsnapshot"
    one.text = one.text.replace("hostname: bct", "hostname: changed", 1)
    assert plan("revert_snapshot", container, name="before").commands == ("pct rollback 210 before",)
    good(run(submit("revert_snapshot", container, name="before")))
    assert (one.conf.now["hostname"], one.conf.raw[""]) == ("bct", [["lxc.cap.drop", "a"], ["lxc.cap.drop", "b"]])
    good(run(submit("snapshot", container, name="after")))
    # Also the one that does not lead to the present is seen, with the volumes that it names.
    assert good(run(submit("delete_snapshot", container, name="before")))["names"] == ["before"]
    assert list(one.conf.snapshots) == ["after"]
    scanned(container.host)
    container.refresh_from_db()
    assert [kept["name"] for kept in container.snapshots] == ["after"]


def test_what_stands_against_a_containers_is_told_before(server: ProxmoxServer, container: Guest) -> None:
    one = server.world.guests["container", 210]
    text = one.text
    one.text = text + "lxc.unheard.of: x\n"
    assert against("snapshot", container, name="now") == ["hidden_lines"]
    one.text = text.replace("rootfs: btr:", "mp0: /srv,mp=/srv\nrootfs: btr:")
    assert against("snapshot", container, name="now") == ["unsupported_subformat"]
    one.text = "lock: backup\n" + text
    assert against("snapshot", container, name="now") == ["guest_locked"]
    one.text, one.running = text, True
    assert against("snapshot", container, name="now") == []
    good(run(submit("snapshot", container, name="now")))
    assert against("revert_snapshot", container, name="now") == ["image_in_use"]


def test_snapshots_that_do_not_lead_to_a_containers_present_are_known(server: ProxmoxServer, container: Guest) -> None:
    one = server.world.guests["container", 210]
    one.text = one.text.replace("hostname", "parent: bb\nhostname", 1) + "".join(
        f"\n[{name}]\nrootfs: btr:210/subvol-210-disk-{name}.subvol\nsnaptime: 176060000{number}\n"
        for number, name in enumerate(("aa", "bb"))
    )
    scanned(container.host)
    container.refresh_from_db()
    assert {kept["name"] for kept in container.snapshots} == {"aa", "bb"}
    assert client_as(role="viewer").get(f"/guests/{container.pk}/snapshots/").content.decode().count("delete…") == 2


def test_where_snapshots_are_files_only_the_newest_is_gone_back_to(server: ProxmoxServer, vm: Guest) -> None:
    keep(server, "old", 2)
    keep(server, "new", 1)
    assert against("revert_snapshot", vm, name="old") == []
    (store,) = [one for one in server.world.storages if one["storage"] == "store"]
    store["snapshot-as-volume-chain"] = 1
    assert against("revert_snapshot", vm, name="old") == ["in_snapshot_chain"]
    assert against("revert_snapshot", vm, name="new") == []


@pytest.mark.parametrize(
    ("right", "refused"),
    [
        ("VM.Snapshot", []),
        ("VM.Snapshot.Rollback", ["snapshot", "delete_snapshot"]),
        ("VM.Audit", ["snapshot", "delete_snapshot", "revert_snapshot"]),
    ],
)
def test_a_right_that_is_missing_is_named(server: ProxmoxServer, vm: Guest, right: str, refused: list[str]) -> None:
    keep(server, "there")
    server.world.allow(*(one for one in ALL if one != "VM.Snapshot"), right)
    found = [
        kind
        for kind, name in (("snapshot", "now"), ("delete_snapshot", "there"), ("revert_snapshot", "there"))
        if against(kind, vm, name=name) == ["right_missing"]
    ]
    assert found == refused


def test_old_ones_are_deleted_the_oldest_first(server: ProxmoxServer, vm: Guest) -> None:
    for name, days in (("bb", 35), ("aa", 40), ("cc", 2)):
        keep(server, name, days)
    assert "aa, bb" in plan("delete_old_snapshots", vm).reason
    result = good(run(submit("delete_old_snapshots", vm)))
    assert result["names"] == ["aa", "bb"]
    assert len(result["tasks"]) == 2
    assert names(server) == ["cc"]


def test_none_becomes_old_enough_while_the_job_waits(server: ProxmoxServer, vm: Guest) -> None:
    keep(server, "aa", 40)
    keep(server, "bb", 32)
    job = submit("delete_old_snapshots", vm)
    Job.objects.filter(pk=job.pk).update(created=timezone.now() - timedelta(days=3))
    job.refresh_from_db()
    assert good(run(job))["names"] == ["aa"]
    assert names(server) == ["bb"]


def test_a_policy_is_for_them_too(vm: Guest) -> None:
    created = int(time.time()) - 40 * DAY
    Guest.objects.filter(pk=vm.pk).update(snapshots=[{"name": "aa", "created": created, "external": False}])
    policy = PolicyFactory.create(kind="delete_old_snapshots", options={"older_than_days": 30}, name_pattern="web")
    found = choose(Rules.of(policy), timezone.now())
    assert [one.id for one in found.chosen] == [vm.pk]


def test_a_deletion_that_fails_is_told_in_proxmox_ves_words(server: ProxmoxServer, vm: Guest) -> None:
    keep(server, "there")
    server.world.snapshot_fails = "command '/usr/bin/qemu-img snapshot -d there' failed: exit code 1"
    job = run(submit("delete_snapshot", vm, name="there"))
    assert (job.state, job.error_code) == ("failed", "tool_failed")
    assert server.world.snapshot_fails in job.error_detail
    assert "qm unlock 120" in job.error_detail
    assert names(server) == ["there"]
    assert against("delete_snapshot", vm, name="there") == ["guest_locked"]


def test_a_cancel_ends_the_waiting_and_not_the_task(
    server: ProxmoxServer, vm: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(server, "there")
    cancelled_meanwhile(submit("delete_snapshot", vm, name="there"), monkeypatch)
    (task,) = server.world.tasks.values()
    assert task.exit_status == "OK"


def test_a_worker_that_is_told_to_end_leaves_the_task_at_work(
    server: ProxmoxServer, vm: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(server, "there")
    job = stopped_meanwhile(submit("delete_snapshot", vm, name="there"), server, monkeypatch)
    assert job.state in {"interrupted", "cancelled"}
    (task,) = server.world.tasks.values()
    assert task.exit_status == "OK"
    assert any(task.upid in line for line in said(job))


def test_the_guests_page_lists_them_with_what_can_be_done(server: ProxmoxServer, vm: Guest) -> None:
    keep(server, "aa", 40)
    keep(server, "bb", 1)
    viewer = client_as(role="viewer")
    page = viewer.get(f"/guests/{vm.pk}/snapshots/").content.decode()
    assert [name in page for name in ("name=aa&amp;created=2", "name=bb&amp;created=2", "go back")] == [True] * 3
    told = viewer.get(f"/api/v1/guests/{vm.pk}/snapshots/").json()
    assert ([one["name"] for one in told["snapshots"]], told["unknown"]) == (["bb", "aa"], None)
