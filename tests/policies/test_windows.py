"""When windows open: cron in a time zone, on the nights when clocks change as well."""

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from images.policies.windows import Schedule, openings
from storage_admin.errors import InvalidError

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def schedule(cron: str = "0 22 * * *", timezone: str = "UTC", window: int = 360, quiet: int = 30) -> Schedule:
    return Schedule(cron, timezone, window, quiet)


def opens(cron: str, timezone: str, after: str, count: int) -> list[str]:
    return [f"{one:%m-%d %H:%M}" for one in islice(openings(cron, timezone, utc(after)), count)]


def test_a_window_opens_at_its_wall_clock_time_in_summer_and_winter() -> None:
    assert opens("0 22 * * *", BERLIN, "2026-03-28", 3) == ["03-28 21:00", "03-29 20:00", "03-30 20:00"]
    assert opens("0 22 * * 1-5", NEW_YORK, "2026-11-27T12:00", 2) == ["11-28 03:00", "12-01 03:00"]


@pytest.mark.parametrize(
    ("zone", "after", "expected"),
    [
        # Berlin goes from 02:00 to 03:00 on 29 March 2026 at 01:00 UTC, New York on 8 March at 07:00 UTC.
        (BERLIN, "2026-03-28T00:00", ["03-28 01:30", "03-29 01:00", "03-30 00:30"]),
        (NEW_YORK, "2026-03-07T00:00", ["03-07 07:30", "03-08 07:00", "03-09 06:30"]),
    ],
)
def test_a_time_that_does_not_exist_is_the_first_one_that_does(zone: str, after: str, expected: list[str]) -> None:
    assert opens("30 2 * * *", zone, after, 3) == expected


@pytest.mark.parametrize(
    ("zone", "cron", "after", "expected"),
    [
        # Berlin goes back from 03:00 to 02:00 on 25 October 2026 at 01:00 UTC, New York from 02:00 on 1 November.
        (BERLIN, "30 2 * * *", "2026-10-24T00:00", ["10-24 00:30", "10-25 00:30", "10-26 01:30"]),
        (NEW_YORK, "30 1 * * *", "2026-10-31T00:00", ["10-31 05:30", "11-01 05:30", "11-02 06:30"]),
        # also where the expression is for each of several hours
        (BERLIN, "0 */2 * * *", "2026-10-24T22:00", ["10-25 00:00", "10-25 03:00"]),
    ],
)
def test_a_time_that_exists_twice_counts_once_the_first_time(
    zone: str, cron: str, after: str, expected: list[str]
) -> None:
    assert opens(cron, zone, after, len(expected)) == expected


@pytest.mark.parametrize("after", ["2026-10-25T00:30", "2026-10-25T00:45", "2026-10-25T01:10", "2026-10-25T01:30"])
def test_whoever_looks_within_the_hour_that_comes_twice_finds_no_second_window(after: str) -> None:
    assert opens("30 2 * * *", BERLIN, after, 1) == ["10-26 01:30"]


def test_two_times_that_fall_together_when_clocks_go_forward_are_one_window() -> None:
    assert opens("0,30 2,3 * * *", BERLIN, "2026-03-29T00:00", 2) == ["03-29 01:00", "03-29 01:30"]


@given(
    cron=st.sampled_from(["30 2 * * *", "*/20 1-3 * * *", "0 * * * *", "15 2 29 3 *", "0 1,2,3 * * 0", "59 23 * * *"]),
    zone=st.sampled_from([BERLIN, NEW_YORK, "Australia/Lord_Howe", "Africa/Cairo", "UTC"]),
    start=st.integers(0, 700 * 24 * 60).map(lambda minutes: utc("2026-01-01") + timedelta(minutes=minutes)),
    looks=st.lists(st.integers(1, 400), min_size=1, max_size=25),
)
def test_every_due_time_is_found_once_however_the_looks_fall(
    cron: str, zone: str, start: datetime, looks: list[int]
) -> None:
    clock, found = start, []
    for minutes in looks:
        now = clock + timedelta(minutes=minutes)
        found += [window.opens for window in schedule(cron, zone, 5, 0).opened(clock, now)]
        clock = now
    at_once = [window.opens for window in schedule(cron, zone, 5, 0).opened(start, clock)]
    assert found == at_once
    walls = [moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None) for moment in found]
    assert len(set(walls)) == len(walls)
    assert all(first < second for first, second in pairwise(found))


def test_a_window_ends_when_the_next_one_opens() -> None:
    first, second = schedule("0 */4 * * *", window=360).next(utc("2026-01-01T00:30"), 2)
    assert first.closes == second.opens == utc("2026-01-01T08:00")
    assert first.last_start == utc("2026-01-01T07:30")


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"cron": "0 22 * *"}, "cron", "five fields"),
        ({"cron": "0 22 * * * *"}, "cron", "five fields"),
        ({"cron": "0 25 * * *"}, "cron", "hour field"),
        ({"cron": "0 0 32 * *"}, "cron", "day-of-month field"),
        ({"cron": "0 22 31 2 *"}, "cron", "No such day"),
        ({"cron": "0 0 31 4,6 *"}, "cron", "No such day"),
        ({"cron": "0 0 31 2,x *"}, "cron", "month field"),
        ({"cron": "@daily"}, "cron", "five fields"),
        ({"timezone": "Europe/Atlantis"}, "timezone", "time zone does not exist"),
        ({"timezone": "../../etc/passwd"}, "timezone", "time zone does not exist"),
        ({"timezone": ""}, "timezone", "time zone does not exist"),
        ({"timezone": "localtime"}, "timezone", "time zone does not exist"),
        ({"timezone": "Factory"}, "timezone", "time zone does not exist"),
        ({"quiet": 360}, "quiet_minutes", "no job could start"),
        ({"cron": "*/30 * * * *"}, "quiet_minutes", "30 minutes"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_told_by_its_field(changes: dict[str, object], field: str, says: str) -> None:
    with pytest.raises(InvalidError) as raised:
        schedule(**changes).check(utc("2026-01-01"))  # type: ignore[arg-type]
    assert says in raised.value.fields[field]


#: On the night when clocks go from 02:00 to 03:00, only half an hour of its first window is left, and that is quiet.
SHORTENED = schedule("30 2,3 * * *", BERLIN, window=60, quiet=30)


@pytest.mark.parametrize("today", ["2026-11-01", "2027-02-01", "2027-03-27T23:00"])
def test_what_a_clock_change_leaves_of_one_window_makes_no_schedule_wrong(today: str) -> None:
    SHORTENED.check(utc(today))


def test_a_window_that_is_too_short_every_night_is_wrong_in_any_zone() -> None:
    with pytest.raises(InvalidError, match="02:00 lasts 30 minutes"):
        schedule("0,30 2 * * *", BERLIN, window=60, quiet=30).check(utc("2026-01-01"))


def test_where_a_clock_change_leaves_no_time_for_work_there_is_no_window() -> None:
    found = [f"{window.opens:%m-%d %H:%M}" for window in SHORTENED.next(utc("2027-03-27T12:00"), 3)]
    assert found == ["03-28 01:30", "03-29 00:30", "03-29 01:30"]
    assert [window.opens for window in SHORTENED.opened(utc("2027-03-28"), utc("2027-03-28T01:29"))] == []
