"""Pools: how full, how promised, how long until full."""

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.db.models import Avg, F, FloatField, Func, Max, Min, Value
from django.db.models.functions import Cast, Coalesce, Floor
from django.utils import timezone

from images.alert_rules import rise, trend
from images.selectors.overview_shapes import PoolRow
from storage_admin.hosts.models import Host, PoolMinute, PoolSample, StoragePool
from storage_admin.words import tenths

#: A volume group is full as soon as it is divided up: at this threshold, that is no trouble.
NEVER_PERCENT = 100


class EpochDays(Func):
    """A time as days since 1970, computed by the database."""

    output_field = FloatField()

    def as_sqlite(self, compiler, connection, **context):  # type: ignore[no-untyped-def]
        return self.as_sql(compiler, connection, template="(julianday(%(expressions)s) - 2440587.5)", **context)

    def as_postgresql(self, compiler, connection, **context):  # type: ignore[no-untyped-def]
        return self.as_sql(compiler, connection, template="(EXTRACT(EPOCH FROM %(expressions)s) / 86400.0)", **context)


def pool_rows(pools: list[StoragePool]) -> tuple[PoolRow, ...]:
    """What is shown of these pools, the fullest first, those of unknown size last."""
    found = forecasts(pools)
    rows = [_row(pool, found.get(pool.pk)) for pool in pools]
    return tuple(sorted(rows, key=lambda row: (row.used_percent is None, -(row.used_percent or 0.0), row.name)))


def _row(pool: StoragePool, forecast: trend.Forecast | None) -> PoolRow:
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
        used_percent=used_percent(pool),
        images_count=pool.known_count,
        allocated_bytes=pool.allocated_bytes,
        virtual_bytes=pool.virtual_bytes,
        overcommit_ratio=pool.overcommit_ratio,
        reclaimable_bytes=pool.reclaimable_bytes,
        undo_bytes=pool.known_undo_bytes,
        warn_percent=pool.warn_percent,
        over_threshold=_is_over_threshold(pool),
        days_until_full=forecast.days if forecast else None,
        days_until_full_low=forecast.low if forecast else None,
        days_until_full_high=forecast.high if forecast else None,
        last_scanned=pool.last_scanned,
    )


def _is_over_threshold(pool: StoragePool) -> bool | None:
    if pool.used_percent is None:
        return None
    return pool.used_percent >= pool.warn_percent and not is_never_over(pool, pool.warn_percent)


def is_never_over(pool: StoragePool, limit: float) -> bool:
    """Whether a pool is no trouble by this threshold however full it is."""
    return pool.kind == StoragePool.Kind.LVM and limit >= NEVER_PERCENT


def used_percent(pool: StoragePool) -> float | None:
    """How much of the pool's filesystem is used, in percent, one decimal; ``None`` where its size is not known.

    Rounded down: below its threshold it does not read as if it had reached it.
    """
    return None if pool.used_percent is None else tenths(pool.used_percent)


def freshest(pools: Iterable[StoragePool]) -> StoragePool | None:
    """Of pools on one filesystem the one that knows best how full that is.

    Args:
        pools: with their hosts; such as know it.

    Returns:
        What was looked at last on a host that answers; where none does, what was looked at last; ``None`` of none.
    """
    return max(pools, key=_freshness, default=None)


def _freshness(pool: StoragePool) -> tuple[bool, float]:
    return pool.host.status != Host.Status.UNREACHABLE, pool.space_at.timestamp() if pool.space_at else 0.0


def forecasts(
    pools: Iterable[StoragePool], now: datetime | None = None, known: float = trend.KNOWN
) -> dict[int, trend.Forecast]:
    """In how many days each pool is full if it goes on as in the last 30 days; see :mod:`images.alert_rules.trend`.

    Args:
        known: how well the growth has to be known.

    Returns:
        By the pool's id; pools whose samples do not carry it are left out.
    """
    available = {pool.pk: pool.available_bytes for pool in pools if pool.available_bytes is not None}
    found = {}
    for pool_id, known_days in samples(available, now).items():
        if forecast := trend.forecast(known_days, available[pool_id], known):
            found[pool_id] = forecast
    return found


def samples(pools: Iterable[int], now: datetime | None = None) -> dict[int, list[trend.Day]]:
    """How full pools were on each of the last 30 days that there are samples of, the oldest first, by the pool's id.

    Args:
        pools: ids.
    """
    now = now or timezone.now()
    age = Value(now.timestamp() / 86400, output_field=FloatField()) - EpochDays(F("at"))
    # What is reserved is the same every day: it is part of no step.
    used = Cast(F("capacity_bytes") - F("available_bytes"), FloatField())
    since = now - timedelta(days=trend.WINDOW)
    recent = PoolSample.objects.filter(pool__in=list(pools), at__gt=since, at__lte=now).order_by()
    rows = recent.annotate(day=Floor(age)).values("pool_id", "day").annotate(age=Avg(age), used=Avg(used))
    days: dict[int, list[trend.Day]] = {}
    for row in rows:
        days.setdefault(row["pool_id"], []).append(trend.Day(row["age"], row["used"]))
    return {pool_id: sorted(known, key=lambda day: -day.age) for pool_id, known in days.items()}


def looks(pools: Iterable[int], now: datetime) -> dict[int, list[PoolMinute]]:
    """The looks at pools of the last day, the oldest first, by the pool's id."""
    found: dict[int, list[PoolMinute]] = {}
    since = now - timedelta(minutes=rise.LONGEST)
    for look in PoolMinute.objects.filter(pool__in=list(pools), at__gt=since, at__lte=now).order_by("at"):
        found.setdefault(look.pool_id, []).append(look)
    return found


def lowest(pools: Iterable[int], now: datetime) -> dict[int, tuple[int, int | None]]:
    """The least that was used at the looks of the last day, of pools and of their metadata, in bytes, by the id."""
    since = now - timedelta(minutes=rise.LONGEST)
    rows = PoolMinute.objects.filter(pool__in=list(pools), at__gt=since, at__lte=now).order_by().values_list("pool")
    return {pool: (data, meta) for pool, data, meta in rows.annotate(Min("used_bytes"), Min("metadata_used_bytes"))}


def lows_and_highs(pools: Iterable[int], now: datetime) -> dict[int, list[tuple[int, int]]]:
    """The least and the most that was used, in bytes, on each of the eight days before the last, by the pool's id."""
    age = Value(now.timestamp() / 86400, output_field=FloatField()) - EpochDays(F("at"))
    used = F("capacity_bytes") - F("available_bytes") - Coalesce(F("reserved_bytes"), 0)
    between = (now - timedelta(days=9), now - timedelta(days=1))
    rows = PoolSample.objects.filter(pool__in=list(pools), at__gt=between[0], at__lte=between[1]).order_by()
    found: dict[int, list[tuple[int, int]]] = {}
    for row in rows.annotate(day=Floor(age)).values("pool_id", "day").annotate(low=Min(used), high=Max(used)):
        found.setdefault(row["pool_id"], []).append((row["low"], row["high"]))
    return found


def days_until_full(pools: Iterable[StoragePool]) -> dict[int, float]:
    """In how many days each pool is full, one decimal; see :func:`forecasts`."""
    return {pool_id: forecast.days for pool_id, forecast in forecasts(pools).items()}
