"""Times on pages stand in the reader's zone, by the browser's cookie or the user's choice; all else stays in UTC."""

import csv
import io
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from django.test import Client
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from storage_admin.accounts import saved_views
from storage_admin.accounts.middleware import ZONE_COOKIE
from storage_admin.accounts.models import AuditEntry, User
from storage_admin.web.templatetags.storage import ago, at
from tests.factories import JobFactory, JobLogFactory, PolicyFactory, PolicyRunFactory, TokenFactory, UserFactory
from tests.web.conftest import Filled
from tests.web.html import tags_of

#: In Berlin both are 02:30, the first in summer time.
TWICE = datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
LATE = datetime(2026, 11, 24, 23, 30, tzinfo=UTC)


def says(client: Client, zone: str) -> Client:
    client.cookies[ZONE_COOKIE] = zone
    return client


def text(client: Client, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200
    return answer.content.decode()


def times(page: str) -> list[str]:
    return re.findall(r"<time [^>]*>([^<]*)</time>", page)


def listed(page: str) -> set[int]:
    return {int(number) for number in re.findall(r'href="/jobs/(\d+)/"', page)}


@pytest.mark.parametrize(
    ("zone", "shown"),
    [
        ("Europe/Berlin", "2026-11-25 00:30 CET"),
        ("America/New_York", "2026-11-24 18:30 EST"),
        ("Asia/Kathmandu", "2026-11-25 05:15 +05:45"),
        ("America/Sao_Paulo", "2026-11-24 20:30 -03:00"),
        ("UTC", "2026-11-24 23:30 UTC"),
    ],
)
def test_a_page_shows_times_in_the_zone_of_the_browser(viewer: Client, zone: str, shown: str) -> None:
    JobFactory.create(created=LATE)
    page = text(says(viewer, zone), "/jobs/")
    assert times(page) == [shown]
    (exact,) = [found["datetime"] for tag, found in tags_of(page) if tag == "time"]
    assert parse_datetime(exact or "") == LATE
    assert timezone.get_current_timezone_name() == "UTC"


@pytest.mark.parametrize(
    "cookie",
    [
        "", "Mars/Olympus", "../../../etc/passwd", "/etc/localtime", "Europe", "Europe/Berlin/../Berlin", "localtime",
        "europe/berlin", "A" * 3000, "Europe/Berlin\0", "undefined", "%45urope/Berlin", "posix/UTC",
    ],
)  # fmt: skip
def test_a_cookie_that_names_no_zone_is_ignored(viewer: Client, cookie: str) -> None:
    JobFactory.create(created=LATE)
    cookies = f"sessionid={viewer.cookies['sessionid'].value}; {ZONE_COOKIE}={cookie}"
    page = viewer.get("/jobs/", headers={"cookie": cookies})
    assert (page.status_code, times(page.content.decode())) == (200, ["2026-11-24 23:30 UTC"])


def test_a_users_own_zone_comes_before_the_browsers(viewer: Client) -> None:
    JobFactory.create(created=LATE)
    says(viewer, "America/New_York")
    assert viewer.post("/account/zone/", {"time_zone": "Europe/Berlin"}).status_code == 302
    assert times(text(viewer, "/jobs/")) == ["2026-11-25 00:30 CET"]
    entry = AuditEntry.objects.get(what="time zone changed")
    assert (entry.who, entry.target, entry.before, entry.after) == (
        "the-viewer", "the-viewer", {"time_zone": ""}, {"time_zone": "Europe/Berlin"},
    )  # fmt: skip
    viewer.post("/account/zone/", {"time_zone": ""})
    assert times(text(viewer, "/jobs/")) == ["2026-11-24 18:30 EST"]


def test_a_zone_that_is_no_more_counts_as_none(viewer: Client) -> None:
    User.objects.update(time_zone="Pacific/Atlantis")
    JobFactory.create(created=LATE)
    assert times(text(says(viewer, "Europe/Berlin"), "/jobs/")) == ["2026-11-25 00:30 CET"]


@pytest.mark.parametrize("zone", ["Mars/Olympus", "../UTC", "A" * 3000])
def test_a_zone_that_is_none_cannot_be_chosen(viewer: Client, zone: str) -> None:
    assert viewer.post("/account/zone/", {"time_zone": zone}).status_code == 302
    assert User.objects.get().time_zone == ""
    assert not AuditEntry.objects.filter(what="time zone changed").exists()


def test_choosing_the_same_zone_again_is_no_change(viewer: Client) -> None:
    for _ in range(2):
        viewer.post("/account/zone/", {"time_zone": "Europe/Berlin"})
    assert AuditEntry.objects.filter(what="time zone changed").count() == 1
    chosen = [found["value"] for tag, found in tags_of(text(viewer, "/account/")) if "selected" in found]
    assert chosen == ["Europe/Berlin"]


def test_two_moments_of_one_clock_are_told_apart() -> None:
    with timezone.override("Europe/Berlin"):
        first, second = (times(at(TWICE + timedelta(hours=hours)))[0] for hours in (0, 1))
    assert (first, second) == ("2026-10-25 02:30 CEST", "2026-10-25 02:30 CET")


@pytest.mark.parametrize(
    ("zone", "shown"),
    [("Pacific/Auckland", "9999-12-31 23:30:00 UTC"), ("America/New_York", "9999-12-31 18:30:00 EST")],
)
def test_the_end_of_the_calendar_is_shown_in_any_zone(admin: Client, zone: str, shown: str) -> None:
    TokenFactory.create(expires=datetime(9999, 12, 31, 23, 30, tzinfo=UTC))
    assert f'title="{shown}"' in text(says(admin, zone), "/tokens/")


def test_a_relative_time_has_the_absolute_one_as_its_title() -> None:
    with timezone.override("Europe/Berlin"):
        (attributes,) = [found for _, found in tags_of(ago(TWICE))]
    assert attributes == {"datetime": TWICE.isoformat(), "title": "2026-10-25 02:30:00 CEST"}


def test_the_lines_of_a_log_have_their_zone(viewer: Client, filled: Filled) -> None:
    JobLogFactory.create(job=filled.done, at=LATE)
    assert "00:30:00 CET" in times(text(says(viewer, "Europe/Berlin"), f"/jobs/{filled.done.pk}/"))


def test_windows_stand_in_the_readers_zone_and_in_the_policys(viewer: Client) -> None:
    policy = PolicyFactory.create(timezone="America/New_York")
    run = PolicyRunFactory.create(policy=policy, due=LATE)
    says(viewer, "Europe/Berlin")
    policys = re.compile(r"to \w{3} \d\d:\d\d\s+America/New_York")
    page = text(viewer, f"/policies/{policy.pk}/")
    assert "2026-11-25 00:30 CET" in times(page)
    assert len(policys.findall(page)) == 5
    page = text(viewer, f"/policies/{policy.pk}/runs/{run.pk}/")
    assert "2026-11-25 00:30 CET" in (found := re.search(r"<title>(.*?)</title>", page, re.DOTALL) or [""])[0], found
    assert policys.search(text(says(viewer, "America/New_York"), f"/policies/{policy.pk}/")) is None


@pytest.fixture
def around_midnight(db: None) -> list[int]:
    """Jobs of 25 November: in UTC the last two alone, in Berlin the first two alone."""
    return [JobFactory.create(created=LATE + timedelta(hours=hours)).pk for hours in (0, 12, 24)]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("from=2026-11-25&to=2026-11-25&zone=Europe/Berlin", [0, 1]),
        ("from=2026-11-25&to=2026-11-25&zone=UTC", [1, 2]),
        ("from=2026-11-25&to=2026-11-25", [1, 2]),
        ("from=2026-11-25T00:31&zone=Europe/Berlin", [1, 2]),
        ("from=2026-11-24T23:31:00Z&zone=Asia/Kathmandu", [1, 2]),
    ],
)
@pytest.mark.parametrize("reader", ["Europe/Berlin", "Pacific/Auckland", "UTC"])
def test_dates_are_those_of_the_zone_that_the_address_names_whoever_reads_it(
    viewer: Client, around_midnight: list[int], given: str, found: list[int], reader: str
) -> None:
    says(viewer, reader)
    wanted = {around_midnight[number] for number in found}
    assert listed(text(viewer, f"/jobs/?{given}")) == wanted
    answer = viewer.get(f"/jobs/export.csv?{given}")
    rows = list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))  # type: ignore[attr-defined]
    assert {int(row["id"]) for row in rows} == wanted
    assert all(row["created"].endswith("Z") for row in rows)


@pytest.mark.parametrize("address", ["/jobs/", "/ledger/", "/audit/"])
def test_forms_say_in_which_zone_they_read_dates(admin: Client, address: str) -> None:
    page = text(says(admin, "Europe/Berlin"), f"{address}?from=2026-11-25&zone=Europe/Berlin")
    assert "rom (Europe/Berlin)</label>" in page
    fields = {found.get("name"): found for tag, found in tags_of(page) if tag == "input"}
    assert fields["zone"]["value"] == "Europe/Berlin"
    assert (fields["from"]["type"], fields["from"]["value"]) == ("date", "2026-11-25")


@pytest.mark.parametrize("zone", ["", "&zone=UTC"])
def test_a_date_of_another_zone_is_shown_as_the_moment_that_it_is(viewer: Client, zone: str) -> None:
    page = text(says(viewer, "Europe/Berlin"), f"/jobs/?from=2026-11-25&to=2026-11-25{zone}")
    fields = {found.get("name"): found for tag, found in tags_of(page) if tag == "input"}
    assert [fields[name]["value"] for name in ("from", "to", "zone")] == [
        "2026-11-25T00:00:00+00:00", "2026-11-26T00:00:00+00:00", "Europe/Berlin",
    ]  # fmt: skip
    assert fields["from"]["type"] == "text"


def test_a_day_has_as_many_hours_as_its_clocks_say(viewer: Client) -> None:
    jobs = [
        JobFactory.create(created=datetime(2026, 10, day, hour, 30, tzinfo=UTC)).pk
        for day, hour in ((24, 21), (24, 22), (25, 22), (25, 23))
    ]
    page = text(says(viewer, "Europe/Berlin"), "/jobs/?from=2026-10-25&to=2026-10-25&zone=Europe/Berlin")
    assert listed(page) == {jobs[1], jobs[2]}


@pytest.mark.parametrize("zone", ["Mars/Olympus", "../UTC", "A" * 3000])
def test_an_address_that_names_no_zone_that_there_is_says_so(viewer: Client, db: None, zone: str) -> None:
    assert viewer.get(f"/jobs/?from=2026-11-25&zone={zone}").context["ignored"] == ["zone"]
    assert viewer.get(f"/jobs/export.csv?from=2026-11-25&zone={zone}").status_code == 400
    assert viewer.get(f"/jobs/export.csv?zone={zone}").status_code == 200


@pytest.mark.parametrize(
    ("page", "given", "kept"),
    [
        ("jobs", "zone=Europe/Berlin&state=failed", "state=failed"),
        ("jobs", "from=2026-11-25&zone=UTC", "from=2026-11-25&zone=UTC"),
        ("images", "zone=UTC&state=ok", "state=ok"),
    ],
)
def test_a_saved_view_keeps_the_zone_of_its_dates(page: str, given: str, kept: str) -> None:
    assert saved_views.pages()[page].clean(given) == kept


@pytest.mark.parametrize("day", ["0001-01-01", "9999-12-31", "2026-02-30", "x"])
@pytest.mark.parametrize("zone", ["Pacific/Auckland", "America/New_York"])
def test_no_date_is_too_early_or_too_late_for_an_answer(viewer: Client, day: str, zone: str) -> None:
    for given in ("", "&zone=UTC", f"&zone={zone}"):
        text(says(viewer, zone), f"/jobs/?from={day}&to={day}{given}")


def test_rest_stays_in_utc(browser_of: Callable[[str], Client], around_midnight: list[int]) -> None:
    client = says(browser_of("viewer"), "Europe/Berlin")
    client.post("/account/zone/", {"time_zone": "Europe/Berlin"})
    found = client.get("/api/v1/jobs/?from=2026-11-25&to=2026-11-25").json()["results"]
    assert {job["id"] for job in found} == set(around_midnight[1:])
    assert {job["created"] for job in found} == {"2026-11-25T11:30:00Z", "2026-11-25T23:30:00Z"}


def test_charts_are_told_the_readers_zone(viewer: Client, filled: Filled) -> None:
    says(viewer, "Europe/Berlin")
    (root,) = [found for tag, found in tags_of(text(viewer, f"/pools/{filled.pool.pk}/")) if tag == "html"]
    assert root["data-zone"] == "Europe/Berlin"


def test_who_is_locked_out_reads_until_when_by_their_own_clock(db: None) -> None:
    client = says(Client(), "Asia/Kathmandu")
    UserFactory.create(username="eve")
    for _ in range(12):
        answer = client.post("/login/", {"username": "eve", "password": "wrong"})
    assert "+05:45" in answer.content.decode()
