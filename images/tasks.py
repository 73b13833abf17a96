"""What the scheduler rings for: scans, undo copies whose window has closed, jobs that wait for guests."""

from datetime import timedelta

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from images import refusals, repointing, rewriting, waiting
from images.models import Image
from images.policies import clock, runs
from images.watch import looking
from images.watching import watchers
from storage_admin.accounts.roles import SYSTEM
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import Host
from storage_admin.jobs import automation, routing, services
from storage_admin.jobs.errors import NotFoundError
from storage_admin.jobs.models import Job

#: After a removal that failed, as on a folder that is not mounted, the next one waits for so long.
TRY_AGAIN = timedelta(hours=1)
#: Removals that one round submits.
AT_ONCE = 500
#: A look at guests that was asked for so many seconds ago need not be taken: another one has been asked for since.
OUTDATED = 60.0


@shared_task(base=DjangoTask, ignore_result=True)
def scan_hosts() -> None:
    """Submits a scan of every host; one that is queued already is not queued twice."""
    for host_id in Host.objects.values_list("pk", flat=True):
        try:
            services.submit(SYSTEM, "scan", host_id, {})
        except NotFoundError:  # removed since it was listed
            continue


@shared_task(base=DjangoTask, ignore_result=True)
def expire_undo() -> None:
    """Submits the removal of undo copies whose window has closed.

    That of an image which may be lost waits: it may be all that is left of it. One whose host does not answer, whose
    image is at work in another job (as in its undo), or that could not be removed lately is seen again by a later
    round. Two rounds at once submit one removal: the second finds its lock. While automation is paused nothing is
    removed.
    """
    if automation.is_paused():
        return
    now = timezone.now()
    at_it = Job.objects.filter(target_kind="job", target_id=OuterRef("pk"))
    tried = Q(kind="discard_undo", finished__gt=now - TRY_AGAIN)
    due = Job.objects.filter(undo_state=Job.UndoState.AVAILABLE, undo_expires__lte=now, needs_recovery=False)
    lost = Image.every.filter(state__in=refusals.MAY_BE_LOST).values("pk")
    due = due.exclude(target_kind="image", target_id__in=lost)
    due = due.exclude(host__status=Host.Status.UNREACHABLE).exclude(
        Exists(at_it.filter(Q(state__in=Job.ACTIVE) | Q(needs_recovery=True) | tried))
    )
    for job in due.order_by("undo_expires")[:AT_ONCE]:
        try:
            services.submit(SYSTEM, "discard_undo", job.pk, {})
        except RefusedError:
            continue
        except NotFoundError:
            why = "its image is not listed any more, so nobody knows where the copy would be"
            rewriting.undo_copy_lost(job, why, known=False)


@shared_task(base=DjangoTask, ignore_result=True)
def look_at_guests() -> None:
    """Lets jobs go on whose guests were shut down, leads guests to their images, starts those whose jobs have ended.

    Where a host has a worker of its own, that one is asked to: perhaps nobody else reaches the guests there.
    """
    others = routing.hosts_of_others()
    repointing.settle(but_not=list(others))
    waiting.look(but_not=list(others))
    watchers.attend(waiting.hosts_that_wait(but_not=list(others)))
    owed = Q(parked_at__isnull=False, state=Job.State.QUEUED) | Q(start_due=True) | Q(repoint_due=True)
    waited = Job.objects.filter(owed, host__in=list(others)).order_by()
    for host_id in waited.values_list("host", flat=True).distinct():
        look_at_guests_of.apply_async((host_id,), queue=others[host_id], expires=OUTDATED, retry=False)


@shared_task(base=DjangoTask, ignore_result=True)
def look_at_guests_of(host_id: int) -> None:
    """The same for one host, by the worker that was started for it."""
    host = Host.objects.filter(pk=host_id).first()
    if host is not None and routing.serves(host):
        repointing.settle(host_id)
        waiting.look(host_id)
        watchers.attend([host_id] if host_id in waiting.hosts_that_wait() else [])


@shared_task(base=DjangoTask, ignore_result=True)
def advance_policies() -> None:
    """Makes runs of windows that have opened, and takes those that are at work one step further."""
    now = timezone.now()
    clock.advance(now)
    runs.work(now)


@shared_task(base=DjangoTask, ignore_result=True)
def look_for_trouble() -> None:
    """Opens and closes alerts."""
    looking.look(timezone.now())
