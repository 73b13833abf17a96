"""Two schedulers, or many, that look at the same moment: each effect comes about once."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from images.models import Policy, PolicyPick, PolicyRun
from images.policies import clock, runs, services
from storage_admin.agent.protocol import RefusedError
from storage_admin.events.models import Alert
from storage_admin.jobs.models import Job, ResourceLock
from tests.factories import PolicyFactory
from tests.harness.patching import raising
from tests.jobs.test_claims import at_once
from tests.policies.test_runs import end, images
from tests.working import OPERATOR, reread

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("quiet"), pytest.mark.sql]
SCHEDULERS = 6
NOW = timezone.now()


def all_of_them(act: Any) -> list[Any]:
    answers = at_once(SCHEDULERS, lambda _number: act())
    assert [answer for answer in answers if isinstance(answer, Exception)] == []
    return answers


def test_a_window_that_all_of_them_see_is_one_run() -> None:
    PolicyFactory.create(clock=NOW - timedelta(days=2), cron="0 * * * *", quiet_minutes=5)
    made = all_of_them(lambda: clock.advance(NOW))
    assert sum(1 for answer in made if answer) == 1
    due = list(PolicyRun.objects.values_list("due", flat=True))
    assert len(due) == len(set(due)) == clock.MOST_MISSED + 1 or len(due) == clock.MOST_MISSED
    assert Alert.objects.filter(closed=None).count() == 1


def test_a_run_chooses_once_and_submits_no_more_than_it_may() -> None:
    images(6)
    run = services.run_now(OPERATOR, PolicyFactory.create(max_jobs_per_host=2), NOW)
    all_of_them(lambda: runs.work(NOW))
    assert run.picks.count() == 6
    assert Job.objects.count() == run.picks.filter(state="submitted").count() == 2
    for round_ in range(1, 4):
        end()
        all_of_them(lambda minutes=round_: runs.work(NOW + timedelta(minutes=minutes)))
    assert sorted(Job.objects.values_list("target_label", flat=True)) == [f"disk{number}" for number in range(6)]
    end()
    all_of_them(lambda: runs.work(NOW + timedelta(minutes=9)))
    assert (reread(run).state, run.picks.filter(state="succeeded").count()) == ("finished", 6)


def test_when_the_window_closes_jobs_are_withdrawn_once() -> None:
    images(2)
    run = services.run_now(OPERATOR, PolicyFactory.create(max_jobs_per_host=2), NOW)
    runs.work(NOW)
    Job.objects.filter(target_label="disk0").update(state="running")
    all_of_them(lambda: runs.work(run.ends))
    assert list(run.picks.order_by("place").values_list("state", flat=True)) == ["submitted", "skipped"]
    withdrawn = Job.objects.get(state="cancelled")
    assert withdrawn.log_lines.filter(text__startswith="withdrawn").count() == 1
    assert not ResourceLock.objects.filter(job=withdrawn).exists()


def test_of_two_people_who_start_it_by_hand_one_does() -> None:
    policy = PolicyFactory.create()
    answers = at_once(SCHEDULERS, lambda _number: services.run_now(OPERATOR, Policy.objects.get(pk=policy.pk)))
    assert [type(answer) for answer in answers if isinstance(answer, Exception)] == [RefusedError] * (SCHEDULERS - 1)
    assert PolicyRun.objects.count() == 1


def test_what_was_cut_off_between_two_steps_is_taken_up_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    images(3)
    run = services.run_now(OPERATOR, PolicyFactory.create(max_jobs_per_host=3), NOW)
    # Right after the picks were written; then in the middle of submitting, after the job's row was.
    for name in ("images.policies.runs._settle", "storage_admin.jobs.services.ring"):
        with monkeypatch.context() as patched:
            patched.setattr(name, raising(SystemExit()))
            with pytest.raises(SystemExit):
                runs.work(NOW)
    assert Job.objects.count() == PolicyPick.objects.filter(state="submitted").count() == 0
    runs.work(NOW)
    assert run.picks.count() == 3
    assert Job.objects.count() == PolicyPick.objects.filter(state="submitted", job__isnull=False).count() == 3


def test_a_choice_that_was_cut_off_is_made_anew_by_another_and_has_each_image_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images(5)
    run = services.run_now(OPERATOR, PolicyFactory.create(), NOW)
    monkeypatch.setattr(runs, "AT_ONCE", 2)
    written = PolicyPick.objects.bulk_create
    calls: list[int] = []

    def killed(picks: Any, **more: Any) -> Any:
        calls.append(len(picks))
        if len(calls) == 2:
            raise SystemExit
        return written(picks, **more)

    with monkeypatch.context() as patched:
        patched.setattr(PolicyPick.objects, "bulk_create", killed)
        with pytest.raises(SystemExit):
            runs.work(NOW)
    assert run.picks.count() == 2
    runs.work(NOW + timedelta(minutes=4))
    assert Job.objects.count() == 0
    runs.work(NOW + timedelta(minutes=6))
    assert sorted(run.picks.values_list("label", flat=True)) == [f"disk{number}" for number in range(5)]
    assert Job.objects.count() == 1
