"""Digging that ends before its end has won what it has dug until then; a swap that nobody recorded has happened."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from storage_admin.hosts.session import AgentSession
from storage_admin.jobs import reaper, runner, services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests.agent.harness import leftovers
from tests.harness.patching import do_after, do_before, raising
from tests.working import ADMIN, OPERATOR, allocated, image_at, reread, run, said, scan, succeeded, this_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]

MIB = 1 << 20
SLOW: dict[str, Any] = {"method": "in_place", "bandwidth_bytes_sec": MIB}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A raw image of 4 MiB, three quarters of it zeros that occupy the disk."""
    pool = tmp_path / "pool"
    pool.mkdir()
    (pool / "disk.raw").write_bytes((b"x" * 65536 + bytes(3 * 65536)) * 16)
    scan(this_machine(pool))
    return pool / "disk.raw"


def recovered(job: Job) -> Job:
    """After what is done about a job whose worker is gone."""
    Job.objects.filter(pk=job.pk, state="running").update(heartbeat=timezone.now() - timedelta(minutes=5))
    reaper.reap()
    Job.objects.filter(pk=job.pk).update(finished=timezone.now() - timedelta(seconds=1))
    reaper.recover_hosts()
    succeeded(run(Job.objects.get(kind="recover", state="queued")))
    return reread(job)


def test_digging_that_is_cancelled_has_won_what_was_dug(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = allocated(path)

    def and_cancel(recorder: Recorder) -> None:
        recorder.cancel_requested |= allocated(path) < before

    do_after(monkeypatch, Recorder, "tick", and_cancel)
    job = work("reclaim", image_at(path).pk, OPERATOR, **SLOW)
    assert job.state == "cancelled", (job.error_detail, said(job))
    assert 0 < before - allocated(path) < 3 * MIB
    assert (job.before_bytes, job.after_bytes) == (before, allocated(path))
    assert (job.freed_bytes, job.space_pool) == (before - allocated(path), image_at(path).pool)
    assert job.freed_at is not None


def test_digging_whose_agent_was_killed_is_measured_by_the_recovery(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = allocated(path)
    with monkeypatch.context() as patched:
        do_before(patched, AgentSession, "send", lambda session, _: threading.Timer(1.5, session._process.kill).start())
        job = work("reclaim", image_at(path).pk, OPERATOR, **SLOW)
    assert (job.state, job.freed_bytes) == ("interrupted", None)
    recovered(job)
    assert (job.state, job.freed_bytes) == ("interrupted", before - allocated(path))
    assert 0 < (job.freed_bytes or 0) < 3 * MIB
    assert any("bytes were freed before the job was interrupted" in line for line in said(job))


def dead(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job whose worker dies between the agent's result and its record."""
    with monkeypatch.context() as patched:
        patched.setattr(runner, "_end_well", raising(SystemExit()))
        with pytest.raises(SystemExit):
            run(job)
    return job


def unrecorded(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The same, and the host was recovered."""
    return recovered(dead(job, monkeypatch))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("reclaim", {"method": "copy", "undo_hours": 0}),
        ("convert", {"format": "qcow2", "replace": True, "undo_hours": 0}),
        ("convert", {"format": "qcow2"}),
    ],
)
def test_a_swap_without_an_undo_copy_that_nobody_recorded_has_succeeded(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    """Its journal was gone as well: what the agent said before the swap tells that the file is the one it made."""
    pool, before = path.parent, allocated(path)
    job = succeeded(unrecorded(services.submit(ADMIN, kind, image_at(path).pk, options), monkeypatch))
    assert leftovers(pool) == set()
    assert job.freed_bytes == before - sum(map(allocated, pool.iterdir()))
    run(Job.objects.get(kind="scan", state="queued"))
    made = path.with_suffix(".qcow2") if kind == "convert" else path
    assert (image_at(made).state, image_at(made).allocated_size) == ("ok", allocated(made))


def test_a_job_that_was_cut_off_before_its_swap_stays_interrupted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inode, before = path.stat().st_ino, allocated(path)
    with monkeypatch.context() as patched:
        patched.setattr(AgentSession, "go", lambda session, _generation: session._process.kill())
        job = work("reclaim", image_at(path).pk, ADMIN, method="copy", undo_hours=0)
    assert "ready" in job.kept
    recovered(job)
    assert (job.state, job.freed_bytes) == ("interrupted", None)
    assert (path.stat().st_ino, allocated(path), leftovers(path.parent)) == (inode, before, set())


def test_a_removal_that_nobody_recorded_knows_whether_the_copy_had_another_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = work("reclaim", image_at(path).pk, ADMIN, method="copy", undo_hours=5)
    run(Job.objects.get(kind="scan", state="queued"))
    (path.parent / "kept").hardlink_to(path.parent / f".sa-{job.uid}.orig")
    removal = unrecorded(services.discard_undo(ADMIN, job), monkeypatch)
    assert (removal.state, reread(job).undo_state) == ("succeeded", "discarded")
    assert job.freed_bytes == -allocated(path)


@pytest.mark.parametrize("scanned", [False, True], ids=["as recovery finds it", "when a scan was before"])
def test_an_undo_that_nobody_recorded_and_that_gave_a_name_back_has_happened(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, scanned: bool
) -> None:
    """A conversion had given the image another name: under that nothing is any more, the journal is gone as well."""
    inode, before, image = path.stat().st_ino, allocated(path), image_at(path)
    job = succeeded(work("convert", image.pk, ADMIN, format="qcow2", replace=True, undo_hours=5))
    if scanned:
        do_before(monkeypatch, reaper, "recover_hosts", lambda: scan(image.host))
    undo = unrecorded(services.undo(ADMIN, job), monkeypatch)
    assert (undo.state, reread(job).undo_state, job.freed_bytes, undo.freed_bytes) == ("succeeded", "undone", 0, None)
    assert (path.stat().st_ino, leftovers(path.parent)) == (inode, set())
    run(Job.objects.get(kind="scan", state="queued"))
    assert (reread(image).path, image.state, image.allocated_size) == (str(path), "ok", before)
    assert (image.format, image.missing_since) == ("raw", None)


@pytest.mark.parametrize("instead", [False, True], ids=["no folder", "an empty folder"])
@pytest.mark.parametrize(
    "options", [{"method": "copy"}, {"format": "qcow2", "replace": True}], ids=["reclaim", "convert"]
)
def test_what_a_recovery_cannot_see_is_settled_by_a_later_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], *, instead: bool
) -> None:
    """An undo without a trace, on a filesystem that is not mounted when its host is recovered."""
    kind = "convert" if "format" in options else "reclaim"
    job = work(kind, image_at(path).pk, ADMIN, **options, undo_hours=5)
    Job.objects.filter(state="queued").delete()
    undo = dead(services.undo(ADMIN, job), monkeypatch)
    pool = path.parent
    pool.rename(elsewhere := pool.with_name("elsewhere"))
    if instead:
        pool.mkdir()
    recovered(undo)
    assert (undo.state, undo.needs_recovery, reread(job).undo_state) == ("interrupted", True, "available")
    if instead:
        pool.rmdir()
    elsewhere.rename(pool)
    run(services.submit(ADMIN, "recover", undo.host_id, {}))
    assert (reread(undo).state, undo.needs_recovery, reread(job).undo_state) == ("succeeded", False, "undone")
