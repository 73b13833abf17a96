"""Linked clones of Proxmox VE are flattened, and their VMs name them anew: real images, a server held to the schema."""

from pathlib import Path
from typing import Any

import pytest

from images.kinds.flatten import Flatten
from images.rewrite import linked_clones, repointing
from storage_admin.hosts.models import Host
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.models import Job
from tests.harness.patching import do_after, raising
from tests.harness.proxmox import world
from tests.harness.proxmox.server import ProxmoxServer
from tests.images.away import goes_away
from tests.images.linked import LINKED, OWN, backing, clone, conf, flatten, holds, host, server, store
from tests.images.node import scanned
from tests.working import OPERATOR, image_at, reread, run, said, succeeded

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_reserve")]

__all__ = ["clone", "host", "server", "store"]


def test_a_linked_clone_is_flattened_named_anew_and_undone(server: ProxmoxServer, host: Host, clone: Path) -> None:
    plan = services.plan(OPERATOR, "flatten", image_at(clone).pk, {})
    assert plan.refusals == ()
    assert any(OWN in warning for warning in plan.warnings)
    assert any("qm set 101 --scsi0" in command for command in plan.commands)
    job = succeeded(run(flatten(clone)))
    assert (backing(clone), holds(clone)) == ("", True)
    assert conf(server) == {"name": "clone", "scsi0": f"{OWN},discard=on,size=8M"}
    assert all(one.params.get("digest") for one in server.seen if one.verb == "PUT")
    assert not job.repoint_due
    assert any(f"names {OWN} now" in line for line in said(job))
    scanned(host)
    assert image_at(clone).uses.get().disk.volume == OWN
    assert any(LINKED in warning for warning in services.plan(OPERATOR, "undo", job.pk, {"force": False}).warnings)
    succeeded(run(services.undo(OPERATOR, job)))
    assert (bool(backing(clone)), holds(clone)) == (True, True)
    assert conf(server) == {"name": "clone", "scsi0": f"{LINKED},discard=on,size=8M"}


def test_a_database_that_goes_away_after_the_id_was_changed_is_waited_for(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = goes_away(monkeypatch, claims, "log", f"names {OWN} now", times=1)
    job = run(flatten(clone))
    assert (job.state, job.error_code, len(away)) == ("succeeded", "", 1), said(job)
    assert (backing(clone), conf(server)["scsi0"]) == ("", f"{OWN},discard=on,size=8M")


@pytest.mark.parametrize("when", ["while it works", "in the last moment"])
def test_a_configuration_that_was_changed_meanwhile_refuses_it_and_all_is_put_back(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    machine = server.world.guests["vm", 101]

    def change() -> None:
        machine.text = "onboot: 1\n" + machine.text

    if when == "while it works":
        check = linked_clones.check

        def and_then_somebody_changes_it(job: Job, image: Any) -> None:
            begun = bool(job.kept)
            check(job, image)
            if not begun:
                change()

        monkeypatch.setattr(linked_clones, "check", and_then_somebody_changes_it)
    else:
        server.world.before_put = lambda guest: change()
    inode = clone.stat().st_ino
    job = run(flatten(clone))
    assert (job.state, job.error_code) == ("failed", "stale_plan"), job.error_detail
    assert (clone.stat().st_ino, holds(clone)) == (inode, True)
    assert sorted(entry.name for entry in clone.parent.iterdir()) == [clone.name]
    assert conf(server)["scsi0"] == f"{LINKED},discard=on,size=8M"
    assert conf(server)["onboot"] == "1"
    server.world.before_put = None
    repointing.settle()
    assert not reread(job).repoint_due
    assert conf(server)["scsi0"] == f"{LINKED},discard=on,size=8M"


@pytest.mark.parametrize(
    ("added", "code"),
    [
        ("lock: backup\n", "guest_locked"),
        (f"parent: one\n\n[one]\nscsi0: {LINKED},size=8M\nsnaptime: 1\n", "has_internal_snapshots"),
        ("\n[PENDING]\nscsi0: none,media=cdrom\n", "stale_plan"),
    ],
)
def test_what_stands_against_it_since_the_scan_stops_it_before_any_work(
    server: ProxmoxServer, host: Host, clone: Path, added: str, code: str
) -> None:
    job = flatten(clone)
    machine = server.world.guests["vm", 101]
    machine.text += added
    inode = clone.stat().st_ino
    ended = run(job)
    assert (ended.state, ended.error_code) == ("failed", code)
    assert not any("qemu-img" in line for line in said(ended))
    assert (clone.stat().st_ino, LINKED in machine.text, OWN in machine.text) == (inode, True, False)
    assert server.verbs() == []


def test_a_missing_right_is_named_before_any_work(server: ProxmoxServer, host: Host, clone: Path) -> None:
    server.world.allow("Sys.Audit", "Datastore.Audit", "VM.Audit")
    job = run(flatten(clone))
    assert (job.error_code, "VM.Config.Disk on /vms/101" in job.error_detail) == ("right_missing", True)
    assert backing(clone)


def test_an_agent_that_dies_between_leaves_a_whole_image_and_the_ids_are_put_right(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def and_then_the_worker_is_gone(job: Job) -> None:
        assert conf(server)["scsi0"].startswith(OWN)
        assert holds(clone)  # either id leads to the file, which is an overlay still
        Job.objects.filter(pk=job.pk).update(heartbeat=job.created - claims.LEASE * 2)
        assert reaper.reap() == 1

    do_after(monkeypatch, linked_clones, "lead_to_the_flat_one", and_then_the_worker_is_gone)
    job = run(flatten(clone))
    assert job.state == "interrupted"
    assert holds(clone)
    run(Job.objects.get(kind="recover", state="queued"))
    assert not reread(job).repoint_due, said(job)
    assert (bool(backing(clone)), conf(server)["scsi0"]) == (True, f"{LINKED},discard=on,size=8M")


def test_a_swap_that_nobody_could_write_down_keeps_the_new_id(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Flatten, "record", raising(ValueError("the worker is gone")))
        job = run(flatten(clone))
    assert (job.state, job.needs_recovery) == ("failed", True)
    assert conf(server)["scsi0"].startswith(OWN)
    reaper.recover_hosts()
    run(Job.objects.get(kind="recover", state="queued"))
    assert (reread(job).state, job.repoint_due) == ("succeeded", False)
    assert (backing(clone), holds(clone), conf(server)["scsi0"]) == ("", True, f"{OWN},discard=on,size=8M")


def test_a_change_that_is_cut_off_in_the_middle_is_put_back_with_every_line(
    server: ProxmoxServer, host: Host, clone: Path
) -> None:
    changes: list[str] = []

    def fail_once(guest: world.Guest) -> None:
        changes.append(conf(server)["scsi0"])
        if len(changes) == 2:
            assert conf(server)["unused0"] == LINKED  # the drive has its new id, and a second line the old one
            raise world.ApiDeathError(500, "unable to write: input/output error\n")

    server.world.before_put = fail_once
    job = run(flatten(clone))
    assert (job.state, "input/output error" in job.error_detail) == ("failed", True)
    assert len(changes) > 2
    assert not job.repoint_due
    assert (bool(backing(clone)), holds(clone)) == (True, True)
    assert conf(server) == {"name": "clone", "scsi0": f"{LINKED},discard=on,size=8M"}


def test_a_guest_that_is_locked_when_it_is_put_back_is_waited_for(
    server: ProxmoxServer, host: Host, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = server.world.guests["vm", 101]

    def and_then_a_backup_begins(job: Job) -> None:
        machine.text += "lock: backup\n"
        Job.objects.filter(pk=job.pk).update(cancel_requested=True)

    do_after(monkeypatch, linked_clones, "lead_to_the_flat_one", and_then_a_backup_begins)
    job = run(flatten(clone))
    assert (job.state, job.repoint_due) == ("cancelled", True), said(job)
    assert any("changed later" in line for line in said(job))
    repointing.settle()
    machine.text = machine.text.replace("lock: backup\n", "")
    repointing.settle()
    assert (reread(job).repoint_due, conf(server)["scsi0"]) == (False, f"{LINKED},discard=on,size=8M")
