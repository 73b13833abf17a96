"""What rings: every entry of the scheduler's table, and the real scheduler with a real worker."""

import inspect
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection
from django.utils import timezone

from images.models import PolicyRun
from storage_admin.celery import app
from storage_admin.jobs import claims
from storage_admin.supervisor import commands
from tests.factories import PolicyFactory
from tests.harness.processes import Daemon, wait_until
from tests.harness.services import ROOT, LiveWorker, RedisServer, database_url

#: Each entry's task, and after how many seconds it has to ring again at the latest.
RINGS = {
    "tidy": ("storage_admin.accounts.tasks.tidy", 60),
    # Whoever lost a worker hears of it as soon as its lease is over.
    "reap": ("storage_admin.jobs.tasks.reap", claims.LEASE.total_seconds() / 2),
    # A queued row that nobody heard of is rung again after 30 seconds.
    "sweep": ("storage_admin.jobs.tasks.sweep", 30),
    "scan every host": ("images.tasks.scan_hosts", 15 * 60),
    "expire undo copies": ("images.tasks.expire_undo", 60),
    "guests of undo copies": ("images.tasks.look_at_users_of_undo_copies", 90),
    "tidy uploads": ("images.tasks.tidy_uploads", 600),
    "wait for guests": ("images.tasks.look_at_guests", 10),
    # Pools that may fill up are looked at each minute: a look is due 45 seconds after the last one.
    "space of pools": ("images.tasks.look_at_space", 30),
    # A guest that is paused by an I/O error is named within a minute.
    "stopped guests": ("images.tasks.look_for_stopped_guests", 30),
    # A window is called late two minutes after it opened, and its last minutes begin nothing.
    "policies": ("images.tasks.advance_policies", 30),
    "forget vanished images": ("images.tasks.forget_vanished", 60 * 60),
    "alerts": ("images.tasks.look_for_trouble", 60),
    # The first retry of a webhook is due after 10 seconds.
    "deliveries": ("storage_admin.events.tasks.deliver", 10),
    "forget events": ("storage_admin.events.tasks.forget", 24 * 3600),
    # The most often that a watch can be due is each hour.
    "benchmark watches": ("benchmarks.tasks.start_watches", 15 * 60),
}


def test_the_scheduler_rings_for_all_of_it_and_for_nothing_else() -> None:
    assert settings.CELERY_BEAT_SCHEDULE.keys() == RINGS.keys()
    assert {name: entry["task"] for name, entry in settings.CELERY_BEAT_SCHEDULE.items()} == {
        name: task for name, (task, _) in RINGS.items()
    }


@pytest.mark.parametrize("name", RINGS)
def test_an_entry_names_a_task_that_workers_know_and_rings_often_enough(name: str) -> None:
    app.loader.import_default_modules()
    entry, (task, latest) = settings.CELERY_BEAT_SCHEDULE[name], RINGS[name]
    assert task in app.tasks
    assert entry.keys() == {"task", "schedule"}
    inspect.signature(app.tasks[task].run).bind()  # it rings without arguments
    # Oftener than that, workers would be busy with looking.
    assert 5 <= float(str(entry["schedule"])) <= latest


@pytest.fixture
def scheduler(transactional_db: None, redis_server: RedisServer, tmp_path: Path) -> Iterator[Daemon]:
    """The scheduler as ``manage.py up`` starts it, on the test's database."""
    env = os.environ | {
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "STORAGE_ADMIN_DATA_DIR": str(settings.DATA_DIR),
        "DATABASE_URL": database_url(connection.settings_dict),
        "REDIS_URL": redis_server.url,
    }
    with Daemon(commands.scheduler(), tmp_path / "beat.log", env=env, cwd=ROOT) as daemon:
        yield daemon


@pytest.mark.services
@pytest.mark.django_db(transaction=True)
def test_a_window_that_opens_becomes_a_run_by_the_real_scheduler_and_a_real_worker(
    scheduler: Daemon, live_worker: LiveWorker
) -> None:
    opens = timezone.now().replace(second=0, microsecond=0) - timedelta(minutes=1)
    PolicyFactory.create(cron=f"{opens.minute} {opens.hour} * * *", clock=opens - timedelta(minutes=1))
    wait_until(PolicyRun.objects.exists, 60, "the window that has opened is a run")
    run = PolicyRun.objects.get()
    assert run.due == opens
    assert run.state != PolicyRun.State.MISSED
    assert (scheduler.process.poll(), live_worker.process.poll()) == (None, None)
