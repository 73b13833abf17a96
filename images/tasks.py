"""What the scheduler rings for: scans, and undo copies whose window has closed."""

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from django.utils import timezone

from storage_admin.accounts.roles import SYSTEM
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import Host
from storage_admin.jobs import services
from storage_admin.jobs.models import Job


@shared_task(base=DjangoTask, ignore_result=True)
def scan_hosts() -> None:
    """Submits a scan of every host; one that is queued already is not queued twice."""
    for host_id in Host.objects.values_list("pk", flat=True):
        services.submit(SYSTEM, "scan", host_id, {})


@shared_task(base=DjangoTask, ignore_result=True)
def expire_undo() -> None:
    """Submits the removal of undo copies whose window has closed."""
    due = Job.objects.filter(undo_state=Job.UndoState.AVAILABLE, undo_expires__lte=timezone.now())
    for job in due.order_by("undo_expires")[:100]:
        if Job.objects.filter(kind="discard_undo", target_kind="job", target_id=job.pk, state__in=Job.ACTIVE).exists():
            continue
        try:
            services.submit(SYSTEM, "discard_undo", job.pk, {})
        except RefusedError:  # its image is at work in another job: the next round sees it again
            continue
