"""Who holds a job. Every change is a compare-and-set on state and generation: one row, or somebody else was first."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from storage_admin.agent import protocol
from storage_admin.hosts.models import Host
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job, JobLog, ResourceLock

HEARTBEAT_INTERVAL = 10.0
#: A job without a heartbeat for so long has lost its worker. It is longer than the silence after which the agent ends
#: by itself: a job that is called interrupted has no agent at work any more.
LEASE = timedelta(seconds=protocol.SILENCE_LIMIT + HEARTBEAT_INTERVAL)


def claim(job_id: int, worker: str) -> Job | None:
    """Takes a queued job.

    Returns:
        The job, running and ours; ``None`` when it is not queued any more, or has to wait (which its row then says).
    """
    with transaction.atomic():
        job = Job.objects.select_related("host").filter(pk=job_id, state=Job.State.QUEUED).first()
        if job is None:
            return None
        # On PostgreSQL the host's row orders the claims; SQLite's immediate transaction does it by itself.
        Host.objects.select_for_update().get(pk=job.host_id)
        if waiting_for := _must_wait(job):
            if waiting_for != job.waiting_for:
                Job.objects.filter(pk=job.pk, state=Job.State.QUEUED).update(waiting_for=waiting_for)
            return None
        now = timezone.now()
        taken = Job.objects.filter(pk=job.pk, state=Job.State.QUEUED, generation=job.generation).update(
            state=Job.State.RUNNING, generation=job.generation + 1, worker=worker, heartbeat=now, started=now,
            waiting_for="", stage="starting",
        )  # fmt: skip
        if taken != 1:
            return None
        log(job, f"started by {worker}")
        job.refresh_from_db()
    return job


def _must_wait(job: Job) -> str:
    running = Job.objects.filter(host=job.host_id, state=Job.State.RUNNING)
    if job.rewrites and running.filter(rewrites=True).count() >= job.host.max_jobs:
        return f"a free slot on {job.host.name} ({job.host.max_jobs} rewriting at once)"
    if kinds.get(job.kind).single and running.filter(kind=job.kind).exists():
        return f"the {job.kind} at work on {job.host.name}"
    return ""


def ours(job: Job) -> Any:
    """The row, as long as it is running and of our generation; for ``update``."""
    return Job.objects.filter(pk=job.pk, state=Job.State.RUNNING, generation=job.generation)


def may_swap(job: Job) -> bool:
    """Whether the agent may rename now: asked by the controller in the moment before it says ``go``."""
    return bool(ours(job).filter(cancel_requested=False).update(stage="swapping", heartbeat=timezone.now()) == 1)


def beat(worker: str, held: Iterable[tuple[int, int]]) -> None:
    """Says that the worker still holds these jobs (pairs of id and generation)."""
    now = timezone.now()
    for job_id, generation in held:
        Job.objects.filter(pk=job_id, state=Job.State.RUNNING, generation=generation, worker=worker).update(
            heartbeat=now
        )


def finish(job: Job, state: str, **columns: Any) -> bool:
    """Ends a job that is ours, and gives its locks back. Call it within the transaction that records the result.

    Returns:
        ``False`` when the job is not ours any more: then nothing may be recorded.
    """
    now = timezone.now()
    if ours(job).update(state=state, finished=now, eta_seconds=None, bytes_per_sec=None, **columns) != 1:
        return False
    ResourceLock.objects.filter(job=job).delete()
    log(job, f"ended: {state}" + (f" ({columns['error_code']})" if columns.get("error_code") else ""))
    return True


def log(job: Job, text: str, level: str = JobLog.Level.INFO) -> None:
    """Adds a line to the job's log."""
    JobLog.objects.create(job=job, level=level, text=text)
