"""What more requests in flight gain, as fio measures it, and what they cost in latency: up to which depth it pays."""

from collections.abc import Sequence

from benchmarks import results
from benchmarks.results import Result
from benchmarks.telling import FEWEST, NO_DIFFERENCE, Advice, differ, figure, listed, times, value_of

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
    first, best = ranked[0], max(ranked, key=value_of)
    # The least depth than which none is better.
    enough = next(row for row in ranked if row is best or not differ(row, best))
    topic = _TOPICS[first.metric] + (" in a mixture" if first.setting.get("rw") == "randrw" else "")
    doing = topic.removeprefix("Queue depth, ")
    block = f" of {first.setting['block']}" if first.setting.get("block") else ""
    if min(row.repetitions for row in ranked) < FEWEST:
        return Advice(topic, f"On {where}, fewer than {FEWEST} repetitions show {NO_DIFFERENCE}.", measurable=False)
    beyond = [row for row in ranked if _depth(row) > _depth(enough)]
    worse = [row for row in beyond if differ(row, enough)]
    if enough is first and not worse:
        depths = listed([str(_depth(row)) for row in ranked])
        told = f"there is {NO_DIFFERENCE} between depths {depths}: {_depth(first)} is enough for {doing}{block}"
        return Advice(topic, f"On {where} {told} ({figure(first)}).", measurable=False)
    if enough is first:
        told = f"On {where}, {doing}{block} are fastest at depth {_depth(first)} ({figure(first)})"
    else:
        told = f"On {where}, {doing}{block} rise {times(enough, first)} from depth {_depth(first)} to {_depth(enough)} "
        told += f"({figure(first)} to {figure(enough)}){_latency(first, enough, rows)}"
    if worse:
        told += f"; {_depth(worse[-1])} is slower ({figure(worse[-1])})"
    elif beyond:
        gain = "gains" if len(beyond) == 1 else "gain"
        told += f"; {listed([str(_depth(row)) for row in beyond])} {gain} nothing measurable"
    return Advice(topic, f"{told}.", measurable=True)


def _latency(first: Result, enough: Result, rows: Sequence[Result]) -> str:
    """What it costs, where that can be measured."""
    found = {row.key: row for row in rows if row.metric == _SLOWEST and row.median is not None}
    before, after = found.get(first.key), found.get(enough.key)
    if before is None or after is None or not differ(before, after) or value_of(after) < value_of(before):
        return ""
    return f", and 99 of 100 are answered within {figure(after)} instead of {figure(before)}"
