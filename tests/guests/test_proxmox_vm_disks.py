"""VMs of Proxmox VE changed as jobs: limits, moves, sizes and trims, by a server held to the official schema."""

from typing import Any

import pytest

from images.models import Image, ImageUse
from images.rewrite.neighbours import locks_on
from storage_admin.agent.protocol import RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host
from storage_admin.jobs import kinds, reaper, services
from storage_admin.jobs.models import Job, ResourceLock
from storage_admin.jobs.plan_and_progress import Recorder
from tests.factories import GuestFactory, ImageFactory
from tests.guests.vms import (
    OLD,
    WEB,
    cancelled_meanwhile,
    conf,
    good,
    guest,
    host,
    reached,
    server,
    stopped_meanwhile,
    submit,
    web,
)
from tests.harness.patching import do_before
from tests.harness.proxmox import world
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import AUDITOR
from tests.working import OPERATOR, VIEWER, against, invalid_fields, reread, run, said

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

__all__ = ["host", "server", "web"]


def test_a_disk_is_moved_and_the_old_volume_kept(server: ProxmoxServer, web: Guest) -> None:
    plan = services.plan(OPERATOR, "move_disk", web.pk, {"disk": "scsi0", "storage": "s2"})
    assert plan.refusals == ()
    assert "stays with the VM as an unused disk" in plan.reason
    assert plan.commands == ("qm disk move 120 scsi0 s2 --delete 0",)
    job = submit("move_disk", web, disk="scsi0", storage="s2")
    job = run(job)
    result = good(job)
    assert (result["before"]["volume"], result["left_as"]) == (OLD, "unused1")
    assert result["now"]["volume"] == conf(server)["scsi0"].partition(",")[0]
    assert result["now"]["volume"].startswith("s2:120/")
    assert conf(server)["unused1"] == OLD
    log = said(job)
    assert any(result["task"] in line for line in log)
    assert any("transferred 2.0 GiB of 4.0 GiB (50.00%)" in line for line in log)
    assert Job.objects.filter(kind="scan", state="queued").exists()
    assert not ResourceLock.objects.filter(job=job).exists()


def test_the_progress_of_a_move_is_what_its_task_tells(
    server: ProxmoxServer, web: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    do_before(monkeypatch, Recorder, "progress", lambda _, event: told.append(event["percent"]))
    good(run(submit("move_disk", web, disk="scsi0", storage="s2", format="raw", delete_source=True)))
    assert told == [0, 0, 25, 50, 75, 100]
    assert conf(server)["scsi0"].startswith("s2:120/vm-120-disk-0.raw,")
    assert "unused1" not in conf(server)


def test_a_move_that_is_cancelled_ends_its_task(
    server: ProxmoxServer, web: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit("move_disk", web, disk="scsi0", storage="s2")
    ended = cancelled_meanwhile(job, monkeypatch)
    (task,) = server.world.tasks.values()
    assert task.exit_status == "interrupted by signal"
    assert conf(server)["scsi0"] == f"{OLD},discard=on,size=8G"
    assert any("stopping the task" in line for line in said(ended))


def test_a_worker_that_is_told_to_end_stops_the_task(
    server: ProxmoxServer, web: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = stopped_meanwhile(submit("move_disk", web, disk="scsi0", storage="s2"), server, monkeypatch)
    assert (ended.state, ended.error_code) == ("interrupted", "interrupted")
    assert [task.exit_status for task in server.world.tasks.values()] == ["interrupted by signal"]


def test_a_job_whose_worker_is_lost_says_that_its_task_may_go_on(web: Guest) -> None:
    job = submit("move_disk", web, disk="scsi0", storage="s2")
    Job.objects.filter(pk=job.pk).update(state="running", heartbeat=None)
    assert reaper.reap() == 1
    assert (reread(job).state, job.needs_recovery) == ("interrupted", False)
    assert "a task started in proxmox ve continues there" in job.error_detail.lower()
    assert "original image" not in job.error_detail


def test_a_task_that_fails_is_a_job_that_failed_with_its_words(server: ProxmoxServer, web: Guest) -> None:
    job = submit("move_disk", web, disk="scsi0", storage="s2")
    server.world.task_fails = "storage migration failed: no space left on device"
    ended = run(job)
    assert (ended.state, "no space left on device" in ended.error_detail) == ("failed", True)
    assert Job.objects.filter(kind="scan", state="queued").exists()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"disk": "scsi0", "storage": "nowhere"}, "invalid", "does not exist"),
        ({"disk": "scsi0", "storage": "disabled"}, "invalid", "does not accept VM disks"),
        ({"disk": "scsi0", "storage": "other-node"}, "invalid", "does not accept VM disks"),
        ({"disk": "scsi0", "storage": "nfs-dead"}, "host_unreachable", "cannot reach the storage nfs-dead"),
        ({"disk": "scsi0", "storage": "store"}, "invalid", "is already in store"),
        ({"disk": "ide2", "storage": "s2"}, "invalid", "not a volume"),
        ({"disk": "scsi5", "storage": "s2"}, "invalid", "has no drive scsi5"),
    ],
)
def test_a_move_to_where_nothing_can_be_is_refused(
    server: ProxmoxServer, web: Guest, options: dict[str, Any], code: str, words: str
) -> None:
    (refusal,) = services.plan(OPERATOR, "move_disk", web.pk, options).refusals
    assert (refusal.code, words in refusal.detail) == (code, True), refusal.detail
    assert server.verbs() == []


def test_a_drive_that_is_a_path_is_left_to_root(server: ProxmoxServer, web: Guest) -> None:
    server.world.guests["vm", 120].text = WEB + "scsi2: /dev/disk/by-id/x,size=1G\nide3: /srv/x.iso,media=cdrom\n"
    assert against("move_disk", web, disk="scsi2", storage="s2") == ["right_missing"]
    assert against("resize", web, disk="scsi2", size_bytes=2 << 30) == ["right_missing"]
    assert against("move_disk", web, disk="ide3", storage="s2") == ["invalid"]
    assert against("move_disk", web, disk="scsi0", storage="/srv") == ["invalid"]
    assert server.verbs() == []


def test_neither_qemus_arguments_nor_a_skipped_lock_are_ever_sent(server: ProxmoxServer, web: Guest) -> None:
    server.world.guests["vm", 120].text = "args: -device x\n" + WEB
    good(run(submit("move_disk", web, disk="scsi0", storage="s2")))
    good(run(submit("resize", web, disk="scsi1", size_bytes=2 << 30)))
    good(run(submit("set_io_priority", web, disk="scsi1", limits={"read_iops_sec": 500})))
    sent = {name for one in server.seen if one.verb != "GET" for name in one.params}
    assert {"disk", "size", "scsi1"} <= sent
    assert not sent & {"args", "skiplock"}
    assert conf(server)["args"] == "-device x"


def test_a_storage_that_is_full_is_refused(server: ProxmoxServer, web: Guest) -> None:
    for status in server.world.statuses:
        status["avail"] = (8 << 30) - 1
    assert against("move_disk", web, disk="scsi0", storage="s2") == ["not_enough_space"]
    assert against("move_disk", web, disk="scsi1", storage="s2") == []


def test_what_proxmox_protects_is_not_moved_or_enlarged(server: ProxmoxServer, host: Host, web: Guest) -> None:
    template, locked = guest(host, "101"), guest(host, "102")
    assert against("move_disk", template, disk="scsi0", storage="s2") == ["immutable"]
    assert against("resize", template, disk="scsi0", size_bytes=20 << 30) == ["immutable"]
    for kind, options in (("move_disk", {"disk": "scsi0", "storage": "s2"}), ("trim", {})):
        assert against(kind, locked, **options) == ["guest_locked"]
    server.world.guests["vm", 120].text = WEB + f"parent: one\n\n[one]\nscsi0: {OLD},size=8G\nsnaptime: 1\n"
    assert against("move_disk", web, disk="scsi0", storage="s2") == []
    assert against("move_disk", web, disk="scsi0", storage="s2", delete_source=True) == ["has_internal_snapshots"]
    assert against("resize", web, disk="scsi0", size_bytes=20 << 30) == ["has_internal_snapshots"]
    server.world.allow(*AUDITOR, "VM.Config.Disk")
    (refusal,) = services.plan(OPERATOR, "move_disk", web.pk, {"disk": "scsi0", "storage": "s2"}).refusals
    assert (refusal.code, "Datastore.AllocateSpace on /storage/s2" in refusal.detail) == ("right_missing", True)
    assert server.verbs() == []


def image_of(row: Guest, target: str) -> Image:
    return Image.objects.get(uses__disk__guest=row, uses__disk__target=target)


def test_a_volume_that_others_need_is_moved_and_never_removed(server: ProxmoxServer, host: Host, web: Guest) -> None:
    server.world.volumes["store"] += [
        {"volid": OLD, "content": "images", "format": "qcow2", "size": 8 << 30, "used": 4096, "vmid": 120},
        {"volid": "store:120/vm-120-disk-3.qcow2", "content": "images", "format": "qcow2", "size": 8 << 30,
         "used": 4096, "vmid": 120, "parent": "vm-120-disk-0.qcow2"},
    ]  # fmt: skip
    server.world.guests["vm", 121] = world.Guest("vm", 121, f"name: second\nscsi1: {OLD},size=8G\n")
    reached(host, Host.Transport.API)
    assert run(services.submit(OPERATOR, "scan", host.pk, {})).state == "succeeded"
    reached(host, Host.Transport.API_SSH)
    web = guest(host, "120")
    assert image_of(web, "scsi0").overlays_count == 1
    assert against("move_disk", web, disk="scsi0", storage="s2") == []
    plan = services.plan(OPERATOR, "move_disk", web.pk, {"disk": "scsi0", "storage": "s2", "delete_source": True})
    assert [one.code for one in plan.refusals] == ["has_overlays", "guest_names_image"]
    assert "a disk of second" in plan.refusals[1].detail
    with pytest.raises(RefusedError):
        submit("move_disk", web, disk="scsi0", storage="s2", delete_source=True)
    assert server.verbs() == []


def test_a_job_on_a_disk_waits_for_one_on_its_image_wherever_that_is_listed(server: ProxmoxServer, web: Guest) -> None:
    elsewhere = ImageFactory.create(dev="7", inode="11")
    disk = web.disks.get(target="scsi0")
    ImageUse.objects.filter(disk=disk).delete()
    ImageUse.objects.create(image=elsewhere, disk=disk)
    kind = kinds.get("resize")
    held = {lock.key for lock in kind.locks(kind.resolve(web.pk), {"disk": "scsi0"})}
    assert held >= {lock.key for lock in locks_on(elsewhere, exclusive=True)}


def test_only_vms_of_a_node_with_an_api_have_these_kinds(server: ProxmoxServer, host: Host) -> None:
    container = guest(host, "300")
    assert against("move_disk", container, disk="rootfs", storage="s2") == ["invalid"]
    alone = GuestFactory.create(kind="vm", uid="120")
    assert against("trim", alone) == ["tool_missing"]
    with pytest.raises(Exception, match="operator"):
        services.submit(VIEWER, "trim", guest(host, "120").pk, {})


def test_options_that_are_missing_or_wrong_are_named(web: Guest) -> None:
    for kind, options, names in (
        ("move_disk", {}, {"disk", "storage"}),
        ("resize", {"disk": "scsi0"}, {"size_bytes"}),
        ("resize", {"disk": "scsi0", "size_bytes": 1000001}, {"size_bytes"}),
        ("move_disk", {"disk": "scsi0", "storage": "s2", "format": "vdi"}, {"format"}),
        ("trim", {"x": 1}, {"x"}),
    ):
        assert set(invalid_fields(services.submit, OPERATOR, kind, web.pk, options)) == names


def test_a_node_that_does_not_answer_refuses_the_plan_in_its_words(web: Guest, host: Host) -> None:
    Host.objects.filter(pk=host.pk).update(port=1)
    assert against("trim", web) == ["host_unreachable"]


def test_a_vm_that_another_node_has_by_now_is_told(server: ProxmoxServer, web: Guest) -> None:
    del server.world.guests["vm", 120]
    (refusal,) = services.plan(OPERATOR, "trim", web.pk, {}).refusals
    assert "120 on pve1" in refusal.detail


def test_a_disk_is_enlarged_and_read_again(server: ProxmoxServer, web: Guest) -> None:
    job = run(submit("resize", web, disk="scsi0", size_bytes=9 << 30))
    result = good(job)
    assert (result["before"]["size_bytes"], result["now"]["size_bytes"]) == (8 << 30, 9 << 30)
    assert "size=9437184K" in conf(server)["scsi0"]
    assert any("UPID:" in line for line in said(job))


def test_nothing_is_made_smaller(server: ProxmoxServer, web: Guest) -> None:
    for size in (8 << 30, 1024):
        assert against("resize", web, disk="scsi0", size_bytes=size) == ["invalid"]
    assert against("resize", web, disk="ide2", size_bytes=8 << 30) == ["invalid"]
    assert server.verbs() == []


def test_a_configuration_that_changes_under_a_task_ends_it(
    server: ProxmoxServer, web: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit("resize", web, disk="scsi0", size_bytes=9 << 30)

    def interfere(*_: object) -> None:
        server.world.guests["vm", 120].text += "onboot: 1\n"

    do_before(monkeypatch, server.world, "begin", interfere)
    ended = run(job)
    assert (ended.state, ended.error_code) == ("failed", "stale_plan")
    assert "size=8G" in conf(server)["scsi0"]


def test_a_guest_is_trimmed_and_what_each_filesystem_gave_back_is_told(server: ProxmoxServer, web: Guest) -> None:
    machine = server.world.guests["vm", 120]
    assert against("trim", web) == ["guest_off"]  # it is off
    machine.running = True
    machine.trims = [
        {"path": "/", "trimmed": 104857600, "minimum": 0},
        {"path": "/boot", "error": "the discard operation is not supported"},
    ]
    plan = services.plan(OPERATOR, "trim", web.pk, {})
    assert plan.refusals == ()
    assert {cause.disk for cause in plan.causes if cause.code == "discard_ignored"} == {"scsi1"}
    job = run(submit("trim", web))
    result = good(job)
    assert (result["trimmed_bytes"], len(result["filesystems"])) == (104857600, 2)
    assert any("/boot: the discard operation" in line for line in said(job))
    assert Job.objects.filter(kind="scan", state="queued").exists()
