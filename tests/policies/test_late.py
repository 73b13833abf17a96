"""What comes late: a slot given while the run was stopped, a turn after somebody did the work, a window that closed."""

from datetime import timedelta

import pytest
from django.utils import timezone

from images.models import Image, PolicyPick
from images.policies import runs, services
from storage_admin.jobs import automation, claims
from storage_admin.jobs import services as jobs
from storage_admin.jobs.models import Job
from tests.factories import PolicyFactory
from tests.policies.test_runs import MINUTE, NOW, at_work, begun, end, images, night, picks
from tests.working import ADMIN, OPERATOR, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet"), pytest.mark.sql]


def test_what_was_given_back_or_submitted_while_a_run_was_being_stopped_ends_with_it() -> None:
    run = night(3, max_jobs_per_host=2)
    services.stop(OPERATOR, run)
    # As another scheduler leaves it that began its step before: one held back, one submitted.
    back, given, _third = run.picks.order_by("place")
    job = given.job
    assert job is not None
    Job.objects.filter(pk=job.pk).update(state="queued", finished=None)
    PolicyPick.objects.filter(pk=back.pk).update(state="chosen", code="", job=None)
    PolicyPick.objects.filter(pk=given.pk).update(state="submitted", code="")
    runs.work(NOW + MINUTE)
    assert (reread(job).state, reread(run).state, run.finished is not None) == ("cancelled", "stopped", True)
    assert {(state, code) for _, state, code in picks(run)} == {("skipped", "policy_stopped")}


def test_what_somebody_has_done_before_its_turn_came_is_not_done_again() -> None:
    run = night(3, min_age_hours=20)
    assert at_work() == ["disk0"]
    jobs.submit(OPERATOR, "reclaim", Image.objects.get(name="disk1").pk, {})
    end()
    runs.work(NOW + MINUTE)
    assert at_work() == ["disk2"]
    assert picks(run)[1] == ("disk1", "skipped", "too_young")


def test_what_somebody_has_undone_before_its_turn_came_is_left_alone() -> None:
    run = night(2, min_age_hours=0)
    jobs.submit(OPERATOR, "reclaim", Image.objects.get(name="disk1").pk, {})
    end(undo_state="undone")
    runs.work(NOW + MINUTE)
    assert at_work() == []
    assert picks(run)[1] == ("disk1", "skipped", "undone")


def test_a_job_of_a_policy_never_begins_outside_of_its_window_though_nobody_withdrew_it() -> None:
    images(1)
    # Six hours, of which the last half is quiet: the job was submitted in time, and no worker was free until now.
    begun(PolicyFactory.create(), timezone.now() - timedelta(hours=5, minutes=31))
    job = Job.objects.get()
    assert claims.claim(job.pk, "worker") is None
    assert (reread(job).state, job.waiting_for) == ("queued", "its withdrawal, because its window has closed")
    runs.work(timezone.now())
    assert reread(job).state == "cancelled"


def test_a_job_of_a_policy_begins_within_its_window_up_to_the_quiet_minutes() -> None:
    images(1)
    begun(PolicyFactory.create(), timezone.now() - timedelta(hours=5, minutes=29))
    assert claims.claim(Job.objects.get().pk, "worker") is not None


def test_a_job_of_a_policy_does_not_begin_while_automation_is_paused_and_begins_when_it_goes_on() -> None:
    night(1)
    job = Job.objects.get()
    automation.switch(ADMIN, paused=True)
    assert claims.claim(job.pk, "worker") is None
    automation.switch(ADMIN, paused=False)
    assert claims.claim(job.pk, "worker") is not None
