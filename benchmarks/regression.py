"""Whether a pool got slower: the last run of a profile against the earlier ones.

A figure has dropped when it lies further from what is usual than the earlier runs lie from each other. Usual is the
median of the earlier runs' medians. Their spread is the largest of: three times their median absolute deviation (scaled
to a standard deviation), twice the farthest that an earlier run was from what is usual, half of what a run usually
spreads within itself, and a tenth of the usual figure, below which nobody would act on it. Of five earlier runs or more
the farthest one does not count: a run that was disturbed once does not move any of them much. Of three or four it does,
as they may lie close together by chance.
"""

import hashlib
from dataclasses import dataclass
from statistics import median
from typing import Any

from django.db.models import QuerySet

from benchmarks import results
from benchmarks.figures import written
from benchmarks.models import Benchmark
from benchmarks.results import Result
from storage_admin.events import services as events
from storage_admin.events.services import Trouble

#: Runs that are looked back at, and how few of them tell nothing yet.
LOOKED_BACK, FEWEST = 10, 3
#: The least part of the usual figure that counts as a drop.
LEAST = 0.10
#: So many earlier runs tell which of them was disturbed.
ENOUGH = 5
#: The standard deviation of a normal distribution by its median absolute deviation.
_SCALE = 1.4826
#: Processor shares and the longest single operation of a run say too little to be watched.
_NOT_WATCHED = ("_latency_seconds",)
#: Figures that the alert names; the run's page has all.
NAMED = 3


@dataclass(frozen=True)
class Drop:
    """A figure that is worse than usual; ``usual_worst`` is the worst that would still have been usual."""

    metric: str
    unit: str
    setting: dict[str, Any]
    value: float
    usual: float
    usual_worst: float
    ratio: float
    runs: int


def same_steps(benchmark: Benchmark) -> QuerySet[Benchmark]:
    """The runs of the same steps on the same pool that ended well, newest first; none of one without pool or steps."""
    if benchmark.pool_id is None or not benchmark.profile_key:
        return Benchmark.objects.none()
    return Benchmark.objects.filter(
        pool=benchmark.pool_id, kind=benchmark.kind, profile_key=benchmark.profile_key, finished__isnull=False
    )


def earlier(benchmark: Benchmark) -> list[Benchmark]:
    """The last of the runs of :func:`same_steps` that were started before it, newest first, with their samples."""
    return list(same_steps(benchmark).filter(pk__lt=benchmark.pk).prefetch_related("samples")[:LOOKED_BACK])


def found_in(benchmark: Benchmark) -> list[dict[str, Any]]:
    """What dropped in a run, as it is kept in its row, the worst first."""
    before = earlier(benchmark)
    if len(before) < FEWEST:
        return []
    known: dict[tuple[str, str], list[Result]] = {}
    for run in before:
        for row in results.of(run):
            known.setdefault((row.metric, row.key), []).append(row)
    drops = [drop_of(row, known.get((row.metric, row.key), [])) for row in results.of(benchmark)]
    found = sorted((drop for drop in drops if drop), key=lambda drop: drop.ratio, reverse=True)
    return [vars(drop) for drop in found]


def drop_of(now: Result, before: list[Result]) -> Drop | None:
    """Whether a result is worse than the same one of earlier runs; ``None`` where it is not, or nobody can tell."""
    way = results.better(now.metric)
    medians = [row.median for row in before if row.median is not None]
    if not way or now.metric.endswith(_NOT_WATCHED) or now.median is None or len(medians) < FEWEST:
        return None
    usual = median(medians)
    deviations = sorted(abs(value - usual) for value in medians)
    farthest = deviations[-1] if len(deviations) < ENOUGH else deviations[-2]
    within = [row.max - row.min for row in before if row.max is not None and row.min is not None]
    beside = median(within) / 2 if within else 0.0
    spread = max(3 * _SCALE * median(deviations), 2 * farthest, beside, LEAST * usual)
    worst = usual - way * spread
    if way * now.median >= way * worst or usual <= 0 or now.median <= 0:
        return None
    ratio = usual / now.median if way > 0 else now.median / usual
    return Drop(now.metric, now.unit, now.setting, now.median, usual, worst, round(ratio, 3), len(medians))


def tell_regressions(benchmark: Benchmark) -> None:
    """Opens the alert of what a run measures on its pool, until the next one that finds no drop, or closes it. Call it
    in the run's last transaction.
    """
    pool = benchmark.pool
    if pool is None or not benchmark.profile_key:
        return
    steps = hashlib.sha256(benchmark.profile_key.encode()).hexdigest()[:12]
    key = f"{events.BENCHMARK_REGRESSION}:{pool.pk}:{benchmark.kind}:{steps}"
    drops = benchmark.regressions
    if not drops:
        events.close_alert(key)
        return
    said = [_said(drop) for drop in drops[:NAMED]]
    more = f"; and {len(drops) - NAMED} more" if len(drops) > NAMED else ""
    title = f"{pool} is slower than before ({benchmark.get_kind_display()})"
    detail = (
        f"{'; '.join(said)}{more}. This is run {benchmark.pk} compared with earlier runs. The benchmarks of the pool "
        "show all runs."
    )
    events.raise_alert(Trouble(key, "warning", title, detail, pool.host.slug, "pool", pool.pk, str(pool)))


def _said(drop: dict[str, Any]) -> str:
    value, usual = written(drop["value"], drop["unit"]), written(drop["usual"], drop["unit"])
    return f"{drop['metric'].replace('_', ' ')} at {results.name_of(drop['setting'])}: {value}, usually {usual}"
