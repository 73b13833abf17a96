"""Jobs that have ended long ago stay as rows, some hundred a night; what runs every few seconds does not read them."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from images.ledger.filters import LedgerFilters
from images.ledger.selectors import lines_for
from images.models import Image
from images.rewrite.space import Admitted
from images.selectors.lists import Matches
from images.tasks import advance_policies, expire_undo, look_at_guests, look_for_trouble
from storage_admin.accounts.models import SYSTEM
from storage_admin.api.work_metrics import work
from storage_admin.jobs import reaper
from storage_admin.jobs.filters import JobListFilters
from storage_admin.jobs.models import Job
from storage_admin.jobs.selectors import jobs_for
from tests.api.test_query_budgets import explained
from tests.factories import ImageFactory

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
COUNT = 2000
DAY = timedelta(days=1)


@pytest.fixture
def image() -> Image:
    """The image that all those jobs were about, all on one host."""
    image, now = ImageFactory.create(), timezone.now()
    Job.objects.bulk_create(
        Job(
            kind="reclaim", state="succeeded" if number % 50 else "failed", rewrites=True, host=image.host,
            target_kind="image", target_id=image.pk, created_by=("admin", "policy nights")[number % 2],
            created=now - number * DAY / 10, started=now - number * DAY / 10, finished=now - number * DAY / 10,
            freed_bytes=number, before_bytes=2 * number, after_bytes=number, space_pool=image.pool,
        )
        for number in reversed(range(COUNT))
    )  # fmt: skip
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE jobs_job")
    return image


def looked_at(act: Callable[[], object]) -> list[str]:
    """How the database looks for jobs: a line of its plan for each way into the table."""
    with CaptureQueriesContext(connection) as captured:
        act()
    asked = [
        one["sql"] for one in captured if '"jobs_job"' in one["sql"] and one["sql"].startswith(("SELECT", "UPDATE"))
    ]
    plans = [line for sql in asked for line in explained(sql).splitlines()]
    return [line for line in plans if "jobs_job" in line or "job_" in line]


def reads_past_jobs(line: str) -> bool:
    """Whether a way into the table leads over all jobs, or all of a host: an index of a few of them does not."""
    if connection.vendor == "postgresql":
        return "Seq Scan on jobs_job" in line
    few = any(f"job_{why}" in line for why in ("needs_recovery", "repoint_due", "unlock_due", "start_due", "parked"))
    return ("SCAN jobs_job" in line and not few) or "(host_id=?)" in line


def reads_no_past_job(act: Callable[[], object]) -> list[str]:
    """The ways into the table, of which none leads over past jobs."""
    ways = looked_at(act)
    assert not [line for line in ways if reads_past_jobs(line)], ways
    return ways


@pytest.mark.parametrize("every_few_seconds", [reaper.recover_hosts, look_at_guests, expire_undo, advance_policies])
@pytest.mark.usefixtures("image")
def test_what_runs_every_few_seconds_reads_no_past_job(every_few_seconds: Callable[[], None]) -> None:
    assert not [line for line in looked_at(every_few_seconds) if reads_past_jobs(line)]


@pytest.mark.usefixtures("image")
def test_alerts_read_no_past_job() -> None:
    assert reads_no_past_job(look_for_trouble)


def test_whether_a_job_has_room_is_told_without_the_past_jobs_of_its_host(image: Image) -> None:
    assert reads_no_past_job(lambda: Admitted().worst(image.pool))


@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(
    "asked", ["by=policy&from={}&to={}", "state=succeeded", "state=succeeded&from={}", "by=policy"]
)
def test_a_list_of_jobs_is_counted_in_an_index(asked: str) -> None:
    query = dict(
        part.split("=") for part in asked.replace("{}", f"{timezone.now() - 190 * DAY:%Y-%m-%d}", 1).split("&")
    )
    query = {name: value.replace("{}", f"{timezone.now():%Y-%m-%d}") for name, value in query.items()}
    found = Matches(JobListFilters(query, jobs_for(SYSTEM)).qs)
    with CaptureQueriesContext(connection) as captured:
        assert found.count() > 500
    counted = next(one["sql"] for one in captured if "COUNT(*)" in one["sql"])
    # PostgreSQL takes the table where it is small.
    assert connection.vendor == "postgresql" or "COVERING INDEX job_" in explained(counted), explained(counted)


@pytest.mark.usefixtures("image")
def test_metrics_and_one_kind_of_the_ledger_are_read_from_its_own_index() -> None:
    with CaptureQueriesContext(connection) as captured:
        list(work(timezone.now()))
        assert LedgerFilters({"kind": "reclaim"}, lines_for(SYSTEM)).qs.count() == COUNT
    asked = [one["sql"] for one in captured if '"freed_bytes"' in one["sql"] and '"undo_state" =' not in one["sql"]]
    assert len(asked) == 3  # durations, bytes, and the count
    for sql in asked:
        assert connection.vendor == "postgresql" or "COVERING INDEX job_ledger" in explained(sql), explained(sql)
