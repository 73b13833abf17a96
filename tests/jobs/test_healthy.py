"""``manage.py healthy``: what a container's health check is told. The web server's is asked in ``test_parts``."""

from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone
from django_celery_beat.models import IntervalSchedule, PeriodicTask

from storage_admin.jobs import routing
from storage_admin.jobs.management.commands.healthy import SCHEDULER_SILENCE
from tests.factories import WorkerFactory

pytestmark = pytest.mark.django_db


def test_a_worker_is_healthy_while_it_is_heard_of_in_its_own_place() -> None:
    with pytest.raises(CommandError, match="no worker has been heard of lately"):
        call_command("healthy", "worker")
    WorkerFactory.create(place="elsewhere pid:[1]")
    worker = WorkerFactory.create(place=routing.place(), seen=timezone.now() - routing.ALIVE - timedelta(seconds=1))
    with pytest.raises(CommandError):
        call_command("healthy", "worker")
    worker.seen = timezone.now()
    worker.save()
    call_command("healthy", "worker")


def test_a_scheduler_is_healthy_while_it_rings() -> None:
    with pytest.raises(CommandError, match="the scheduler has not rung lately"):
        call_command("healthy", "scheduler")
    every = IntervalSchedule.objects.create(every=10, period="seconds")
    long_ago = timezone.now() - SCHEDULER_SILENCE - timedelta(seconds=1)
    task = PeriodicTask.objects.create(name="reap", task="x", interval=every, last_run_at=long_ago)
    with pytest.raises(CommandError):
        call_command("healthy", "scheduler")
    PeriodicTask.objects.filter(pk=task.pk).update(last_run_at=timezone.now())
    call_command("healthy", "scheduler")
