"""However a job ends, it is told of in the transaction in which it does."""

from typing import Any

import pytest
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from storage_admin.accounts.models import SYSTEM
from storage_admin.events.models import Delivery, Event, Webhook
from storage_admin.jobs import claims, reaper, services
from storage_admin.jobs.kinds import Wait
from storage_admin.jobs.models import Job
from tests.factories import JobFactory
from tests.working import reread

pytestmark = pytest.mark.django_db


def _told() -> list[dict[str, Any]]:
    return [event.data for event in Event.objects.filter(name="job.finished").order_by("id")]


def test_a_job_that_succeeds_is_told_with_what_it_won(hook: Webhook) -> None:
    job = JobFactory.create(kind="reclaim", state="running", generation=3, options={"note": "none of theirs"})
    with transaction.atomic():
        assert claims.finish(job, Job.State.SUCCEEDED, result={"before_bytes": 9, "after_bytes": 4, "freed_bytes": 5})
    [told] = _told()
    assert (told["id"], told["kind"], told["state"], told["host"]) == (job.pk, "reclaim", "succeeded", job.host.slug)
    assert (told["before_bytes"], told["after_bytes"], told["freed_bytes"], told["held_bytes"]) == (9, 4, 5, None)
    assert told["url"] == f"/jobs/{job.pk}/"
    assert told["finished"] is not None
    assert "none of theirs" not in str(told)
    assert Delivery.objects.get().webhook == hook


def test_an_end_that_is_rolled_back_is_told_to_nobody(hook: Webhook) -> None:
    job = JobFactory.create(state="running")
    with transaction.atomic():
        claims.finish(job, Job.State.SUCCEEDED)
        transaction.set_rollback(True)
    assert _told() == []


def test_a_job_that_is_not_ours_any_more_is_not_told_of(hook: Webhook) -> None:
    job = JobFactory.create(state="running", generation=2)
    Job.objects.update(generation=3)
    assert not claims.finish(job, Job.State.SUCCEEDED)
    assert _told() == []


def test_a_job_that_is_cancelled_while_it_waits_is_told_of(hook: Webhook) -> None:
    job = JobFactory.create(state="queued")
    services.cancel(SYSTEM, job)
    assert [told["state"] for told in _told()] == ["cancelled"]


def test_a_job_whose_worker_fell_silent_is_told_of(hook: Webhook) -> None:
    JobFactory.create(kind="reclaim", rewrites=True, state="running", heartbeat=None)
    reaper.reap()
    assert [(told["state"], told["error_code"]) for told in _told()] == [("interrupted", "interrupted")]


def test_a_job_that_waited_in_vain_is_told_of(hook: Webhook) -> None:
    job = JobFactory.create(state="queued")
    assert claims.park(job, Wait("a guest", timezone.now()))
    assert claims.give_up(reread(job), "image_in_use", "The guest did not shut down.")
    assert [(told["state"], told["error_code"]) for told in _told()] == [("failed", "image_in_use")]


def test_where_nobody_listens_nothing_is_kept(hook: Webhook) -> None:
    Webhook.objects.update(events=["alert.opened"])
    assert settings.ALERT_EMAILS == []
    claims.finish(JobFactory.create(state="running"), Job.State.SUCCEEDED)
    assert not Event.objects.exists()
