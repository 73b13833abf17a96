"""What the ledger comes to: in all, by host, pool and month, however it is filtered."""

import random
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from images.ledger.chart import NAMES, charts_of, in_a_row
from images.ledger.selectors import ORDERINGS, Sums, freed_of, lines_for, ordered
from images.ledger.sums import OfMonth, summary
from storage_admin.accounts.models import SYSTEM, Actor, Role
from storage_admin.jobs.models import Job
from storage_admin.words import MINUS
from tests.api.test_query_budgets import explained
from tests.factories import GIB, HostFactory, ImageFactory, StoragePoolFactory
from tests.ledger.rows import NOON, freed, held

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def test_won_less_taken_is_what_was_freed_and_what_is_held_stands_apart() -> None:
    freed(10, 4)
    freed(0, 3, kind="convert")
    held(9, 2)
    sums = freed_of(Job.objects.all())
    assert sums == Sums(
        freed_bytes=3,
        won_bytes=6,
        taken_bytes=3,
        copies_bytes=3,
        held_bytes=9,
        pending_bytes=7,
        jobs_count=2,
        held_count=1,
    )


def test_nothing_comes_to_zeros() -> None:
    assert freed_of(Job.objects.all()) == Sums()
    assert summary(lines_for(SYSTEM)).total == Sums()
    held()
    held()
    assert charts_of(summary(lines_for(SYSTEM))) == []


def test_sums_of_hosts_pools_and_months_are_those_of_the_rows() -> None:
    chance = random.Random(7)
    pools = [StoragePoolFactory.create(host=host) for host in HostFactory.create_batch(2) for _ in range(2)]
    images = [ImageFactory.create(pool=chance.choice(pools)) for _ in range(8)]
    hosts: Counter[int] = Counter()
    of_pool: Counter[int] = Counter()
    months: Counter[str] = Counter()
    for _ in range(60):
        image = chance.choice(images)
        at = NOON - timedelta(hours=chance.randrange(4000))
        line = freed(chance.randrange(GIB), chance.randrange(GIB), image, at)
        value = line.freed_bytes or 0
        hosts[image.host_id] += value
        of_pool[image.pool_id] += value
        months[f"{at:%Y-%m}"] += value
    held(5, 1, images[0])
    found = summary(lines_for(SYSTEM))
    assert {one.id: one.sums.freed_bytes for one in found.hosts} == hosts
    assert {one.id: one.sums.freed_bytes for one in found.pools} == of_pool
    assert {one.month: one.sums.freed_bytes for one in found.months} == months
    assert found.total.freed_bytes == sum(hosts.values())
    assert (found.total.held_bytes, sum(one.sums.held_bytes for one in found.hosts)) == (5, 5)
    assert all(one.sums.held_bytes == 0 for one in found.months)
    assert list(months) != sorted(months)
    assert [one.month for one in found.months] == sorted(months)


def test_a_conversion_into_another_pool_takes_from_that_one() -> None:
    image = ImageFactory.create()
    other = StoragePoolFactory.create(host=image.host)
    freed(0, 4, image, pool=other, kind="convert")
    (found,) = summary(lines_for(SYSTEM)).pools
    assert (found.id, found.sums.freed_bytes) == (other.pk, -4)


def test_a_month_is_one_of_utc() -> None:
    late = datetime(2026, 11, 1, 0, 30, tzinfo=UTC).astimezone()
    freed(5, 1, at=late - timedelta(hours=1))
    freed(5, 2, at=late)
    assert [(one.month, one.sums.freed_bytes) for one in summary(lines_for(SYSTEM)).months] == [
        ("2026-10", 4), ("2026-11", 3),
    ]  # fmt: skip


def test_only_hosts_in_scope_count() -> None:
    mine, other = ImageFactory.create(pool__host__slug="mine"), ImageFactory.create()
    freed(5, 1, mine)
    freed(50, 1, other)
    actor = Actor("t", Role.VIEWER, hosts=frozenset({"mine"}))
    assert freed_of(lines_for(actor)).freed_bytes == 4
    assert [one.id for one in summary(lines_for(actor)).hosts] == [mine.host_id]


def test_sums_cost_the_same_few_queries_however_many_rows() -> None:
    for count in (1, 20):
        for _ in range(count):
            freed(5, 1)
            held()
        with CaptureQueriesContext(connection) as captured:
            summary(lines_for(SYSTEM))
        assert len(captured) == 3


def fill(count: int) -> None:
    image = ImageFactory.create()
    like = freed(5, 1, image)
    columns = [field.attname for field in Job._meta.concrete_fields if field.attname not in {"id", "uid"}]
    values = {name: getattr(like, name) for name in columns}
    Job.objects.bulk_create(Job(**values | {"before_bytes": n, "freed_bytes": n - 1}) for n in range(count))


def test_sums_and_lists_read_the_ledgers_own_index_and_no_row() -> None:
    fill(2000)
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE jobs_job")
    with CaptureQueriesContext(connection) as captured:
        summary(lines_for(SYSTEM))
        list(ordered(lines_for(SYSTEM), "-freed_bytes").values_list("pk", flat=True)[:50])
        lines_for(SYSTEM).count()
        freed_of(lines_for(SYSTEM))
    asked = [query["sql"] for query in captured if "jobs_job" in query["sql"]]
    assert len(asked) == 4
    for sql in asked:
        # PostgreSQL takes the table where it is small.
        assert connection.vendor == "postgresql" or "COVERING INDEX job_ledger" in explained(sql), explained(sql)
    assert connection.vendor == "postgresql" or "TEMP B-TREE" not in explained(asked[0]), explained(asked[0])


@pytest.mark.parametrize("ordering", [sign + name for name in ORDERINGS for sign in ("", "-")])
def test_every_order_holds_and_what_is_unknown_comes_last(ordering: str) -> None:
    for number in range(4):
        job = freed(10 + number, 3 * number, at=NOON + timedelta(hours=number), created_by=f"u{number % 2}")
        Job.objects.filter(pk=job.pk).update(predicted_bytes=None if number == 2 else number)
    rows = list(ordered(lines_for(SYSTEM), ordering))
    column = ORDERINGS[ordering.removeprefix("-")]
    values = [getattr(row, column) for row in rows if getattr(row, column) is not None]
    assert values == sorted(values, reverse=ordering.startswith("-"))
    assert all(getattr(row, column) is None for row in rows[len(values) :])


def test_a_chart_has_every_month_from_the_first_to_the_last() -> None:
    rows = in_a_row([OfMonth("2025-11", Sums(freed_bytes=1)), OfMonth("2026-02", Sums(freed_bytes=2))])
    assert [name for name, _ in rows] == ["2025-11", "2025-12", "2026-01", "2026-02"]
    assert [sums.freed_bytes for _, sums in rows] == [1, 0, 0, 2]


def test_charts_draw_what_was_freed_upwards_and_what_was_taken_downwards() -> None:
    pool = StoragePoolFactory.create()
    freed(10 * GIB, 4 * GIB, ImageFactory.create(pool=pool), NOON)
    freed(0, 3 * GIB, ImageFactory.create(pool=StoragePoolFactory.create(host=pool.host)), NOON)
    months, pools = charts_of(summary(lines_for(SYSTEM)))
    drawn = {one["label"]: one["data"] for one in months.config["data"]["datasets"]}
    assert drawn == {"Freed": [6 * GIB], "Consumed": [-3 * GIB]}
    assert months.table[0][:4] == ("2026-11", "6 GiB", f"{MINUS}3 GiB", "3 GiB")
    assert [one["data"] for one in pools.config["data"]["datasets"]] == [[6 * GIB, 0], [0, -3 * GIB]]


def test_a_chart_of_many_pools_draws_the_first_and_its_table_has_all() -> None:
    for number in range(NAMES + 3):
        freed(10 + number, 1, ImageFactory.create(pool__name="same", pool__host__name="same"))
    chart = charts_of(summary(lines_for(SYSTEM)))[-1]
    labels = chart.config["data"]["labels"]
    assert (len(labels), len(set(labels)), len(chart.table)) == (NAMES, NAMES, NAMES + 3)
