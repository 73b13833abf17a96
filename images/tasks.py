"""What the scheduler rings for: scans, and undo copies whose window has closed."""

from datetime import timedelta

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from django.utils import timezone

from storage_admin.accounts.roles import SYSTEM
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.errors import NotFoundError
from storage_admin.jobs.models import Job

#: After a removal that failed, as on a folder that is not mounted, the next one waits for so long.
TRY_AGAIN = timedelta(hours=1)


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
    """Submits the removal of undo copies whose window has closed."""
    due = Job.objects.filter(undo_state=Job.UndoState.AVAILABLE, undo_expires__lte=timezone.now())
    for job in due.order_by("undo_expires")[:100]:
        tries = Job.objects.filter(kind="discard_undo", target_kind="job", target_id=job.pk)
        lately = tries.filter(finished__gt=timezone.now() - TRY_AGAIN)
        if tries.filter(state__in=Job.ACTIVE).exists() or lately.exists():
            continue
        try:
            services.submit(SYSTEM, "discard_undo", job.pk, {})
        except RefusedError:  # its image is at work in another job: the next round sees it again
            continue
        except NotFoundError:  # the image's row is gone: nobody can say any more where the copy would be
            Job.objects.filter(pk=job.pk).update(undo_state=Job.UndoState.MISSING, undo_bytes=0)
