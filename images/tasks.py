"""What the scheduler rings for: scans, undo copies whose window has closed, jobs that wait for guests."""

from datetime import timedelta

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from django.conf import settings
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from images import uploads
from images.alert_rules import looking
from images.models import Image
from images.policies import clock, runs
from images.rewrite import holding, libvirt_events, record, refusals, repointing, wait_for_guests
from images.rewrite.libvirt_events import watchers
from images.scan import hypervisors, look, minutes, stopped_guests, vanished
from storage_admin.accounts.models import SYSTEM
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import NotFoundError
from storage_admin.guests import services as guests
from storage_admin.hosts import key_pairs
from storage_admin.hosts.models import Host
from storage_admin.jobs import automation, routing, services
from storage_admin.jobs.models import Elapsed, Job

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

    A window has closed when that is so by the clock and by the seconds that have surely passed; while this machine's
    clock was set and not put right, nothing is removed. That of an image which may be lost waits: it may be all that is
    left of it. So does one of which the agent said that it may be the last good copy, until a user decides. One whose
    host does not answer, whose image is at work in another job (as in its undo), or that could not be removed lately is
    seen again by a later round. Two rounds at once submit one removal: the second finds its lock. While automation is
    paused nothing is removed.
    """
    passed = Elapsed.tick()
    if automation.is_paused() or Elapsed.clock_jump():
        return
    now = timezone.now()
    at_it = Job.objects.filter(target_kind="job", target_id=OuterRef("pk"))
    tried = Q(kind="discard_undo", finished__gt=now - TRY_AGAIN)
    tried |= Q(kind="discard_undo", error_code=holding.STAYS)
    due = Job.objects.filter(undo_state=Job.UndoState.AVAILABLE, undo_expires__lte=now, needs_recovery=False)
    due = due.filter(Q(undo_due=None) | Q(undo_due__lte=passed))
    lost = Image.every.filter(state__in=refusals.MAY_BE_LOST).values("pk")
    due = due.exclude(target_kind="image", target_id__in=lost)
    due = due.exclude(host__status=Host.Status.UNREACHABLE).exclude(
        Exists(at_it.filter(Q(state__in=Job.ACTIVE) | Q(needs_recovery=True) | tried))
    )
    for job in due.order_by("undo_expires")[:AT_ONCE]:
        try:
            services.submit(SYSTEM, "discard_undo", job.pk, {}, look=False)
        except RefusedError:
            continue
        except NotFoundError:
            why = "its image is no longer listed, so it is not known where the copy is"
            record.undo_copy_lost(job, why, known=False)


@shared_task(base=DjangoTask, ignore_result=True)
def tidy_uploads() -> None:
    """Removes what uploads left that ended without a file."""
    uploads.tidy()


@shared_task(base=DjangoTask, ignore_result=True)
def look_at_guests() -> None:
    """Lets jobs go on whose guests were shut down, leads guests to their images, starts those whose jobs have ended.

    Where a host has a worker of its own, that one is asked to: perhaps nobody else reaches the guests there.
    """
    others = routing.hosts_of_others()
    repointing.settle(but_not=list(others))
    wait_for_guests.look(but_not=list(others))
    watchers.attend(libvirt_events.wanted(but_not=list(others)))
    owed = Q(parked_at__isnull=False, state=Job.State.QUEUED) | Q(start_due=True) | Q(repoint_due=True)
    owed |= Q(unlock_due=True) | Q(undo_state=Job.UndoState.AVAILABLE)
    waited = Job.objects.filter(owed, host__in=list(others)).order_by()
    for host_id in waited.values_list("host", flat=True).distinct():
        look_at_guests_of.apply_async((host_id,), queue=others[host_id], expires=OUTDATED, retry=False)


@shared_task(base=DjangoTask, ignore_result=True)
def look_at_guests_of(host_id: int) -> None:
    """The same for one host, by the worker that was started for it."""
    host = Host.objects.filter(pk=host_id).first()
    if host is not None and routing.serves(host):
        repointing.settle(host_id)
        wait_for_guests.look(host_id)
        watchers.attend([host_id] if host_id in libvirt_events.wanted() else [])


@shared_task(base=DjangoTask, ignore_result=True)
def look_at_images(host_id: int, image_ids: list[int]) -> None:
    """A look at images of a host, by the worker that was started for it (:mod:`images.scan.look`)."""
    host = Host.objects.filter(pk=host_id).first()
    if host is not None and routing.serves(host):
        look.at(Image.objects.filter(host=host, pk__in=image_ids).select_related("host"))


@shared_task(base=DjangoTask, ignore_result=True)
def look_at_space() -> None:
    """Looks how much room there is in pools that are due, and tells of those that fill up.

    Where a host has a worker of its own, that one is asked to.
    """
    others = routing.hosts_of_others()
    for host_id, queue in others.items():
        look_at_space_of.apply_async((host_id,), queue=queue, expires=OUTDATED, retry=False)
    minutes.look(timezone.now(), but_not=list(others))
    looking.look_at_space(timezone.now())


@shared_task(base=DjangoTask, ignore_result=True)
def look_at_space_of(host_id: int) -> None:
    """The same for one host, by the worker that was started for it."""
    host = Host.objects.filter(pk=host_id).first()
    if host is not None and routing.serves(host):
        minutes.look(timezone.now(), only=host_id)
        looking.look_at_space(timezone.now())


@shared_task(base=DjangoTask, ignore_result=True)
def look_for_stopped_guests() -> None:
    """Tells of guests that are paused by an I/O error; where a host has a worker of its own, that one looks."""
    others = routing.hosts_of_others()
    for host_id, queue in others.items():
        look_for_stopped_guests_of.apply_async((host_id,), queue=queue, expires=OUTDATED, retry=False)
    stopped_guests.look(but_not=list(others))


@shared_task(base=DjangoTask, ignore_result=True)
def look_for_stopped_guests_of(host_id: int) -> None:
    """The same for one host, by the worker that was started for it."""
    host = Host.objects.filter(pk=host_id).first()
    if host is not None and routing.serves(host):
        stopped_guests.look(only=host_id)


@shared_task(base=DjangoTask, ignore_result=True)
def look_at_users_of_undo_copies() -> None:
    """Writes down which guests run where undo copies wait and no libvirt tells of it by itself."""
    for host in Host.objects.filter(pk__in=holding.hosts_with_copies()):
        for told in hypervisors.ask(host):
            if told.answered:
                guests.saw_run(host, told.kinds, {(guest.kind, guest.uid): guest.state for guest in told.guests})


@shared_task(base=DjangoTask, ignore_result=True)
def advance_policies() -> None:
    """Makes runs of windows that have opened, and takes those that are at work one step further."""
    now = timezone.now()
    clock.advance(now)
    runs.work(now)


@shared_task(base=DjangoTask, ignore_result=True)
def forget_vanished() -> None:
    """Forgets images that vanished long ago, old looks at pools, and key pairs that were never used."""
    key_pairs.forget_old()
    minutes.thin_out(timezone.now())
    if settings.VANISHED_KEEP_DAYS:
        vanished.forget_old(timezone.now(), timedelta(days=settings.VANISHED_KEEP_DAYS))


@shared_task(base=DjangoTask, ignore_result=True)
def look_for_trouble() -> None:
    """Opens and closes alerts."""
    looking.look(timezone.now())
