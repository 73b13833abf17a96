"""Block jobs of running guests and everything that may go away meanwhile: whatever was acknowledged is there.

Before a merge each pair of an operation and a fault is tried once; at night a hundred times in all.
"""

import os
import signal
import subprocess
import threading
import time as clock
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import libvirt
import pytest
from django.utils import timezone

from images.live import block_jobs as kinds
from images.live import follow
from images.models import Image
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import block_jobs
from storage_admin.jobs import claims, reaper, runner, services
from storage_admin.jobs.models import Job
from storage_admin.jobs.routing import heart
from tests.chance import night
from tests.harness import libvirtd as daemons
from tests.harness.guests import Disk, Domains, LibvirtGuest
from tests.harness.patching import do_after
from tests.harness.processes import wait_until
from tests.live.chains import PATTERNS, at_stage, chain_of, definition_of, patterns, pid_of, submit, whole
from tests.live.conftest import OnChain, scanned
from tests.live.writer import acknowledged, begin, check, wait_for_writes, writing
from tests.working import ON_LIBVIRT, OPERATOR, image_at, refused_as, reread, run, said, scan, succeeded

pytestmark = [pytest.mark.guest, pytest.mark.django_db(transaction=True), *ON_LIBVIRT]
#: How often each pair is tried.
TIMES = 9 if night() else 1
#: Operations: the kind of job, its options by names of images, the MiB that it copies, and the chain afterwards.
OPERATIONS = {
    "pull": ("live_flatten", {}, 12, ["top.qcow2"]),
    "commit": ("live_merge", {"layer": "middle.qcow2"}, 4, ["top.qcow2", "base.qcow2"]),
    "active commit": ("live_merge", {}, 6, ["middle.qcow2", "base.qcow2"]),
    "copy": ("live_copy", {}, 18, ["top-copy.qcow2"]),
}
#: Seconds that each takes at least.
SECONDS = 2
AS_BEFORE = ["top.qcow2", "middle.qcow2", "base.qcow2"]

operations = pytest.mark.parametrize("operation", OPERATIONS)
times = pytest.mark.parametrize("time", range(TIMES))


class KilledError(BaseException):
    """The worker is gone, in the midst of it."""


def begun(operation: str, row: Guest, folder: Path) -> tuple[Job, list[str]]:
    kind, names, mib, after = OPERATIONS[operation]
    options = {name: str(folder / image) for name, image in names.items()}
    return submit(kind, row, bandwidth_bytes_sec=(mib << 20) // SECONDS, **options), after


def die() -> None:
    raise KilledError


def dies_in(job: Job, within: AbstractContextManager[object]) -> None:
    """Its worker runs it within something that ends the worker, and the next one may have it."""
    with within, pytest.raises(KilledError):
        runner.run(job.pk)
    heart.release(job)
    falls_silent(job)


def all_agree(guest: LibvirtGuest, folder: Path, after: list[str]) -> None:
    """The running guest, its definition, and what was acknowledged."""
    assert chain_of(guest) == after
    assert definition_of(guest) == after[0]
    assert not guest.domain.blockJobInfo("vda", 0)
    whole(guest, folder / after[0], acknowledged(guest))


def falls_silent(job: Job) -> None:
    """Its worker's last heartbeat is long ago."""
    Job.objects.filter(pk=job.pk).update(heartbeat=timezone.now() - claims.LEASE - timedelta(seconds=1))
    reaper.reap()
    job.refresh_from_db()


@times
@operations
def test_a_worker_that_dies_is_followed_by_the_next_one(on_chain: OnChain, operation: str, time: int) -> None:
    guest, row, folder = on_chain
    with writing(guest):
        job, after = begun(operation, row, folder)
        dies_in(job, at_stage("mirroring", die))
        assert (job.state, job.locks.exists()) == ("queued", True)
        succeeded(run(job))
        wait_for_writes(guest, 2)
    all_agree(guest, folder, after)
    assert any("taken over" in line for line in said(job))


@pytest.mark.parametrize("stage", ["started", "ready", "pivoting"])
def test_a_worker_that_dies_at_any_stage_is_followed(on_chain: OnChain, stage: str) -> None:
    guest, row, folder = on_chain
    with writing(guest):
        job, after = begun("active commit", row, folder)
        dies_in(job, at_stage(stage, die))
        succeeded(run(job))
    all_agree(guest, folder, after)


def test_layers_of_a_merge_that_ended_while_nobody_looked_are_known_as_merged_once_the_guest_is_off(
    on_chain: OnChain, settings: Any
) -> None:
    settings.LOOK_SECONDS = 60.0
    guest, row, folder = on_chain
    job, after = begun("commit", row, folder)
    with at_stage("mirroring", die), pytest.raises(KilledError):
        runner.run(job.pk)
    heart.release(job)
    wait_until(lambda: chain_of(guest) == after, 60, "QEMU has merged it")
    guest.stop()
    falls_silent(job)
    run(job)
    assert (job.state, job.error_code) == ("failed", follow.GUEST_ENDED)
    merged = image_at(folder / "middle.qcow2")
    assert (merged.merged or {}).get("job") == job.pk
    scan(job.host)
    assert reread(merged).state == Image.State.MERGED


def test_one_that_dies_before_anything_is_begun_is_begun_by_the_next(on_chain: OnChain) -> None:
    guest, row, folder = on_chain
    job, after = begun("pull", row, folder)
    dies_in(job, mock.patch.object(block_jobs.Program, "follow", side_effect=KilledError))
    succeeded(run(job))
    assert chain_of(guest) == after


def test_a_block_job_of_somebody_else_is_neither_taken_over_nor_ended(on_chain: OnChain) -> None:
    guest, row, folder = on_chain
    job, _after = begun("copy", row, folder)
    dies_in(job, mock.patch.object(block_jobs.Program, "follow", side_effect=KilledError))
    theirs = f"<disk type='file'><source file='{folder}/theirs.qcow2'/><driver type='qcow2'/></disk>"
    guest.domain.blockCopy("vda", theirs, {}, libvirt.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB)
    job = run(job)
    assert (job.state, job.error_code) == ("failed", "stale_plan"), (job.error_detail, said(job))
    assert guest.domain.blockJobInfo("vda", 0)
    assert chain_of(guest) == AS_BEFORE


@times
@operations
def test_a_worker_that_is_told_to_end_leaves_the_job_to_the_next_one(
    on_chain: OnChain, operation: str, time: int
) -> None:
    guest, row, folder = on_chain
    with writing(guest):
        job, after = begun(operation, row, folder)
        with at_stage("mirroring", runner.stopping.set):
            run(job)
        runner.stopping.clear()
        assert (job.state, job.locks.exists()) == ("queued", True)
        assert chain_of(guest) == AS_BEFORE
        succeeded(run(job))
    all_agree(guest, folder, after)


@times
@operations
def test_a_cancel_between_two_workers_reaches_the_next_one(on_chain: OnChain, operation: str, time: int) -> None:
    guest, row, folder = on_chain
    with writing(guest):
        job, _after = begun(operation, row, folder)
        dies_in(job, at_stage("mirroring", die))
        services.cancel(OPERATOR, job)
        assert job.state == "queued"
        run(job)
        assert job.state == "cancelled", (job.error_detail, said(job))
    all_agree(guest, folder, AS_BEFORE)


@times
@operations
def test_libvirtd_is_restarted_meanwhile(on_chain: OnChain, domains: Domains, operation: str, time: int) -> None:
    guest, row, folder = on_chain
    qemu = pid_of(guest)
    with writing(guest):
        job, after = begun(operation, row, folder)
        with at_stage("mirroring", daemons.restart):
            succeeded(run(job))
        domains.reconnect(guest)
    assert pid_of(guest) == qemu, "it is another QEMU"
    all_agree(guest, folder, after)


@pytest.mark.parametrize("operation", ["pull", "copy"])
def test_a_libvirtd_that_dies_while_it_is_asked_to_begin_is_asked_again(
    on_chain: OnChain, domains: Domains, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """QEMU is held, so that libvirtd waits for it, is killed, and QEMU finds what it was told."""
    guest, row, folder = on_chain
    job, after = begun(operation, row, folder)
    qemu = pid_of(guest)

    def dies() -> None:
        clock.sleep(3)
        daemons.kill()
        os.kill(qemu, signal.SIGCONT)
        daemons.restart()

    dying = threading.Thread(target=dies)

    def held(*_: object) -> None:
        os.kill(qemu, signal.SIGSTOP)
        dying.start()

    do_after(monkeypatch, kinds, "keep", held)
    run(job)
    dying.join()
    succeeded(job)
    domains.reconnect(guest)
    assert (chain_of(guest), definition_of(guest), patterns(guest)) == (after, after[0], PATTERNS)


def test_a_cancel_while_libvirtd_is_away_ends_the_job_and_says_that_qemu_may_go_on(
    on_chain: OnChain, domains: Domains
) -> None:
    guest, row, folder = on_chain
    job, after = begun("pull", row, folder)

    def goes_away() -> None:
        daemons.stop()
        services.cancel(OPERATOR, job)

    with at_stage("mirroring", goes_away):
        run(job)
    daemons.restart()
    domains.reconnect(guest)
    assert (job.state, job.error_code) == ("interrupted", "interrupted")
    wait_until(lambda: chain_of(guest) == after, 60, "QEMU has done it")
    assert patterns(guest) == PATTERNS


@times
@operations
def test_a_guest_that_is_killed_meanwhile_keeps_what_was_acknowledged(
    on_chain: OnChain, chain: list[Path], operation: str, time: int
) -> None:
    guest, row, folder = on_chain
    last: list[int] = []

    def kill() -> None:
        last.append(acknowledged(guest))
        guest.domain.destroy()

    job, _after = begun(operation, row, folder)
    begin(guest)
    with at_stage("mirroring", kill):
        run(job)
    assert (job.state, job.error_code) == ("failed", follow.GUEST_ENDED)
    assert definition_of(guest) == "top.qcow2"
    assert not (folder / "top-copy.qcow2").exists()
    whole(guest, chain[0], last[0])


@operations
def test_a_reset_a_second_job_and_a_snapshot_by_virsh_meanwhile_change_nothing(
    domains: Domains, chain: list[Path], operation: str
) -> None:
    guest, folder = domains.run([Disk(chain[0])], on_reboot="restart"), chain[0].parent
    __, row = scanned(folder, guest)
    job, after = begun(operation, row, folder)
    refused: list[str] = []
    last: list[int] = []

    def at_once() -> None:
        other = "active commit" if operation == "pull" else "pull"
        refused.append(refused_as(begun, other, row, folder))
        command = ["virsh", "snapshot-create-as", guest.name, "now", "--disk-only"]
        refused.append(subprocess.run(command, capture_output=True, text=True, check=False).stderr)
        last.append(acknowledged(guest))
        guest.domain.reset()

    begin(guest)
    with at_stage("mirroring", at_once):
        succeeded(run(job))
    assert (refused[0], "block" in refused[1]) == ("busy", True)
    assert (chain_of(guest), definition_of(guest)) == (after, after[0])
    guest.domain.destroy()
    check(folder / after[0], last[0])


@operations
def test_a_job_that_somebody_aborts_by_virsh_has_failed_and_says_what_stands(on_chain: OnChain, operation: str) -> None:
    guest, row, folder = on_chain
    with writing(guest):
        job, _after = begun(operation, row, folder)
        with at_stage("mirroring", lambda: guest.domain.blockJobAbort("vda", 0)):
            run(job)
        assert (job.state, job.error_code) == ("failed", "tool_failed")
    all_agree(guest, folder, AS_BEFORE)
    assert not (folder / "top-copy.qcow2").exists()
