"""Keeps the rows true when processes die: lost jobs are marked, their hosts recovered, unheard jobs rung again."""

import os
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin.accounts.models import SYSTEM
from storage_admin.agent import protocol
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import claims, kinds, routing, sealed, services
from storage_admin.jobs.models import Job, Worker
from storage_admin.jobs.routing import ring_now

#: A queued job that was rung for so long ago is rung again.
RING_AGAIN = timedelta(seconds=30)
#: After a recovery that failed, the next one waits for so long.
RECOVER_AGAIN = timedelta(minutes=1)
#: The same where an agent is still there that was given up, at most.
RECOVER_HANGING_AGAIN = timedelta(minutes=10)

#: A host with a pool that does not answer is scanned so often.
LOOK_AGAIN = timedelta(minutes=1)


def reap(now: datetime | None = None) -> int:
    """Marks running jobs without a heartbeat as interrupted, and submits recovery where it is due.

    Returns:
        How many jobs were marked.
    """
    now = now or timezone.now()
    lost = Job.objects.filter(state=Job.State.RUNNING).filter(Q(heartbeat__lt=now - claims.LEASE) | Q(heartbeat=None))
    marked = sum(_interrupt(job, "its worker stopped responding") for job in lost.select_related("host"))
    Worker.objects.filter(seen__lt=now - claims.LEASE * 10).delete()
    sealed.tidy(now)
    give_up_waiting(now)
    recover_hosts()
    look_again()
    return marked


def reap_dead_workers() -> int:
    """Marks the jobs of this machine's workers whose processes are gone: a restarted worker waits for no lease."""
    marked = 0
    for worker in Worker.objects.filter(place=routing.place()):
        if _alive(int(worker.name.rsplit(":", 1)[1])):
            continue
        for job in Job.objects.filter(state=Job.State.RUNNING, worker=worker.name).select_related("host"):
            marked += _interrupt(job, "its worker died")
        worker.delete()
    recover_hosts()
    return marked


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # of another user
    return True


def _interrupt(job: Job, why: str) -> int:
    if kinds.goes_on(job):
        if claims.hand_over(job, why):
            ring_now(job.pk)
        return 0
    with transaction.atomic():
        # The generation moves on: whoever still works for the old one is not let go.
        marked = job.ours().update(
            state=Job.State.INTERRUPTED, generation=job.generation + 1, finished=timezone.now(),
            error_code=protocol.INTERRUPTED, needs_recovery=kinds.leaves_traces(job), eta_seconds=None,
            bytes_per_sec=None, stalled_since=None,
            error_detail=f"Interrupted: {why}. {kinds.unsuccessful(job).cut_off}",
        )  # fmt: skip
        if marked:
            claims.log(job, f"interrupted: {why}", "error")
            claims.close(job)
    return int(marked)


def give_up_waiting(now: datetime) -> None:
    """Ends jobs that have waited too long for what somebody was to bring; those that wait for guests are looked after
    by who knows these.
    """
    parked = Job.objects.filter(state=Job.State.QUEUED, parked_at__isnull=False, wait_until__lt=now)
    whole = Job.objects.filter(state=Job.State.QUEUED, parked_at__isnull=False, kept__has_key=kinds.BEGUN)
    for job in whole.filter(parked_for=Job.ParkedFor.BYTES):  # parked in the very moment in which the last ones came
        if claims.let_go_on(job, "all bytes have arrived"):
            ring_now(job.pk)
    for job in parked.exclude(parked_for=Job.ParkedFor.GUESTS).exclude(kept__has_key=kinds.BEGUN):
        told = _("The job gave up. It waited for {what}. Nothing was changed. Submit it again.")
        claims.give_up(job, kinds.get(job.kind).given_up, told.format(what=job.waiting_for))


def look_again() -> None:
    """Has hosts scanned that have pools which did not answer, so that it is soon known when they do."""
    lately = timezone.now() - LOOK_AGAIN
    silent = StoragePool.objects.filter(state=StoragePool.SILENT).order_by()
    for host_id in silent.values_list("host", flat=True).distinct():
        scans = Job.objects.filter(kind="scan", host=host_id)
        if not scans.filter(Q(state__in=Job.ACTIVE) | Q(finished__gt=lately)).exists():
            services.submit(SYSTEM, "scan", host_id, {})


def recover_hosts() -> None:
    """Submits a recovery for each host that has an interrupted rewrite or benchmark, unless one is queued already."""
    due = Job.objects.filter(needs_recovery=True).exclude(state__in=Job.ACTIVE)
    now = timezone.now()
    # The last end of each host's, in the order of their index: a recovery that began later has looked at all of them.
    ends: dict[int, datetime] = {}
    for host_id, ended in due.values_list("host", "finished"):
        ends[host_id] = max(ended or now, ends.get(host_id, ended or now))
    for host_id, last in ends.items():
        recoveries = Job.objects.filter(kind="recover", host=host_id)
        # One that was cut off, as by the end of its worker, has not failed.
        failed = Q(state=Job.State.FAILED, finished__gt=now - RECOVER_AGAIN)
        # One that succeeded has found an agent still there. Most end soon; one that hangs is looked for ever later.
        wait = min((now - last) / 4, RECOVER_HANGING_AGAIN)
        in_vain = Q(state=Job.State.SUCCEEDED, started__gt=last, finished__gt=now - wait)
        lately = recoveries.filter(failed | in_vain)
        if not recoveries.filter(state__in=Job.ACTIVE).exists() and not lately.exists():
            services.submit(SYSTEM, "recover", host_id, {})


def sweep(now: datetime | None = None) -> int:
    """Rings for queued jobs that nobody claimed. Harmless: whoever comes second finds the row taken.

    One that was rung for in the queue of a worker that has died since gets into another one this way.
    A parked job waits for something outside: who watches that rings for it.

    Returns:
        How many were rung for.
    """
    now = now or timezone.now()
    unheard = Job.objects.filter(state=Job.State.QUEUED, parked_at=None, rung__lt=now - RING_AGAIN).order_by("id")
    ids = list(unheard.values_list("pk", flat=True)[:500])
    Job.objects.filter(pk__in=ids).update(rung=now)
    for job_id in ids:
        ring_now(job_id)
    return len(ids)
