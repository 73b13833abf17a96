"""What a run says of itself at its end, and whom an alert tells of what failed in it."""

import pytest

from images.models import PolicyRun
from images.policies import runs, services
from storage_admin.events.models import Alert
from storage_admin.jobs import automation
from storage_admin.jobs.models import Job
from tests.factories import PolicyFactory
from tests.harness.patching import raising
from tests.policies.test_runs import MINUTE, NOW, begun, end, images, night, picks, stepped
from tests.working import ADMIN, OPERATOR, reread

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]
LATE = "Started 20 minutes late; the rest of the window is used."
broken = raising(OSError("database is locked"))


def test_a_job_that_failed_in_a_run_that_is_stopped_then_is_told() -> None:
    run = night(2)
    end("failed", error_code="bug", error_detail="It broke.")
    services.stop(OPERATOR, run)
    assert not Alert.objects.exists()
    assert (stepped(run, NOW + MINUTE).state, picks(run)[0]) == ("stopped", ("disk0", "failed", "bug"))
    alert = Alert.objects.get(closed=None)
    assert ("1 of its jobs failed" in alert.title, "disk0: It broke." in alert.detail) == (True, True)


def test_a_job_that_fails_after_its_policy_was_switched_off_is_told() -> None:
    run = night(1)
    Job.objects.update(state="running")
    services.change(ADMIN, run.policy, {"enabled": False})
    runs.work(NOW + MINUTE)
    assert not Alert.objects.exists()
    end("failed", error_code="bug", error_detail="It broke.")
    runs.work(NOW + 2 * MINUTE)
    assert "1 of its jobs failed" in Alert.objects.get(closed=None).title


def test_a_run_that_is_stopped_with_nothing_failed_neither_opens_nor_closes_an_alert() -> None:
    run = night(2)
    policy = run.policy
    services.stop(OPERATOR, run)
    runs.work(NOW + MINUTE)
    assert not Alert.objects.exists()
    begun(policy, NOW + 2 * MINUTE)
    end("failed", error_code="bug")
    runs.work(NOW + 3 * MINUTE)
    services.stop(OPERATOR, PolicyRun.objects.latest("due"))
    runs.work(NOW + 4 * MINUTE)
    later = begun(policy, NOW + 5 * MINUTE)
    services.stop(OPERATOR, later)
    runs.work(NOW + 6 * MINUTE)
    assert Alert.objects.filter(closed=None).count() == 1


def test_switching_a_policy_off_closes_its_alert() -> None:
    policy = night(1).policy
    end("failed", error_code="bug")
    runs.work(NOW + MINUTE)
    services.change(ADMIN, policy, {"max_jobs_per_host": 2})
    assert Alert.objects.get().closed is None
    services.change(ADMIN, policy, {"enabled": False})
    assert Alert.objects.get().closed is not None


@pytest.mark.parametrize("before", ["", LATE])
def test_what_kept_a_run_from_going_on_is_said_until_it_goes_on_and_nothing_else_is_lost(
    monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    run = night(2)
    PolicyRun.objects.update(detail=before)
    with monkeypatch.context() as patched:
        patched.setattr("images.policies.submitting.submit", broken)
        for minute in (1, 2):
            runs.work(NOW + minute * MINUTE)
    assert reread(run).detail == f"{before} The run cannot continue for now: OSError: database is locked".strip()
    assert (stepped(run, NOW + 3 * MINUTE).state, run.detail) == ("running", before)


def test_what_keeps_a_run_from_choosing_is_said_while_nobody_may_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    images(1)
    run = services.run_now(OPERATOR, PolicyFactory.create(), NOW)
    with monkeypatch.context() as patched:
        patched.setattr("images.policies.rules.choose", broken)
        runs.work(NOW)
    assert "database is locked" in stepped(run, NOW + MINUTE).detail
    assert (stepped(run, NOW + 6 * MINUTE).detail, picks(run)) == ("", [("disk0", "submitted", "")])


def test_what_was_in_the_way_before_is_not_said_of_a_run_that_ends_in_its_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = night(1)
    end()
    with monkeypatch.context() as patched:
        patched.setattr("images.policies.submitting.submit", broken)
        runs.work(NOW + MINUTE)
    assert (stepped(run, NOW + 2 * MINUTE).state, run.detail) == ("finished", "")


def test_a_run_that_was_late_and_whose_jobs_all_failed_says_both() -> None:
    run = night(1)
    PolicyRun.objects.update(detail=LATE)
    end("failed", error_code="bug")
    assert (stepped(run, NOW + MINUTE).state, run.detail) == ("failed", f"{LATE} All of its jobs failed.")


def test_a_run_that_a_pause_held_back_until_its_window_closed_says_so() -> None:
    run = night(2)
    automation.switch(ADMIN, paused=True)
    runs.work(NOW + MINUTE)
    runs.work(run.ends)
    assert (reread(run).state, run.detail) == ("finished", "Automation was paused by ada until its window closed.")
    assert [(pick.code, pick.reason) for pick in run.picks.all()] == [
        ("window_closed", "Automation was paused by ada. The window closed before its turn came.")
    ] * 2


def test_a_pause_that_held_nothing_back_is_not_said() -> None:
    run = night(1)
    Job.objects.update(state="running")
    automation.switch(ADMIN, paused=True)
    runs.work(run.ends)
    end()
    assert (stepped(run, run.ends + MINUTE).state, run.detail) == ("finished", "")
