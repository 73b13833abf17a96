"""What to choose, in a sentence with its numbers: only where the runs' spreads allow it.

Two settings differ where not one repetition of the one reached into what the other's repetitions span. With a single
repetition there is no spread, and nothing is said to be better than anything else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import results
from benchmarks.results import Result
from images.templatetags.storage import size

NO_DIFFERENCE = "no difference that can be measured"
#: Fewer repetitions have no spread worth the name.
FEWEST = 2
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


@dataclass(frozen=True)
class Advice:
    """One sentence; ``measurable`` is false where it says that there is no difference."""

    topic: str
    sentence: str
    measurable: bool


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
    "dd": (
        Matrix("Writing", "write_rate", "write direct 1M", _all, "writes"),
        Matrix("Reading", "read_rate", "read direct 1M", _all, "reads"),
    ),
    "fio": (
        Matrix("Random reads", "rand_read_iops", "randread 4K depth 1", _all, "reads at random"),
        Matrix("Random writes", "rand_write_iops", "randwrite 4K depth 1", _all, "writes at random"),
    ),
}


def of(kind: str, rows: Sequence[Result], where: str) -> list[Advice]:
    """A sentence for each matrix of a kind that the results have figures for.

    Args:
        where: the pool, as in "on *fast*".
    """
    given = []
    for matrix in MATRICES.get(kind, ()):
        for block in _blocks(rows):
            mine = [row for row in rows if row.metric == matrix.metric and matrix.of(row) and _block(row) == block]
            if len(told := [row for row in mine if row.median is not None]) > 1:
                given.append(_advise(matrix, told, [row for row in rows if _block(row) == block], where, block))
    return given


def _block(row: Result) -> str:
    """Where a kind repeats its matrix for several blocks, each is one of its own."""
    return str(row.setting.get("block", "")) if "layout" in row.setting else ""


def _blocks(rows: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(_block(row) for row in rows))


def differ(one: Result, other: Result) -> bool:
    """Whether two results can be told apart: their spreads do not overlap."""
    if one.repetitions < FEWEST or other.repetitions < FEWEST:
        return False
    if one.min is None or one.max is None or other.min is None or other.max is None:
        return False
    return one.min > other.max or other.min > one.max


def _value(row: Result) -> float:
    return row.median or 0.0


def _advise(matrix: Matrix, rows: list[Result], beside: list[Result], where: str, block: str) -> Advice:
    way = results.better(matrix.metric)
    ranked = sorted(rows, key=lambda row: way * _value(row), reverse=True)
    best, slowest = ranked[0], ranked[-1]
    topic = matrix.topic + (f", {block}" if block else "")
    usual = next((row for row in rows if _named(row) == matrix.usual), None)
    first = slowest
    if usual and differ(best, usual):
        first = usual
    elif usual and differ(usual, slowest):
        best = usual  # as good as the best one, and what one would have anyway
    if not differ(best, first):
        return Advice(topic, _same(where, rows), measurable=False)
    told = f"On {where}, {_named(best)} {matrix.doing} {_times(best, first)} faster than {_named(first)} "
    told += f"({figure(best)} against {figure(first)})"
    if equals := [_named(row) for row in ranked if row is not best and not differ(best, row)]:
        told += f"; between it and {_listed(equals)} there is {NO_DIFFERENCE}"
    if first is usual and differ(slowest, usual):
        told += f"; {_named(slowest)} is slowest ({figure(slowest)})"
    return Advice(topic, f"{told}{_paid(matrix, best, first, beside)}.", measurable=True)


def _same(where: str, rows: list[Result]) -> str:
    if min(row.repetitions for row in rows) < FEWEST:
        return f"On {where}, one repetition shows {NO_DIFFERENCE}: run it with more of them."
    values = sorted(rows, key=_value)
    names = _listed([_named(row) for row in rows])
    medians = f"medians of {figure(values[0])} to {figure(values[-1])}"
    return f"On {where} there is {NO_DIFFERENCE} between {names}: {medians}, and their spreads overlap."


def _paid(matrix: Matrix, best: Result, first: Result, beside: list[Result]) -> str:
    """What the winner costs against the one that it was measured against, as far as that can be told."""
    told, known = [], 0
    for metric in matrix.costs:
        found = {row.key: row for row in beside if row.metric == metric and row.median is not None}
        mine, other = found.get(best.key), found.get(first.key)
        if mine is None or other is None:
            continue
        known += 1
        if metric == "physical_bytes" and _value(mine) - _value(other) >= WORTH_SAYING:
            told.append(f"takes {figure(mine)} when it is new instead of {figure(other)}")
        elif metric == "create_seconds" and _value(mine) > _value(other) and differ(mine, other):
            told.append(f"is created in {figure(mine)} instead of {figure(other)}")
    if told:
        return f"; it {' and '.join(told)}"
    return "; creating it costs no more time or space" if known and known == len(matrix.costs) else ""


def _times(best: Result, other: Result) -> str:
    low, high = sorted((_value(best), _value(other)))
    if not low:
        return "beyond measure"
    ratio = high / low
    return f"{ratio:.2f} times" if ratio < 1.2 else f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times"


def _named(row: Result) -> str:
    setting = {name: value for name, value in row.setting.items() if not (name == "block" and "layout" in row.setting)}
    return results.name_of(setting)


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def figure(row: Result) -> str:
    """A result's median as one writes it, with its unit."""
    return "unknown" if row.median is None else written(row.median, row.unit)


def written(value: float, unit: str) -> str:
    """A figure with its unit: ``412 MiB/s``, ``8,120 a second``, ``1.46 s``, ``85 µs``, ``4 GiB``."""
    match unit:
        case "B/s":
            return f"{size(round(value))}/s"
        case "B":
            return size(round(value))
        case "1/s":
            return f"{value:,.0f} a second" if value >= 10 else f"{value:.3g} a second"
        case "s":
            return _time(value)
        case _:
            return f"{value:,.3g} {unit}"


def _time(value: float) -> str:
    for least, factor, name in ((1.0, 1, "s"), (1e-3, 1e3, "ms")):
        if value >= least:
            return f"{value * factor:,.0f} {name}" if value * factor >= 100 else f"{value * factor:.3g} {name}"
    return f"{value * 1e6:.3g} µs"
