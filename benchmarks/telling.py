"""How figures are told apart, and written in sentences, charts and tables alike."""

from dataclasses import dataclass

from benchmarks.results import Result
from images.templatetags.storage import size

NO_DIFFERENCE = "no difference that can be measured"
#: Fewer repetitions have no spread worth the name. With fewer than :data:`ENOUGH` two that do not overlap are found by
#: chance in a fifth of all matrices.
FEWEST, ENOUGH = 3, 5


@dataclass(frozen=True)
class Advice:
    """One sentence; ``measurable`` is false where it says that there is no difference."""

    topic: str
    sentence: str
    measurable: bool


def differ(one: Result, other: Result) -> bool:
    """Whether two results can be told apart: their spreads do not overlap. With few repetitions they also lie further
    from each other than either spreads.
    """
    fewest = min(one.repetitions, other.repetitions)
    if fewest < FEWEST:
        return False
    if one.min is None or one.max is None or other.min is None or other.max is None:
        return False
    gap = max(one.min - other.max, other.min - one.max)
    return gap > (0 if fewest >= ENOUGH else max(one.max - one.min, other.max - other.min))


def value_of(row: Result) -> float:
    """Its median; 0 where there is none."""
    return row.median or 0.0


def times(best: Result, other: Result) -> str:
    """How many times one is the other, whichever is more: ``1.4 times``."""
    low, high = sorted((value_of(best), value_of(other)))
    if not low:
        return "beyond measure"
    ratio = high / low
    return f"{ratio:.2f} times" if ratio < 1.2 else f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times"


def listed(names: list[str]) -> str:
    """``64K, 2M and 4K``."""
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
