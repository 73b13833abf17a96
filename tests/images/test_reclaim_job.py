"""Reclaim, undo, discard and recover as jobs, with the real agent on real images: the numbers, and what is on disk."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.utils import timezone

from images import tasks
from images.models import Image
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import Host
from storage_admin.hosts.services import remove_pool
from storage_admin.hosts.session import AgentSession
from storage_admin.jobs import reaper, services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests import passing
from tests.agent.harness import image_info, leftovers, make_image, same_content, write
from tests.agent.test_in_place_refusals import CAPABILITIES
from tests.harness.patching import do_after, do_before
from tests.ledger.test_cut_off import dead
from tests.working import (
    ADMIN,
    OPERATOR,
    allocated,
    create,
    digests,
    image_at,
    refused_as,
    reread,
    run,
    scan,
    succeeded,
    this_machine,
    work,
)

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]


def reclaim(path: Path, **options: Any) -> Job:
    return succeeded(work("reclaim", image_at(path).pk, OPERATOR, **options))


def rescan(host: Host) -> None:
    """What a job asks for at its end."""
    run(Job.objects.get(kind="scan", state="queued"))


def test_a_reclaim_says_what_the_disk_says(path: Path) -> None:
    before = allocated(path)
    job = reclaim(path)
    result = job.result or {}
    copy = path.parent / f".sa-{job.uid}.orig"
    assert result["before_bytes"] == before == allocated(copy)
    assert result["after_bytes"] == allocated(path) < before
    assert (result["held_bytes"], result["freed_bytes"], result["freed_at"]) == (before, 0, None)
    assert (job.undo_state, job.undo_bytes) == ("available", before)
    assert timedelta(hours=23) < job.undo_expires - timezone.now() <= timedelta(hours=24)  # type: ignore[operator]
    assert same_content(path, path.parent.parent / "copy.qcow2")
    image = image_at(path)
    assert (image.inode, image.allocated_size, image.state) == (str(path.stat().st_ino), allocated(path), "ok")
    assert image.pool.undo_bytes == before
    rescan(image.host)
    image = image_at(path)
    assert (image.file_size, image.pool.undo_bytes) == (path.stat().st_size, before)
    assert image.pool.allocated_bytes == allocated(path)
    assert any(command["argv"][1] == "convert" for command in job.commands)


def test_without_an_undo_copy_it_is_freed_at_once(path: Path) -> None:
    before = allocated(path)
    job = reclaim(path, undo_hours=0)
    result = job.result or {}
    assert (result["held_bytes"], result["freed_bytes"]) == (0, before - allocated(path))
    assert result["freed_at"] is not None
    assert (job.undo_state, leftovers(path.parent)) == ("none", set())
    assert refused_as(services.undo, OPERATOR, job) == "undo_missing"


def test_an_image_with_nothing_to_win_stays_the_file_that_it_is(path: Path) -> None:
    reclaim(path, undo_hours=0)
    rescan(image_at(path).host)
    inode = path.stat().st_ino
    job = reclaim(path)
    result = job.result or {}
    assert (result["swapped"], result["freed_bytes"], result["held_bytes"]) == (False, 0, 0)
    assert (result["freed_at"], job.undo_state, path.stat().st_ino) == (None, "none", inode)
    assert leftovers(path.parent) == set()


def test_an_undo_brings_the_original_back_and_nothing_was_won(path: Path) -> None:
    inode, before = path.stat().st_ino, allocated(path)
    job = reclaim(path)
    succeeded(run(services.undo(OPERATOR, job)))
    assert (path.stat().st_ino, leftovers(path.parent)) == (inode, set())
    assert (reread(job).undo_state, job.undo_bytes) == ("undone", 0)
    assert ((job.result or {})["freed_bytes"], (job.result or {})["held_bytes"]) == (0, 0)
    image = image_at(path)
    assert (image.inode, image.allocated_size, image.pool.undo_bytes) == (str(inode), before, 0)
    with pytest.raises(RefusedError, match="already undone"):
        services.undo(OPERATOR, job)


def test_what_was_written_since_is_lost_only_where_an_admin_forces_it(path: Path) -> None:
    job = reclaim(path)
    write(path, 0x42, "1M", "64k")
    written = digests(path.parent)
    undo = run(services.undo(OPERATOR, job))
    assert (undo.state, undo.error_code) == ("failed", "undo_written_to")
    assert digests(path.parent) == written
    assert reread(job).undo_state == "available"
    succeeded(run(services.undo(ADMIN, job, force=True)))
    assert same_content(path, path.parent.parent / "copy.qcow2")


def test_file_capabilities_outlast_a_reclaim(path: Path) -> None:
    """Holes would take them away, which a copy gets."""
    os.setxattr(path, "security.capability", CAPABILITIES)
    scan(image_at(path).host)
    image = image_at(path)
    plan = services.plan(OPERATOR, "reclaim", image.pk, {"method": "in_place"})
    assert [refusal.code for refusal in plan.refusals] == ["unsupported_subformat"]
    assert services.plan(OPERATOR, "reclaim", image.pk, {}).method != "in_place"
    assert reclaim(path).state == "succeeded"
    assert os.getxattr(path, "security.capability") == CAPABILITIES


def test_a_base_is_not_put_back_by_force_below_its_overlays(path: Path) -> None:
    job = reclaim(path)
    write(path, 0x42, "1M", "64k")
    create(path.with_name("overlay.qcow2"), base=path.name)
    scan(image_at(path).host)
    assert refused_as(services.undo, ADMIN, job, force=True) == "has_overlays"


def test_an_earlier_job_is_not_undone_before_the_later_one(path: Path) -> None:
    first = reclaim(path)
    rescan(image_at(path).host)
    write(path, 0, "1M", "1M")
    scan(image_at(path).host)
    second = reclaim(path)
    undo = run(services.undo(OPERATOR, first))
    assert (undo.state, undo.error_code) == ("failed", "stale_plan")
    assert run(services.undo(OPERATOR, second)).state == "succeeded"


def test_discarding_an_undo_copy_frees_what_it_held(path: Path) -> None:
    before = allocated(path)
    job = reclaim(path)
    succeeded(run(services.discard_undo(ADMIN, job)))
    result = reread(job).result or {}
    assert (job.undo_state, result["held_bytes"]) == ("discarded", 0)
    assert result["freed_bytes"] == before - allocated(path)
    assert result["freed_at"] is not None
    assert leftovers(path.parent) == set()
    assert image_at(path).pool.undo_bytes == 0


def test_an_undo_copy_goes_when_its_window_closes(path: Path) -> None:
    job = reclaim(path, undo_hours=1)
    tasks.expire_undo()
    assert not Job.objects.filter(kind="discard_undo").exists()
    passing.undo_window(job)
    tasks.expire_undo()
    tasks.expire_undo()
    run(Job.objects.get(kind="discard_undo"))
    assert (reread(job).undo_state, leftovers(path.parent)) == ("expired", set())
    assert (job.result or {})["freed_bytes"] > 0


def test_an_undo_copy_that_cannot_be_removed_now_is_tried_again_later(path: Path) -> None:
    job = reclaim(path, undo_hours=1)
    passing.undo_window(job)
    path.parent.rename(path.parent.parent / "unmounted")
    tasks.expire_undo()
    assert run(Job.objects.get(kind="discard_undo")).state == "failed"
    tasks.expire_undo()
    assert Job.objects.filter(kind="discard_undo").count() == 1
    assert reread(job).undo_state == "available"
    (path.parent.parent / "unmounted").rename(path.parent)
    Job.objects.filter(kind="discard_undo").update(finished=timezone.now() - tasks.TRY_AGAIN)
    tasks.expire_undo()
    assert run(Job.objects.get(kind="discard_undo", state="queued")).state == "succeeded"


def test_a_pool_with_undo_copies_is_not_forgotten(path: Path) -> None:
    job = reclaim(path)
    pool = image_at(path).pool
    with pytest.raises(InvalidError, match="undo copies"):
        remove_pool(ADMIN, pool)
    run(services.discard_undo(ADMIN, job))
    remove_pool(ADMIN, pool)
    assert not Image.every.exists()


def test_an_image_that_changed_since_the_plan_is_left_alone(path: Path) -> None:
    job = services.submit(OPERATOR, "reclaim", image_at(path).pk, {})
    write(path, 0x42, "1M", "64k")
    before = digests(path.parent)
    job = run(job)
    assert (job.state, job.error_code) == ("failed", "stale_plan")
    assert digests(path.parent) == before


def test_a_replaced_image_that_vanishes_before_it_was_read_again_is_missing(path: Path) -> None:
    reclaim(path, undo_hours=0)
    path.unlink()
    rescan(image_at(path).host)
    assert image_at(path).state == "missing"


def at_stage(monkeypatch: pytest.MonkeyPatch, stage: str, act: Callable[[AgentSession], None]) -> None:
    """Does something to the agent when the job comes to a stage."""
    sessions: list[AgentSession] = []

    def look(_: Recorder, event: dict[str, Any]) -> None:
        if event["stage"] == stage and sessions:
            act(sessions.pop())

    do_before(monkeypatch, AgentSession, "__enter__", sessions.append)
    do_after(monkeypatch, Recorder, "progress", look)


@pytest.mark.parametrize("stage", ["checking", "copying", "verifying", "syncing", "swapping"])
def test_an_agent_that_is_killed_leaves_the_original_or_the_result_and_recovery_clears_the_rest(
    monkeypatch: pytest.MonkeyPatch, path: Path, stage: str
) -> None:
    before = allocated(path)
    with monkeypatch.context() as patched:
        at_stage(patched, stage, lambda session: os.kill(session.pid, signal.SIGKILL))
        job = work("reclaim", image_at(path).pk)
    assert (job.state, job.error_code, job.needs_recovery) == ("interrupted", "interrupted", True)
    assert "signal 9" in job.error_detail
    assert same_content(path, path.parent.parent / "copy.qcow2")
    reaper.recover_hosts()
    recovery = run(Job.objects.get(kind="recover"))
    assert (recovery.state, reread(job).needs_recovery) == ("succeeded", False)
    if job.state == "succeeded":
        assert (job.result or {})["held_bytes"] == before
    else:
        assert (job.state, allocated(path), leftovers(path.parent)) == ("interrupted", before, set())


@pytest.mark.parametrize("stage", ["checking", "copying", "verifying", "syncing", "swapping"])
def test_an_agent_that_stands_still_ends_when_it_is_cancelled_and_recovery_clears_the_rest(
    monkeypatch: pytest.MonkeyPatch, path: Path, stage: str
) -> None:
    """As on a disk that answers no more: nothing there hears that it is to stop."""
    stopped: list[psutil.Process] = []

    def stop(session: AgentSession) -> None:
        agent = psutil.Process(session.pid)
        agent.suspend()
        stopped.extend([agent, *agent.children(recursive=True)])
        services.cancel(OPERATOR, Job.objects.get(kind="reclaim"))

    before = allocated(path)
    with monkeypatch.context() as patched:
        patched.setattr("storage_admin.hosts.session.STOP_TIMEOUT", 0.5)
        at_stage(patched, stage, stop)
        job = work("reclaim", image_at(path).pk)
    assert (job.state, job.error_code, job.needs_recovery) == ("interrupted", "interrupted", True)
    assert "has not responded for" in job.error_detail
    _, alive = psutil.wait_procs(stopped, 5)
    assert stopped
    assert not alive
    reaper.recover_hosts()
    recovery = run(Job.objects.get(kind="recover"))
    assert (recovery.state, reread(job).needs_recovery) == ("succeeded", False)
    assert (job.state, allocated(path), leftovers(path.parent)) == ("interrupted", before, set())
    assert same_content(path, path.parent.parent / "copy.qcow2")


def test_a_swap_that_nobody_recorded_is_a_success_after_recovery(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The worker dies between its go and the agent's result."""
    before = allocated(path)
    job = dead(services.submit(OPERATOR, "reclaim", image_at(path).pk, {"undo_hours": 5}), monkeypatch)
    Job.objects.filter(pk=job.pk).update(heartbeat=timezone.now() - timedelta(minutes=5))
    assert reaper.reap() == 1
    assert (reread(job).state, job.needs_recovery) == ("interrupted", True)
    succeeded(run(Job.objects.get(kind="recover")))
    result = reread(job).result or {}
    assert (job.state, job.error_code, job.needs_recovery) == ("succeeded", "", False)
    assert (result["before_bytes"], result["after_bytes"]) == (before, allocated(path))
    assert (result["held_bytes"], result["freed_bytes"]) == (before, 0)
    assert (job.undo_state, job.undo_bytes) == ("available", before)
    assert timedelta(hours=4) < job.undo_expires - timezone.now() <= timedelta(hours=5)  # type: ignore[operator]
    assert image_at(path).inode == str(path.stat().st_ino)
    assert run(services.undo(OPERATOR, job)).state == "succeeded"


def test_a_bug_after_the_swap_is_put_right_by_recovery(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("images.rewrite.record.image_replaced", lambda *_: 1 / 0)
        job = work("reclaim", image_at(path).pk)
    assert (job.state, job.error_code, job.needs_recovery, job.undo_state) == ("failed", "bug", True, "none")
    reaper.recover_hosts()
    run(Job.objects.get(kind="recover"))
    assert (reread(job).state, job.error_code, job.undo_state) == ("succeeded", "", "available")


def test_recovery_of_nothing_changes_nothing(path: Path) -> None:
    job = reclaim(path)
    before = (digests(path.parent), Job.objects.values().get(pk=job.pk))
    succeeded(work("recover", image_at(path).host_id))
    assert (digests(path.parent), Job.objects.values().get(pk=job.pk)) == before


def test_a_job_that_ends_while_a_recovery_looks_elsewhere_waits_for_the_next_one(path: Path) -> None:
    image = image_at(path)
    late = Job.objects.create(
        kind="reclaim", rewrites=True, host=image.host, target_kind="image", target_id=image.pk, state="interrupted",
        needs_recovery=True, finished=timezone.now() + timedelta(seconds=60), created_by="x",
    )  # fmt: skip
    work("recover", image.host_id)
    assert reread(late).needs_recovery


def test_a_cancelled_reclaim_is_gone_within_five_seconds_and_left_nothing(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    before, began = digests(path.parent), []
    job = services.submit(OPERATOR, "reclaim", image_at(path).pk, {"bandwidth_bytes_sec": 1_048_576})

    def cancel(_: AgentSession) -> None:
        services.cancel(OPERATOR, job)
        began.append(time.monotonic())

    at_stage(monkeypatch, "copying", cancel)
    job = run(job)
    assert time.monotonic() - began[0] < 5
    assert (job.state, job.error_code, job.locks.count()) == ("cancelled", "", 0)
    assert digests(path.parent) == before


@pytest.mark.parametrize(
    "name", [b"-f.qcow2", b"a,b.qcow2", b"two\nlines.qcow2", b"\xff\xfe\x1b[31m.qcow2", b"nbd:x.qcow2"]
)
def test_any_name_is_reclaimed_and_undone(pool: Path, name: bytes) -> None:
    path = Path(os.fsdecode(bytes(pool) + b"/" + name))
    make_image(path)
    subprocess.run(["cp", path, pool.parent / "copy.qcow2"], check=True)
    scan(this_machine(pool))
    before = allocated(path)
    job = reclaim(path)
    assert allocated(path) < before
    assert same_content(bytes(path), bytes(pool.parent / "copy.qcow2"))
    assert run(services.undo(OPERATOR, job)).state == "succeeded"
    assert allocated(path) == before


def test_an_overlay_keeps_its_base_and_the_base_its_overlays(pool: Path) -> None:
    make_image(pool / "base.qcow2")
    top = pool / "top.qcow2"
    make_image(top, base="base.qcow2")
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", top, pool.parent / "flat.qcow2"], check=True)
    scan(this_machine(pool))
    base_before = digests(pool)["base.qcow2"]
    reclaim(top)
    assert image_info(top)["backing-filename"] == "base.qcow2"
    assert digests(pool)["base.qcow2"] == base_before
    rescan(image_at(top).host)
    reclaim(pool / "base.qcow2")
    assert same_content(top, pool.parent / "flat.qcow2")
