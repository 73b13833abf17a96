"""Pools: how full, how promised, how long until full."""

from collections.abc import Iterable
from datetime import timedelta

from django.db.models import Avg, Count, F, FloatField, Func, Max, Min, Sum
from django.db.models.functions import Cast
from django.utils import timezone

from images.selectors.overview_shapes import PoolRow
from storage_admin.hosts.models import PoolSample, StoragePool

#: How far back a trend looks, and the least that it must span to be called one.
TREND_WINDOW = timedelta(days=30)
TREND_LEAST = timedelta(days=1)


class EpochDays(Func):
    """A time as days since 1970, computed by the database."""

    output_field = FloatField()

    def as_sqlite(self, compiler, connection, **context):  # type: ignore[no-untyped-def]
        return self.as_sql(compiler, connection, template="(julianday(%(expressions)s) - 2440587.5)", **context)

    def as_postgresql(self, compiler, connection, **context):  # type: ignore[no-untyped-def]
        return self.as_sql(compiler, connection, template="(EXTRACT(EPOCH FROM %(expressions)s) / 86400.0)", **context)


def pool_rows(pools: list[StoragePool]) -> tuple[PoolRow, ...]:
    """What is shown of these pools, the fullest first, those of unknown size last."""
    days = days_until_full(pools)
    rows = [_row(pool, days.get(pool.pk)) for pool in pools]
    return tuple(sorted(rows, key=lambda row: (row.used_percent is None, -(row.used_percent or 0.0), row.name)))


def _row(pool: StoragePool, days: float | None) -> PoolRow:
    percent = used_percent(pool)
    return PoolRow(
        id=pool.pk,
        host_id=pool.host_id,
        host=pool.host.name,
        name=pool.name,
        kind=pool.kind,
        path=pool.path,
        state=pool.state,
        capacity_bytes=pool.capacity_bytes,
        available_bytes=pool.available_bytes,
        used_bytes=pool.used_bytes,
        used_percent=percent,
        images_count=pool.images_count,
        allocated_bytes=pool.allocated_bytes,
        virtual_bytes=pool.virtual_bytes,
        overcommit_ratio=pool.overcommit_ratio,
        reclaimable_bytes=pool.reclaimable_bytes,
        undo_bytes=pool.undo_bytes,
        warn_percent=pool.warn_percent,
        over_threshold=None if percent is None else percent >= pool.warn_percent,
        days_until_full=days,
        last_scanned=pool.last_scanned,
    )


def used_percent(pool: StoragePool) -> float | None:
    """How much of the pool's filesystem is used, in percent; ``None`` where its size is not known."""
    if not pool.capacity_bytes or pool.used_bytes is None:
        return None
    return round(100 * pool.used_bytes / pool.capacity_bytes, 1)


def days_until_full(pools: Iterable[StoragePool]) -> dict[int, float]:
    """In how many days each pool is full if it goes on as in the last 30 days, by a straight line through its samples.

    Returns:
        By the pool's id, one decimal; pools without growth, or without two samples a day apart, are left out.
    """
    now = timezone.now()
    today = now.timestamp() / 86400
    available = {pool.pk: pool.available_bytes for pool in pools if pool.available_bytes is not None}
    x = EpochDays(F("at")) - today
    y = Cast(F("capacity_bytes") - F("available_bytes"), FloatField())
    recent = PoolSample.objects.filter(pool__in=available, at__gte=now - TREND_WINDOW, at__lte=now).order_by()
    trends = recent.values("pool_id").annotate(
        n=Count("id"), first=Min("at"), last=Max("at"), x=Avg(x), y=Avg(y), xx=Sum(x * x), xy=Sum(x * y)
    )
    days = {}
    for trend in trends:
        if trend["n"] < 2 or trend["last"] - trend["first"] < TREND_LEAST:
            continue
        spread = trend["xx"] - trend["n"] * trend["x"] ** 2
        growth = (trend["xy"] - trend["n"] * trend["x"] * trend["y"]) / spread
        if growth >= 1:  # bytes a day; less is the rounding of a pool that does not grow
            days[trend["pool_id"]] = round(available[trend["pool_id"]] / growth, 1)
    return days
