"""When a job came further last stands in its row: that its worker is alive says nothing about that."""

from datetime import datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from storage_admin.jobs import routing
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests.factories import JobFactory

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


@pytest.fixture
def long_ago() -> datetime:
    return timezone.now() - timedelta(hours=3)


@pytest.fixture
def keeper(long_ago: datetime) -> Recorder:
    """Of a job that is at its first byte since long ago."""
    keeper = Recorder(JobFactory.create(state="running", worker="worker"), {})
    keeper.progress({"stage": "copying", "done": 1, "total": 100})
    keeper.flush()
    Job.objects.update(progressed=long_ago)
    return keeper


def progressed() -> datetime | None:
    return Job.objects.get().progressed


def test_more_done_another_stage_and_one_more_command_count(keeper: Recorder, long_ago: datetime) -> None:
    for event in ({"stage": "copying", "done": 2, "total": 100}, {"stage": "verifying"}, {"percent": 3.0}):
        keeper.progress(event)
        keeper.flush()
        assert progressed() != long_ago
        Job.objects.update(progressed=long_ago)
    keeper.command({"argv": ["qemu-img", "check"], "exit_code": 0})
    keeper.flush()
    assert progressed() != long_ago


def test_the_same_again_other_words_a_line_and_a_heartbeat_do_not(keeper: Recorder, long_ago: datetime) -> None:
    keeper.progress({"stage": "copying", "done": 1, "total": 100, "message": "still there"})
    keeper.log("still there")
    keeper.flush()
    routing.beat("worker", [(Job.objects.get().pk, 0)])
    assert Job.objects.get().message == "still there"
    assert Job.objects.get().heartbeat is not None
    assert progressed() == long_ago


def test_what_came_before_the_same_again_is_kept_until_it_is_written(keeper: Recorder, long_ago: datetime) -> None:
    for _ in range(2):
        keeper.progress({"stage": "copying", "done": 2, "total": 100})
    keeper.flush()
    assert progressed() != long_ago


def test_it_costs_no_query_of_its_own(keeper: Recorder) -> None:
    counts = []
    for done in (1, 2):
        keeper.progress({"stage": "copying", "done": done, "total": 100})
        with CaptureQueriesContext(connection) as queries:
            keeper.flush()
        counts.append([query["sql"].split()[0] for query in queries])
    assert counts[0] == counts[1]
    assert counts[0].count("UPDATE") == 1
