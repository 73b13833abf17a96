"""A machine's time that was ahead and was put right; a policy whose windows nobody can tell."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError

from images import tasks
from images.models import Policy, PolicyRun
from images.policies import clock, runs, services
from storage_admin.accounts.models import AuditEntry
from storage_admin.events.models import Alert
from storage_admin.jobs.models import Job
from tests.factories import PolicyFactory
from tests.policies.test_clock import HOUR, MINUTE, START, TEN, since_noon
from tests.policies.test_runs import images, stepped
from tests.web.html import text_of
from tests.working import ADMIN, client_as, reread

__all__ = ["since_noon"]

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]
DAY = timedelta(days=1)


def states() -> list[tuple[str, str]]:
    return [(f"{run.due:%Y-%m-%d %H:%M}", run.state) for run in PolicyRun.objects.order_by("due")]


def test_a_policy_opens_again_when_a_time_that_was_ahead_was_put_right(policy: Policy) -> None:
    clock.advance(TEN + 365 * DAY + 10 * HOUR)
    assert Policy.objects.get().clock == TEN + 365 * DAY
    assert clock.advance(START + HOUR) == []
    assert Policy.objects.get().clock == START + HOUR
    # What had not come was not missed, and has its run when it comes.
    assert states() == []
    [run] = clock.advance(TEN + MINUTE)
    assert (run.due, run.state) == (TEN, "running")
    entry = AuditEntry.objects.get(what="policy clock put back")
    assert (entry.who, entry.target) == (f"policy {policy.name}", policy.name)
    assert entry.before == {"clock": (TEN + 365 * DAY).isoformat()}
    assert entry.after == {"clock": (START + HOUR).isoformat(), "windows no longer missed": clock.MOST_MISSED}


def test_a_window_that_was_begun_too_early_is_stopped_and_opens_when_its_time_has_come() -> None:
    images(1)
    [early] = clock.advance(TEN + MINUTE)
    runs.work(TEN + MINUTE)
    assert Job.objects.get().state == "queued"
    clock.advance(START + HOUR)
    assert (reread(early).state, "was ahead" in early.detail) == ("stopped", True)
    assert Job.objects.get().state == "cancelled"
    [run] = clock.advance(TEN + MINUTE / 4)
    assert (run.due, run.state) == (TEN, "running")


def test_a_window_whose_run_has_ended_already_is_not_run_twice_when_the_time_was_put_right() -> None:
    [run] = clock.advance(TEN + MINUTE)
    PolicyRun.objects.update(state="finished", finished=TEN + HOUR)
    clock.advance(START + HOUR)
    assert clock.advance(TEN + MINUTE) == []
    assert [row.pk for row in PolicyRun.objects.all()] == [run.pk]


def test_a_choice_that_was_cut_off_at_a_time_that_was_ahead_is_made_anew(policy: Policy) -> None:
    run = services.run_now(ADMIN, policy, START)
    PolicyRun.objects.update(chooser="somebody", chooser_since=START + DAY)
    assert (stepped(run, START).chosen_at, run.state) == (START, "finished")


def test_schedulers_whose_times_differ_a_little_take_nothing_back() -> None:
    clock.advance(TEN + MINUTE / 4)
    assert clock.advance(TEN - 4 * MINUTE) == []
    assert Policy.objects.get().clock == TEN
    assert states() == [("2026-05-01 22:00", "running")]


@pytest.mark.parametrize("columns", [{"timezone": "Gone/Zone"}, {"cron": "0 99 * * *"}])
def test_a_policy_whose_windows_cannot_be_told_is_an_alert_and_keeps_no_other_from_its_runs(
    columns: dict[str, str],
) -> None:
    broken = PolicyFactory.create(name="a", clock=START, **columns)
    Policy.objects.filter(pk=broken.pk).update(clock=START)
    [run] = clock.advance(TEN + MINUTE)
    assert run.policy_id != broken.pk
    alert = Alert.objects.get(closed=None)
    assert (alert.key, alert.severity) == (f"policy_failed:{broken.pk}", "danger")
    assert next(iter(columns)) in alert.detail
    tasks.advance_policies()
    assert Alert.objects.filter(key=alert.key).count() == 1
    services.remove(ADMIN, broken)
    assert not Alert.objects.filter(key=alert.key, closed=None).exists()


def test_a_database_that_is_locked_for_a_moment_is_no_alert_and_keeps_no_other_policy_from_its_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked = PolicyFactory.create(name="a", clock=START)
    advance = clock._advance

    def at_times(policy: Policy, *about: Any) -> list[PolicyRun]:
        if policy.pk == locked.pk:
            raise OperationalError("database is locked")
        return advance(policy, *about)

    with monkeypatch.context() as patched:
        patched.setattr(clock, "_advance", at_times)
        assert [run.policy_id for run in clock.advance(TEN + MINUTE)] != [locked.pk]
    assert not Alert.objects.exists()
    assert [run.policy_id for run in clock.advance(TEN + 2 * MINUTE)] == [locked.pk]


def test_pages_show_a_policy_whose_windows_cannot_be_told_and_all_others() -> None:
    broken = PolicyFactory.create(name="a", timezone="Gone/Zone")
    client = client_as(role="viewer")
    page = text_of(client.get("/policies/").content.decode())
    assert page.count("This time zone does not exist") == 1
    answer = client.get(f"/policies/{broken.pk}/")
    assert "This time zone does not exist" in text_of(answer.content.decode())
    lines = b"".join(client.get("/policies/export.csv").streaming_content)  # type: ignore[attr-defined]
    assert len(lines.splitlines()) == 3
