"""Which windows become runs: one for each due time, whoever looks and however seldom."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.django import TestCase

from images.models import Policy, PolicyRun
from images.policies import clock, services
from images.policies.shape import Rules
from storage_admin.accounts.models import AuditEntry
from storage_admin.events.models import Alert
from storage_admin.jobs import automation
from storage_admin.jobs.models import Automation
from tests.factories import PolicyFactory
from tests.working import ADMIN, reread

pytestmark = pytest.mark.django_db
START = datetime(2026, 5, 1, 12, tzinfo=UTC)
TEN = datetime(2026, 5, 1, 22, tzinfo=UTC)
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.fixture(autouse=True)
def since_noon(policy: Policy) -> Policy:
    Policy.objects.update(clock=START)
    return reread(policy)


def states() -> list[tuple[str, str]]:
    return [(f"{run.due:%d %H:%M}", run.state) for run in PolicyRun.objects.order_by("due")]


def pause(at: datetime, *, paused: bool = True) -> None:
    automation.switch(ADMIN, paused=paused)
    Automation.objects.update(since=at)


def test_a_window_that_opens_becomes_one_run(policy: Policy) -> None:
    assert clock.advance(TEN - MINUTE) == []
    [run] = clock.advance(TEN + MINUTE / 4)
    assert (run.state, run.due, run.ends, run.detail) == ("running", TEN, TEN + 6 * HOUR, "")
    assert run.rules["name"] == policy.name
    assert clock.advance(TEN + MINUTE) == []
    assert states() == [("01 22:00", "running")]
    entry = AuditEntry.objects.get(what="policy run started")
    assert entry.who == f"policy {policy.name}"


def test_a_window_that_is_still_open_is_begun_late_with_what_remains_of_it() -> None:
    [run] = clock.advance(TEN + 5 * HOUR)
    assert (run.state, run.ends) == ("running", TEN + 6 * HOUR)
    assert "300 minutes late" in run.detail


@pytest.mark.parametrize("late", [5 * HOUR + 30 * MINUTE, 6 * HOUR, 14 * HOUR])
def test_a_window_that_is_over_or_has_only_quiet_minutes_left_is_missed_and_told(
    policy: Policy, late: timedelta
) -> None:
    [run] = clock.advance(TEN + late)
    assert run.state == "missed"
    assert "scheduler was not running" in run.detail
    assert run.finished == TEN + late
    alert = Alert.objects.get(closed=None)
    assert (alert.key, alert.severity) == (f"policy_failed:{policy.pk}", "warning")
    entry = AuditEntry.objects.get(what="policy window missed")
    assert (entry.who, entry.target) == (f"policy {policy.name}", policy.name)
    assert entry.after == {"run": run.pk, "due": TEN.isoformat(), "detail": run.detail}


def test_of_several_windows_the_one_that_is_open_runs_and_the_others_are_missed() -> None:
    clock.advance(TEN + 49 * HOUR)
    assert states() == [("01 22:00", "missed"), ("02 22:00", "missed"), ("03 22:00", "running")]


def test_after_a_very_long_time_the_latest_missed_windows_stand_for_all_and_the_last_one_says_how_many_more() -> None:
    told = [run.detail for run in clock.advance(TEN + 100 * 24 * HOUR + 10 * HOUR)]
    says_more = ["Earlier windows were missed as well" in detail for detail in told]
    assert says_more == [False] * (clock.MOST_MISSED - 1) + [True]
    assert "not listed: 81." in told[-1]


def test_a_policy_that_is_switched_off_runs_nothing_and_misses_nothing(policy: Policy) -> None:
    services.change(ADMIN, policy, {"enabled": False})
    assert clock.advance(TEN + 30 * HOUR) == []
    services.change(ADMIN, policy, {"enabled": True})
    assert clock.advance(TEN + 30 * HOUR) == []
    assert states() == []


def test_a_window_that_passes_while_automation_is_paused_is_missed_and_says_by_whom() -> None:
    pause(TEN - HOUR)
    assert clock.advance(TEN + MINUTE) == []
    [run] = clock.advance(TEN + 6 * HOUR)
    assert (run.state, run.detail) == ("missed", "Automation was paused by ada.")
    assert not Alert.objects.exists()


def test_when_automation_goes_on_within_the_window_the_rest_of_it_is_used() -> None:
    pause(TEN - HOUR)
    clock.advance(TEN + MINUTE)
    pause(TEN + 2 * HOUR, paused=False)
    [run] = clock.advance(TEN + 2 * HOUR + MINUTE)
    assert run.state == "running"


def test_a_pause_that_ended_right_after_the_window_is_why_it_was_missed() -> None:
    pause(TEN - HOUR)
    clock.advance(TEN + 5 * HOUR)
    pause(TEN + 6 * HOUR + MINUTE / 10, paused=False)
    [run] = clock.advance(TEN + 6 * HOUR + MINUTE / 4)
    assert (run.state, run.detail) == ("missed", "Automation was paused until 2026-05-02 04:00 UTC.")


def test_a_policy_that_is_changed_to_other_times_does_not_make_up_for_earlier_ones(policy: Policy) -> None:
    services.change(ADMIN, policy, {"cron": "0 3 * * *"})
    assert Policy.objects.get().clock > START
    Policy.objects.update(clock=START)
    services.change(ADMIN, reread(policy), {"max_jobs_per_host": 2})
    assert Policy.objects.get().clock == START


def test_a_machine_whose_time_goes_back_makes_no_second_run(policy: Policy) -> None:
    clock.advance(TEN + MINUTE)
    Policy.objects.update(clock=START)
    assert clock.advance(TEN + 2 * MINUTE) == []
    assert states() == [("01 22:00", "running")]


class AnyTicks(TestCase):
    """However the scheduler's ticks fall, each due time has one run: in its window, or missed."""

    @settings(max_examples=40)
    @given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.sampled_from(["0 22 * * *", "30 */3 * * *"]))
    def test_one_run_for_each_due_time(self, steps: list[int], cron: str) -> None:
        Policy.objects.all().delete()
        policy = PolicyFactory.create(cron=cron, window_minutes=120, clock=START, timezone="Europe/Berlin")
        now = START
        for minutes in steps:
            now += minutes * MINUTE
            clock.advance(now)
            clock.advance(now)
        due = [window.opens for window in Rules.of(policy).schedule.opened(START, now)]
        made = list(PolicyRun.objects.order_by("due").values_list("due", flat=True))
        assert made == sorted(set(made))
        assert set(made) <= set(due)
        # Only of many that were missed together are the earlier ones not listed.
        assert len(made) == len(due) or any(
            "Earlier windows were missed as well" in run.detail for run in PolicyRun.objects.all()
        )
        for run in PolicyRun.objects.filter(state="running"):
            assert run.due <= run.started < run.ends - timedelta(minutes=30)
