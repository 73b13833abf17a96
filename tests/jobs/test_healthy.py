"""``manage.py healthy``: what a container's health check is told. The web server's is asked in ``test_parts``."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from storage_admin.celery import app
from storage_admin.jobs import routing, scheduler
from storage_admin.jobs.management.commands.healthy import SCHEDULER_SILENCE
from storage_admin.jobs.scheduler import Table
from tests.factories import WorkerFactory

pytestmark = pytest.mark.django_db


def test_a_worker_is_healthy_while_it_is_heard_of_in_its_own_place() -> None:
    with pytest.raises(CommandError, match="no worker has reported recently"):
        call_command("healthy", "worker")
    WorkerFactory.create(place="elsewhere pid:[1]")
    worker = WorkerFactory.create(place=routing.place(), seen=timezone.now() - routing.ALIVE - timedelta(seconds=1))
    with pytest.raises(CommandError):
        call_command("healthy", "worker")
    worker.seen = timezone.now()
    worker.save()
    call_command("healthy", "worker")


def test_a_scheduler_is_healthy_while_it_rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "BEAT", tmp_path / "beat")
    with pytest.raises(CommandError, match="the scheduler has not run recently"):
        call_command("healthy", "scheduler")
    Table(app, lazy=True).tick()
    call_command("healthy", "scheduler")
    long_ago = time.time() - SCHEDULER_SILENCE.total_seconds() - 1
    os.utime(scheduler.BEAT, (long_ago, long_ago))
    with pytest.raises(CommandError):
        call_command("healthy", "scheduler")
