"""The alert of a pool that got slower, open from the run that found it to the next one that does not."""

import hashlib
from typing import Any

from benchmarks import results
from benchmarks.figures import written
from benchmarks.models import Benchmark
from storage_admin.events import services as events
from storage_admin.events.services import Trouble

#: Figures that the alert names; the run's page has all.
NAMED = 3


def tell_regressions(benchmark: Benchmark) -> None:
    """Opens the alert of what a run measures on its pool, or closes it. Call it in the run's last transaction."""
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
