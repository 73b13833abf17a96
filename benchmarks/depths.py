"""What more requests in flight gain, as fio measures it, and what they cost in latency: which depth is fastest."""

from collections.abc import Sequence
from itertools import combinations

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from benchmarks import results
from benchmarks.figures import NO_DIFFERENCE, Advice, differ, figure, listed, times, too_few, value_of, why_not
from benchmarks.results import Result

#: Metrics that depths are compared by, with what they measure.
_DOING = {
    "rand_read_iops": gettext_noop("random reads"),
    "rand_write_iops": gettext_noop("random writes"),
    "seq_read_rate": gettext_noop("sequential reads"),
    "seq_write_rate": gettext_noop("sequential writes"),
}
_SLOWEST = "latency_p99_seconds"


def of(rows: Sequence[Result], where: str) -> list[Advice]:
    """A sentence for each step of fio that was done at several depths.

    Args:
        where: the pool, as in "on *fast*".
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for row in rows:
        if row.metric in _DOING and row.median is not None and isinstance(row.setting.get("depth"), int):
            apart_from_depth = results.key_of({name: row.setting[name] for name in row.setting if name != "depth"})
            groups.setdefault((row.metric, apart_from_depth), []).append(row)
    return [_advise(group, rows, where) for group in groups.values() if len(group) > 1]


def _depth(row: Result) -> int:
    return int(row.setting["depth"])


def _advise(group: list[Result], rows: Sequence[Result], where: str) -> Advice:
    ranked = sorted(group, key=_depth)
    first = ranked[0]
    doing = _(_DOING[first.metric])
    if first.setting.get("rw") == "randrw":
        doing = _("{doing} in a mixed workload").format(doing=doing)
    topic = _("Queue depth, {doing}").format(doing=doing)
    if first.setting.get("block"):
        doing = _("{doing} of {block}").format(doing=doing, block=first.setting["block"])
    if few := too_few(ranked, where):
        return Advice(topic, few, measurable=False)
    if not any(differ(one, other) for one, other in combinations(ranked, 2)):
        low, high = min(ranked, key=value_of), max(ranked, key=value_of)
        told = _("On {where}, there is {nothing} between {depths} for {doing}: medians of {low} to {high}{why}.")
        told = told.format(
            where=where, nothing=NO_DIFFERENCE, depths=_depths(ranked), doing=doing, low=figure(low), high=figure(high),
            why=why_not(ranked),
        )  # fmt: skip
        return Advice(topic, told, measurable=False)
    # The least depth than which none is measured to be better, of those that are measured to be better than another.
    fine = [row for row in ranked if not any(_slower(row, other) for other in ranked)]
    best = min(fine, key=lambda row: (not _slower(first, row), not any(_slower(one, row) for one in ranked)))
    if _slower(first, best):
        told = _(
            "On {where}, {doing} are {times} faster at depth {best} than at depth {first} ({high} vs. "
            "{low}){latency}"
        ).format(
            where=where, doing=doing, times=times(best, first), first=_depth(first), best=_depth(best),
            low=figure(first), high=figure(best), latency=_latency(first, best, rows),
        )  # fmt: skip
    else:
        told = _("On {where}, {doing} reach {figure} at depth {depth}").format(
            where=where, doing=doing, figure=figure(best), depth=_depth(best)
        )
    if alike := [row for row in ranked if row is not best and not differ(row, best)]:
        told += _("; compared with {equals}, there is {nothing}").format(equals=_depths(alike), nothing=NO_DIFFERENCE)
    if worse := [row for row in ranked if _depth(row) > _depth(best) and _slower(row, best)]:
        slower = [_("{depth} is slower ({figure})").format(depth=_depth(row), figure=figure(row)) for row in worse]
        told += f"; {listed(slower)}"
    return Advice(topic, f"{told}.", measurable=True)


def _slower(one: Result, other: Result) -> bool:
    return differ(one, other) and value_of(one) < value_of(other)


def _depths(rows: list[Result]) -> str:
    depths = listed([str(_depth(row)) for row in rows])
    return ngettext("depth {depths}", "depths {depths}", len(rows)).format(depths=depths)


def _latency(first: Result, enough: Result, rows: Sequence[Result]) -> str:
    """What it costs, where that can be measured."""
    found = {row.key: row for row in rows if row.metric == _SLOWEST and row.median is not None}
    before, after = found.get(first.key), found.get(enough.key)
    if before is None or after is None or not differ(before, after) or value_of(after) < value_of(before):
        return ""
    return _(", and 99 of 100 requests complete within {after} instead of {before}").format(
        after=figure(after), before=figure(before)
    )
