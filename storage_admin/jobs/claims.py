"""Who holds a job. Every change is a compare-and-set on state and generation: one row, or somebody else was first.

What others are told when a job has ended, and what the audit trail keeps of it.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from storage_admin.accounts.models import Actor, Role, audit
from storage_admin.agent import protocol
from storage_admin.agent.protocol import unb64
from storage_admin.events import services as events
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import display
from storage_admin.jobs import automation, kinds, routing, sealed
from storage_admin.jobs.kinds import JobKind, Wait
from storage_admin.jobs.models import Job, JobLog, ResourceLock

#: What is told of a result where it has it; sizes in bytes.
BYTES = ("before_bytes", "predicted_after_bytes", "after_bytes", "held_bytes", "freed_bytes")
#: What else the trail keeps of a result: words and numbers, none of them long.
_KEPT = (
    "held_bytes", "freed_bytes", "trimmed_bytes", "disk", "format", "path", "swapped", "of_job", "undone_job",
    "left_as", "task", "effect",
)  # fmt: skip


def tell_end(job_id: int) -> None:
    """Puts ``job.finished`` into the outbox, and what the job has changed into the audit trail. Call it once for each
    end, within the transaction that ends the job, after the row says so.

    A job that was called interrupted and turns out to have succeeded is told of twice: what is told last holds.
    """
    job = Job.objects.select_related("host").defer("plan", "commands", "host__capabilities").get(pk=job_id)
    kind = kinds.find(job.kind)
    if kind is not None and kind.secrets(job.options):
        sealed.forget(job)
    if not kinds.only_looked(job):
        before, after = _change(job)
        # By whom it was asked for; no role is asked for any more.
        audit(Actor(job.created_by, Role.VIEWER), f"{job.kind} ended", job.target_label, before=before, after=after)
    if events.is_awaited(events.JOB_FINISHED):
        events.emit(events.JOB_FINISHED, host=job.host.slug, data=in_short(job))


def close(job: Job) -> None:
    """Gives the locks of a job that has ended back, and tells of its end as :func:`tell_end`."""
    ResourceLock.objects.filter(job=job).delete()
    tell_end(job.pk)


def _change(job: Job) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """What was before a job and what is after it, as far as its row tells: nothing of its log or its plan."""
    result = job.result or {}
    before: dict[str, Any] = {}
    after: dict[str, Any] = {"job": job.pk, "host": job.host.slug, "state": str(job.state)}
    if job.error_code:
        after["code"] = job.error_code
    # One that was cut off has no result; what it had done in place until then stands in its line of the ledger.
    known = result if "before_bytes" in result else {"before_bytes": job.before_bytes, "after_bytes": job.after_bytes}
    # A new file beside the image leaves that as it is.
    if known["before_bytes"] is not None and job.options.get("replace") is not False:
        before["allocated_bytes"] = known["before_bytes"]
    if known.get("after_bytes") is not None:
        after["allocated_bytes"] = known["after_bytes"]
    if "copy_bytes" in result:
        before["undo_bytes"], after["undo_bytes"] = result["copy_bytes"], 0
    if "path" in result and "path_b64" in job.kept:
        before["path"] = display(unb64(job.kept["path_b64"]))
    if isinstance(result.get("before"), dict):
        before |= result["before"]
        after |= result.get("now") or {}
    if isinstance(result.get("recovered"), list):
        outcomes = [str(found.get("outcome")) for found in result["recovered"]]
        after["recovered"] = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    after |= {name: result[name] for name in _KEPT if result.get(name) is not None}
    return before or None, after


def in_short(job: Job) -> dict[str, Any]:
    """A job as receivers are told of it: nothing of its options, and nothing that a tool has printed."""
    result = job.result or {}
    return {
        "id": job.pk,
        "kind": job.kind,
        "state": job.state,
        "host": job.host.slug,
        "host_name": job.host.name,
        "target": {"kind": job.target_kind, "id": job.target_id, "label": job.target_label},
        **{name: result.get(name) for name in BYTES},
        "error_code": job.error_code or None,
        "created_by": job.created_by,
        "created": job.created.isoformat(),
        "started": job.started.isoformat() if job.started else None,
        "finished": job.finished.isoformat() if job.finished else None,
        "url": f"/jobs/{job.pk}/",
    }


#: A job without a heartbeat for so long has lost its worker. It is longer than the silence after which the agent ends
#: by itself: a job that is called interrupted has no agent at work any more, or one that hangs and holds its locks.
LEASE = timedelta(seconds=protocol.SILENCE_LIMIT + routing.HEARTBEAT_INTERVAL)
#: Jobs that this process carries at once; a worker says it when it starts.
threads = 32


def claim(job_id: int, worker: str) -> Job | None:
    """Takes a queued job.

    Returns:
        The job, running and ours; ``None`` when it is not queued any more, is for another worker, or has to wait (which
        its row then says).
    """
    free = Job.objects.select_related("host").filter(pk=job_id, state=Job.State.QUEUED, parked_at=None)
    job = free.first()
    if job is None:
        return None
    if not routing.serves(job.host):
        _leave(job)
        return None
    # Outside of the transaction, because a hypervisor may take its time; nobody is asked for a job that has no slot.
    kind = kinds.get(job.kind)
    confides = bool(kind.secrets(job.options))
    wait = (sealed.missing(job) if confides else None) or kind.must_wait(job, ask=False)
    wait = wait or (None if _must_wait(job, worker) else kind.must_wait(job, ask=True))
    if wait is not None:
        park(job, wait)
        return None
    with transaction.atomic():
        job = free.first()
        if job is None:
            return None
        # On PostgreSQL the host's row orders the claims; SQLite's immediate transaction does it by itself.
        Host.objects.select_for_update().get(pk=job.host_id)
        if waiting_for := _must_wait(job, worker):
            if waiting_for != job.waiting_for:
                Job.objects.filter(pk=job.pk, state=Job.State.QUEUED).update(waiting_for=waiting_for)
            return None
        secrets = sealed.take(job) if confides else {}
        if secrets is None:
            return None  # they were kept for too long in this very moment: it is rung again, and then waits for them
        now = timezone.now()
        taken = Job.objects.filter(pk=job.pk, state=Job.State.QUEUED, generation=job.generation).update(
            state=Job.State.RUNNING, generation=job.generation + 1, worker=worker, heartbeat=now, started=now,
            progressed=now, waiting_for="", stage="starting", start_due=bool(job.options.get("start_after")),
        )  # fmt: skip
        if taken != 1:
            return None
        log(job, f"started by {worker}")
        job.refresh_from_db()
        job.secrets = secrets
    return job


def _leave(job: Job) -> None:
    """The job is for another worker. Where none is alive for it, a general one, which is asked for all, says so."""
    waiting_for = f"a worker on {job.host.name}"[:200]
    if routing.post().general and waiting_for != job.waiting_for and not routing.is_served(job.host):
        Job.objects.filter(pk=job.pk, state=Job.State.QUEUED).update(waiting_for=waiting_for)


def _must_wait(job: Job, worker: str) -> str:
    if held_back := _held_back(job):
        return held_back
    kind = kinds.get(job.kind)
    if silent := kind.waits_for_storage(job):
        return silent
    # One that waits for a storage to answer takes nobody's place.
    running = Job.objects.filter(host=job.host_id, state=Job.State.RUNNING, stalled_since=None)
    if job.rewrites and running.filter(rewrites=True).count() >= job.host.max_jobs:
        return f"a free slot on {job.host.name} (limit: {job.host.max_jobs} rewriting jobs)"
    if kind.single and running.filter(kind=job.kind).exists():
        return f"the running {job.kind} on {job.host.name}"
    if disturbed := _would_disturb(job, kind, running):
        return disturbed
    if kind.share < 1:
        most = max(1, int(threads * kind.share))
        if Job.objects.filter(state=Job.State.RUNNING, worker=worker, kind=job.kind).count() >= most:
            return f"one of the {most} running {job.kind} jobs on other hosts"
    return ""


def _held_back(job: Job) -> str:
    """Why a queued job that was submitted by itself must not begin now; empty where it may.

    Whoever submitted it withdraws it, but perhaps not in time: the scheduler may be away, or all workers busy.
    """
    until = job.kept.get(automation.BEGIN_BEFORE)
    if until is None:
        return ""
    if timezone.now() >= datetime.fromisoformat(until):
        return "its withdrawal, because its window has closed"
    return "automation to be resumed" if automation.is_paused() else ""


def _would_disturb(job: Job, kind: JobKind, running: QuerySet[Job]) -> str:
    """What a job that measures waits for, or who waits for it: a figure taken beside other work is a false one."""
    if not (kind.measures or job.rewrites):
        return ""
    measuring = running.filter(kind__in=[one.name for one in kinds.every() if one.measures])
    at_work = list(measuring.values_list("kind", "options"))
    if kind.measures and at_work:
        return f"the running {at_work[0][0]} on {job.host.name}"
    if kind.measures and not kind.may_disturb(job.options) and running.filter(rewrites=True).exists():
        return f"the running rewriting job on {job.host.name}"
    if kind.urgent:
        return ""
    if job.rewrites and any(not kinds.get(name).may_disturb(options) for name, options in at_work):
        return f"the running {at_work[0][0]} on {job.host.name}"
    return ""


def waited(before: Iterable[dict[str, str]], found: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """The guests that a job waits for, with those found now.

    One of another host, which has no name, is another one than that of this host; one that was renamed is the same.
    """
    return list({(one["kind"], one["uid"], not one["name"]): one for one in (*before, *found)}.values())


def park(job: Job, wait: Wait) -> bool:
    """A queued job waits for something outside. It holds its locks and no slot, and can be cancelled.

    Returns:
        ``False`` when it is not queued any more, or waits already.
    """
    guests = waited(job.waited_guests, wait.guests)
    with transaction.atomic():
        done = Job.objects.filter(
            pk=job.pk, state=Job.State.QUEUED, generation=job.generation, parked_at=None
        ).update(
            parked_at=timezone.now(), wait_until=wait.until, waited_guests=guests, waiting_for=wait.reason[:200],
            parked_for=wait.parked_for,
        )  # fmt: skip
        if done:
            log(job, f"waits for {wait.reason}")
    return bool(done)


def parked(job: Job) -> Any:
    """The row, as long as it waits for something outside as we know it; for ``update``."""
    return Job.objects.filter(pk=job.pk, state=Job.State.QUEUED, parked_at=job.parked_at)


def let_go_on(job: Job, why: str) -> bool:
    """What a job waited for has come: it is queued like any other. Whoever let it go on rings for it.

    Returns:
        ``False`` when it does not wait any more.
    """
    with transaction.atomic():
        # How long it waits for a guest after that, it has not begun to count.
        until = None if job.parked_for == Job.ParkedFor.SECRETS else job.wait_until
        if parked(job).update(parked_at=None, waiting_for="", rung=timezone.now(), wait_until=until) != 1:
            return False
        log(job, why)
    return True


def give_up(job: Job, code: str, detail: str) -> bool:
    """What a job waited for has not come in time: it has failed, nothing was touched, and its locks are given back.

    Returns:
        ``False`` when it does not wait any more.
    """
    with transaction.atomic():
        failed = parked(job).update(
            state=Job.State.FAILED, finished=timezone.now(), waiting_for="", error_code=code, error_detail=detail
        )
        if failed != 1:
            return False
        log(job, f"{code}: {detail}", JobLog.Level.ERROR)
        log(job, f"ended: failed ({code})")
        close(job)
    return True


def hand_over(job: Job, why: str) -> bool:
    """A job whose work goes on outside has lost its worker: it waits for the next one, with its locks.

    Args:
        why: as in "waits for the next worker: …".

    Returns:
        ``False`` when it is not ours any more.
    """
    with transaction.atomic():
        # The generation moves on: whoever still works for the old one has no say any more.
        left = job.ours().update(
            state=Job.State.QUEUED, generation=job.generation + 1, worker="", heartbeat=None, rung=timezone.now(),
            waiting_for="the next worker", eta_seconds=None, bytes_per_sec=None, stalled_since=None,
        )  # fmt: skip
        if left:
            log(job, f"waits for the next worker: {why}; its work goes on meanwhile", JobLog.Level.WARNING)
    return bool(left)


def may_swap(job: Job) -> bool:
    """Whether the agent may rename now: asked by the controller in the moment before it says ``go``."""
    return bool(job.ours().filter(cancel_requested=False).update(stage="swapping", heartbeat=timezone.now()) == 1)


def take_back(job: Job) -> bool:
    """A rewrite that was called interrupted while its worker could not be heard, and whose agent has done it after all:
    it is running and ours again. Call it within the transaction that records the result.

    Nobody else can have done it meanwhile: a rewrite is never started a second time.

    Returns:
        ``False`` when it was not called that: it is ours still, or recovery has told already how it ended.
    """
    lost = Job.objects.filter(
        pk=job.pk, rewrites=True, state=Job.State.INTERRUPTED, generation=job.generation + 1, worker=job.worker
    )
    return bool(lost.update(state=Job.State.RUNNING, generation=job.generation, error_code="", error_detail=""))


def finish(job: Job, state: str, **columns: Any) -> bool:
    """Ends a job that is ours, and gives its locks back. Call it within the transaction that records the result.

    Returns:
        ``False`` when the job is not ours any more: then nothing may be recorded.
    """
    now = timezone.now()
    columns |= {"eta_seconds": None, "bytes_per_sec": None, "stalled_since": None}
    if job.ours().update(state=state, finished=now, **columns) != 1:
        return False
    log(job, f"ended: {state}" + (f" ({columns['error_code']})" if columns.get("error_code") else ""))
    close(job)
    return True


def log(job: Job, text: str, level: str = JobLog.Level.INFO) -> None:
    """Adds a line to the job's log."""
    JobLog.objects.create(job=job, level=level, text=text)
