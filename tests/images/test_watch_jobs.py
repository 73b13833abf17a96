"""Rewrites that do not come further are told of, until they do or end."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from images.alert_rules.looking import look
from storage_admin.events.models import Alert, Event
from storage_admin.jobs import claims
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Recorder
from tests.factories import GIB, MIB, ImageFactory, JobFactory, WebhookFactory
from tests.working import reread

pytestmark = pytest.mark.django_db


def rewrite(minutes: float = 40, **columns: Any) -> Job:
    """A reclaim at work that came further so many minutes ago."""
    at = timezone.now() - timedelta(minutes=minutes)
    usual = {"state": "running", "stage": "copying", "started": at, "progressed": at, "heartbeat": timezone.now()}
    return JobFactory.create(kind="reclaim", target=ImageFactory.create(), **usual | columns)


def stalled() -> set[str]:
    look(timezone.now())
    return set(Alert.objects.filter(kind="job_stalled", closed=None).values_list("key", flat=True))


def test_a_rewrite_that_has_not_come_further_for_half_an_hour_is_told_of() -> None:
    job = rewrite(29.9)
    assert stalled() == set()
    since = timezone.now() - timedelta(minutes=30)
    Job.objects.update(progressed=since)
    assert stalled() == {f"job_stalled:{job.pk}"}
    alert = Alert.objects.get()
    assert (alert.severity, alert.host, alert.target_kind, alert.target_id) == (
        "warning", job.host.slug, "job", job.pk,
    )  # fmt: skip
    assert alert.title == f"reclaim {job.target_label} makes no progress"


def test_it_says_since_when_at_which_stage_how_far_and_what_to_do() -> None:
    job = rewrite(45, done_bytes=34 * GIB, total_bytes=100 * GIB, progress=23.8)
    assert stalled()
    since = f"{job.progressed:%Y-%m-%d %H:%M} UTC"
    detail = Alert.objects.get().detail
    assert detail.startswith(f'No progress since {since}: at "copying", 34 GiB of 100 GiB, 23 % in total.')
    assert "log" in detail
    assert "It can be cancelled safely" in detail
    Job.objects.update(heartbeat=timezone.now())
    updated = Alert.objects.get().updated
    assert stalled()
    assert Alert.objects.get().updated == updated, "what has not changed is not written each minute"


def test_it_is_over_when_the_job_comes_further() -> None:
    job = rewrite()
    WebhookFactory.create()
    assert stalled()
    keeper = Recorder(job, {})
    keeper.progress({"stage": "copying", "done": 1, "total": 2})
    keeper.flush()
    assert stalled() == set()
    assert list(Event.objects.order_by("id").values_list("name", flat=True)) == ["alert.opened", "alert.closed"]


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled", "interrupted"])
def test_it_is_over_when_the_job_ends_however_it_does(state: str) -> None:
    job = rewrite()
    assert stalled()
    assert claims.finish(job, state)
    assert stalled() == set()


def test_a_scan_that_stands_still_is_told_of() -> None:
    """As at a storage that went away while it was walked: the numbers of its host get older and older."""
    at = timezone.now() - timedelta(minutes=31)
    job = JobFactory.create(state="running", stage="scanning", started=at, progressed=at, heartbeat=timezone.now())
    assert stalled() == {f"job_stalled:{job.pk}"}
    assert Alert.objects.get().title == f"scan {job.target_label} makes no progress"


def test_jobs_that_wait_and_others_that_change_no_image_are_not_judged() -> None:
    hours_ago = timezone.now() - timedelta(hours=5)
    rewrite(300, state="queued", started=None, progressed=None, created=hours_ago)
    rewrite(300, state="queued", parked_at=hours_ago, waiting_for="web to be shut down")
    rewrite(300, state="succeeded")
    JobFactory.create(kind="fio", state="running", stage="fio", started=hours_ago, progressed=hours_ago)
    JobFactory.create(kind="analyze", target=ImageFactory.create(), state="running", progressed=hours_ago)
    assert stalled() == set()


def test_the_time_a_job_waited_does_not_count_when_it_has_begun() -> None:
    job = JobFactory.create(kind="reclaim", target=ImageFactory.create(), created=timezone.now() - timedelta(days=1))
    assert claims.claim(job.pk, "worker") is not None
    assert reread(job).progressed == job.started
    assert stalled() == set()


@pytest.mark.parametrize(
    ("options", "host", "minutes", "found"),
    [
        ({}, None, 239, False),  # 4 % of 10 TiB at 20 MiB/s are 350 minutes
        ({}, None, 381, True),
        ({"bandwidth_bytes_sec": 10 * MIB}, None, 381, False),
        ({"bandwidth_bytes_sec": 10 * MIB}, None, 731, True),
        ({}, 10 * MIB, 381, False),
        ({"bandwidth_bytes_sec": 10**9}, None, 381, True),
    ],
)
def test_of_a_large_image_that_is_read_slowly_news_are_seldom(
    options: dict[str, int], host: int | None, minutes: float, found: bool
) -> None:
    job = rewrite(minutes, total_bytes=10 << 40, done_bytes=1 << 40, options=options)
    job.host.bandwidth_bytes_sec = host
    job.host.save()
    assert bool(stalled()) is found


def test_many_jobs_are_told_of_once_each_and_cost_no_more_queries_than_one() -> None:
    counts = []
    for jobs in (1, 10):
        for _ in range(jobs - Job.objects.count()):
            rewrite()
        assert len(stalled()) == jobs
        with CaptureQueriesContext(connection) as queries:
            stalled()
        counts.append(len(queries))
    assert counts[0] == counts[1]
    assert Alert.objects.count() == 10
