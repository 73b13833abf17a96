"""What to choose, in a sentence with its numbers: only where the repetitions allow it.

Two settings differ where not one repetition of the one reached into what the other's repetitions span
(:func:`benchmarks.figures.differ`). What cannot be told apart is called that, and never as good.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _

from benchmarks import depths, results
from benchmarks.figures import FEWEST, NO_DIFFERENCE, Advice, differ, figure, listed, times, value_of, why_not
from benchmarks.results import Result
from storage_admin.words import plural

#: Bytes by which a new image has to be larger: tables of some clusters are nothing that anybody would pay for.
WORTH_SAYING = 1 << 20


@dataclass(frozen=True)
class Matrix:
    """What is to be chosen from one kind of run.

    Args:
        topic: what is chosen, as a heading.
        metric: what decides.
        usual: the setting that one would have without choosing, by its name; others are measured against it.
        of: which of the settings belong to it.
        doing: the verb of the sentence, as in "64K *writes* 1.4 times faster".
        costs: metrics that the winner may pay with.
    """

    topic: str
    metric: str
    usual: str
    of: Callable[[Result], bool]
    doing: str
    costs: tuple[str, ...] = ()


def _all(_row: Result) -> bool:
    return True


def _layouts(row: Result) -> bool:
    return row.setting.get("layout") in {"raw", "qcow2", "raw+qcow2", "qcow2+qcow2"}


def _compressed(row: Result) -> bool:
    return row.setting.get("layout") in {"qcow2", "zlib", "zstd"}


def _chains(row: Result) -> bool:
    return row.setting.get("layout") in {"qcow2", "qcow2+qcow2", "chain"}


_CREATED = ("create_seconds", "physical_bytes")
MATRICES: dict[str, tuple[Matrix, ...]] = {
    "cluster_size": (Matrix("Cluster size", "write_rate", "64K", _all, "writes", _CREATED),),
    "preallocation": (Matrix("Preallocation", "write_rate", "off", _all, "writes", _CREATED),),
    "formats": (
        Matrix("Layout, random reads", "rand_read_iops", "qcow2", _layouts, "reads at random"),
        Matrix("Layout, random writes", "rand_write_iops", "qcow2", _layouts, "writes at random"),
        Matrix("Chain depth", "rand_read_iops", "qcow2", _chains, "reads at random"),
        Matrix("Compression at read time", "seq_read_rate", "qcow2", _compressed, "reads"),
    ),
    "boot": (Matrix("Layout", "boot_all_seconds", "qcow2+qcow2", _all, "boots"),),
    "dd": (
        Matrix("Writing", "write_rate", "direct I/O 1M", _all, "writes"),
        Matrix("Reading", "read_rate", "direct I/O 1M", _all, "reads"),
    ),
}
#: Ways of dd: a guest's cache=none is the one, cache=writeback the other.
_WAYS = {"direct": "direct I/O", "fdatasync": "cached I/O"}


def of(kind: str, rows: Sequence[Result], where: str) -> list[Advice]:
    """A sentence for each matrix of a kind that the results have figures for.

    Args:
        where: the pool, as in "on *fast*".
    """
    given = depths.of(rows, where) if kind == "fio" else []
    for matrix in MATRICES.get(kind, ()):
        for block in _blocks(rows):
            mine = [row for row in rows if row.metric == matrix.metric and matrix.of(row) and _block(row) == block]
            if len(told := [row for row in mine if row.median is not None]) > 1:
                given.append(_advise(matrix, told, [row for row in rows if _block(row) == block], where, block))
    return given


def _block(row: Result) -> str:
    """Where a kind repeats its matrix for several blocks, each is one of its own."""
    if "guests" in row.setting:
        return plural(int(row.setting["guests"]), "guest,guests")
    return str(row.setting.get("block", "")) if "layout" in row.setting else ""


def _blocks(rows: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(_block(row) for row in rows))


def _advise(matrix: Matrix, rows: list[Result], beside: list[Result], where: str, block: str) -> Advice:
    way = results.better(matrix.metric)
    ranked = sorted(rows, key=lambda row: way * value_of(row), reverse=True)
    best, slowest = ranked[0], ranked[-1]
    topic = matrix.topic + (f", {block}" if block else "")
    usual = next((row for row in rows if _named(row) == matrix.usual), None)
    first = slowest
    if usual and differ(best, usual):
        first = usual
    elif usual and differ(usual, slowest):
        best = usual  # not to be told from the best one, and what one would have anyway
    if not differ(best, first):
        return Advice(topic, _same(where, best, first), measurable=False)
    told = f"On {where}, {_named(best)} {matrix.doing} {times(best, first)} faster than {_named(first)} "
    told += f"({figure(best)} against {figure(first)})"
    if equals := [_named(row) for row in ranked if row is not best and not differ(best, row)]:
        told += f"; between it and {listed(equals)} there is {NO_DIFFERENCE}"
    if first is usual and differ(slowest, usual):
        told += f"; {_named(slowest)} is slowest ({figure(slowest)})"
    return Advice(topic, f"{told}{_paid(matrix, best, first, beside)}.", measurable=True)


def _same(where: str, best: Result, slowest: Result) -> str:
    """Others between these two are not compared: of many, two differ by chance."""
    if min(best.repetitions, slowest.repetitions) < FEWEST:
        return _("On {where}, fewer than {fewest} repetitions show {no_difference}: run it with more of them.").format(
            where=where, fewest=FEWEST, no_difference=NO_DIFFERENCE
        )
    told = f"On {where} there is {NO_DIFFERENCE} between the fastest, {_named(best)} (median {figure(best)}), and the "
    return _("{told}slowest, {who} ({figure}){why_not}.").format(
        told=told, who=_named(slowest), figure=figure(slowest), why_not=why_not([best, slowest])
    )


def _paid(matrix: Matrix, best: Result, first: Result, beside: list[Result]) -> str:
    """What the winner costs against the one that it was measured against, as far as that can be told."""
    told, known = [], 0
    for metric in matrix.costs:
        found = {row.key: row for row in beside if row.metric == metric and row.median is not None}
        mine, other = found.get(best.key), found.get(first.key)
        if mine is None or other is None:
            continue
        known += 1
        if metric == "physical_bytes" and value_of(mine) - value_of(other) >= WORTH_SAYING:
            told.append(f"takes {figure(mine)} when it is new instead of {figure(other)}")
        elif metric == "create_seconds" and value_of(mine) > value_of(other) and differ(mine, other):
            told.append(f"is created in {figure(mine)} instead of {figure(other)}")
    if told:
        return f"; it {' and '.join(told)}"
    return "; creating it costs no more time or space" if known and known == len(matrix.costs) else ""


def _named(row: Result) -> str:
    own = "layout" in row.setting
    setting = {name: value for name, value in row.setting.items() if not (own and name in {"block", "guests"})}
    if "sync" in setting:
        setting = {"sync": _WAYS.get(setting["sync"], setting["sync"]), "block": setting.get("block", "")}
    return results.name_of(setting).strip()
