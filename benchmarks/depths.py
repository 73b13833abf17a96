"""What more requests in flight gain, as fio measures it, and what they cost in latency: which depth is fastest."""

from collections.abc import Sequence
from itertools import combinations

from django.utils.translation import gettext as _

from benchmarks import results
from benchmarks.figures import FEWEST, NO_DIFFERENCE, Advice, differ, figure, listed, times, value_of, why_not
from benchmarks.results import Result

#: Metrics that depths are compared by, with their topics.
_TOPICS = {
    "rand_read_iops": "Queue depth, random reads", "rand_write_iops": "Queue depth, random writes",
    "seq_read_rate": "Queue depth, sequential reads", "seq_write_rate": "Queue depth, sequential writes",
}  # fmt: skip
_SLOWEST = "latency_p99_seconds"


def of(rows: Sequence[Result], where: str) -> list[Advice]:
    """A sentence for each step of fio that was done at several depths.

    Args:
        where: the pool, as in "on *fast*".
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for row in rows:
        if row.metric in _TOPICS and row.median is not None and isinstance(row.setting.get("depth"), int):
            groups.setdefault((row.metric, _apart_from_depth(row)), []).append(row)
    return [_advise(group, rows, where) for group in groups.values() if len(group) > 1]


def _apart_from_depth(row: Result) -> str:
    return results.key_of({name: value for name, value in row.setting.items() if name != "depth"})


def _depth(row: Result) -> int:
    return int(row.setting["depth"])


def _advise(group: list[Result], rows: Sequence[Result], where: str) -> Advice:
    ranked = sorted(group, key=_depth)
    first = ranked[0]
    topic = _TOPICS[first.metric] + (" in a mixture" if first.setting.get("rw") == "randrw" else "")
    doing = topic.removeprefix("Queue depth, ")
    doing += f" of {first.setting['block']}" if first.setting.get("block") else ""
    if min(row.repetitions for row in ranked) < FEWEST:
        return Advice(
            topic,
            _("On {where}, fewer than {fewest} repetitions show {no_difference}.").format(
                where=where, fewest=FEWEST, no_difference=NO_DIFFERENCE
            ),
            measurable=False,
        )
    if not any(differ(one, other) for one, other in combinations(ranked, 2)):
        told = f"On {where} there is {NO_DIFFERENCE} between {_depths(ranked)} for {doing}: medians of "
        low, high = min(ranked, key=value_of), max(ranked, key=value_of)
        return Advice(
            topic,
            _("{told}{figure} to {figure_2}{why_not}.").format(
                told=told, figure=figure(low), figure_2=figure(high), why_not=why_not(ranked)
            ),
            measurable=False,
        )
    # The least depth than which none is measured to be better, of those that are measured to be better than another.
    fine = [row for row in ranked if not any(_slower(row, other) for other in ranked)]
    best = min(fine, key=lambda row: (not _slower(first, row), not any(_slower(one, row) for one in ranked)))
    if _slower(first, best):
        told = f"On {where}, {doing} rise {times(best, first)} from depth {_depth(first)} to {_depth(best)} "
        told += f"({figure(first)} to {figure(best)}){_latency(first, best, rows)}"
    else:
        told = f"On {where}, {doing} reach {figure(best)} at depth {_depth(best)}"
    if alike := [row for row in ranked if row is not best and not differ(row, best)]:
        told += f"; between it and {_depths(alike)} there is {NO_DIFFERENCE}"
    if worse := [row for row in ranked if _depth(row) > _depth(best) and _slower(row, best)]:
        told += f"; {listed([f'{_depth(row)} is slower ({figure(row)})' for row in worse])}"
    return Advice(topic, f"{told}.", measurable=True)


def _slower(one: Result, other: Result) -> bool:
    return differ(one, other) and value_of(one) < value_of(other)


def _depths(rows: list[Result]) -> str:
    return f"{'depth' if len(rows) == 1 else 'depths'} {listed([str(_depth(row)) for row in rows])}"


def _latency(first: Result, enough: Result, rows: Sequence[Result]) -> str:
    """What it costs, where that can be measured."""
    found = {row.key: row for row in rows if row.metric == _SLOWEST and row.median is not None}
    before, after = found.get(first.key), found.get(enough.key)
    if before is None or after is None or not differ(before, after) or value_of(after) < value_of(before):
        return ""
    return f", and 99 of 100 are answered within {figure(after)} instead of {figure(before)}"
