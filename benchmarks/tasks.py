"""What the scheduler rings for: quick profiles on pools that are watched."""

from datetime import timedelta

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from django.db.models import Q
from django.utils import timezone

from benchmarks import services
from benchmarks.models import Watch
from storage_admin.accounts.models import SYSTEM
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.jobs import automation
from storage_admin.jobs.models import Job


@shared_task(base=DjangoTask, ignore_result=True)
def start_watches() -> None:
    """Submits what is due. One whose last run is still queued or at work waits for its end.

    A watch that is refused is due again after its own time; why, stands in its row. While automation is paused none is
    started.
    """
    if automation.is_paused():
        return
    for watch in Watch.objects.select_related("pool").order_by("last_started", "id"):
        if _is_due(watch) and _takes(watch):
            Watch.objects.filter(pk=watch.pk).update(problem=_start(watch))


def _is_due(watch: Watch) -> bool:
    due = watch.last_started is None or watch.last_started + timedelta(hours=watch.every_hours) <= timezone.now()
    at_it = Job.objects.filter(
        kind="benchmark", target_kind="pool", target_id=watch.pool_id, options__kind=watch.kind, state__in=Job.ACTIVE
    )
    return due and not at_it.exists()


def _takes(watch: Watch) -> bool:
    """Of two schedulers, one takes the watch."""
    unchanged = Q(last_started=watch.last_started) if watch.last_started else Q(last_started__isnull=True)
    return Watch.objects.filter(unchanged, pk=watch.pk).update(last_started=timezone.now()) == 1


def _start(watch: Watch) -> str:
    """Submits the run. Returns: why that could not be done, else an empty text."""
    try:
        services.submit(SYSTEM, watch.kind, watch.pool_id, {"quick": True})
    except (RefusedError, InvalidError, NotFoundError) as error:
        return error.detail
    return ""
