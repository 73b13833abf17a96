"""How figures are told apart, and written in sentences, charts and tables alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from benchmarks.results import Result
from storage_admin.words import size

NO_DIFFERENCE = _("no measurable difference")
#: Fewer repetitions have no range worth the name. With fewer than :data:`ENOUGH` two that do not overlap are found by
#: chance in a fifth of all matrices.
FEWEST, ENOUGH = 3, 5


@dataclass(frozen=True)
class Advice:
    """One sentence; ``measurable`` is false where it says that there is no difference, ``best`` else the setting."""

    topic: str
    sentence: str
    measurable: bool
    best: Mapping[str, Any] = field(default_factory=dict)


def differ(one: Result, other: Result) -> bool:
    """Whether two results can be told apart: the ranges of their repetitions do not overlap. With fewer than
    :data:`ENOUGH` repetitions there is also more between them, as a ratio, than between the repetitions of either: a
    figure of 100,000 that varies by a tenth would else hide one of 5,000.
    """
    fewest = min(one.repetitions, other.repetitions)
    if fewest < FEWEST or overlap(one, other):
        return False
    if fewest >= ENOUGH:
        return True
    low, high = sorted((one, other), key=value_of)
    # high.min / low.max > row.max / row.min, also where one of them is 0.
    return all((high.min or 0) * (row.min or 0) > (low.max or 0) * (row.max or 0) for row in (low, high))


def overlap(one: Result, other: Result) -> bool:
    """Whether the ranges of two results have a figure in common; of one without figures that is not known, so yes."""
    if one.min is None or one.max is None or other.min is None or other.max is None:
        return True
    return one.min <= other.max and other.min <= one.max


def why_not(rows: Sequence[Result]) -> str:
    """Why no two of some results can be told apart, as the end of a sentence."""
    if all(overlap(one, other) for one, other in combinations(rows, 2)):
        return gettext(", and their ranges overlap")
    fewest = min(row.repetitions for row in rows)
    close = gettext(", and they are too close for {fewest} repetitions: run the benchmark with {enough} or more")
    return close.format(fewest=fewest, enough=ENOUGH)


def too_few(rows: Sequence[Result], where: str) -> str:
    """Why nothing can be told of results of which one has too few repetitions, in a sentence; empty where none has."""
    if min(row.repetitions for row in rows) >= FEWEST:
        return ""
    told = gettext(
        "On {where}, fewer than {fewest} repetitions show {no_difference}. Run the benchmark with more repetitions."
    )
    return told.format(where=where, fewest=FEWEST, no_difference=NO_DIFFERENCE)


def value_of(row: Result) -> float:
    """Its median; 0 where there is none."""
    return row.median or 0.0


def times(best: Result, other: Result) -> str:
    """How many times one is the other, whichever is more: ``1.4 times``."""
    low, high = sorted((value_of(best), value_of(other)))
    if not low:
        return gettext("immeasurably")
    ratio = high / low
    shape = ".2f" if ratio < 1.2 else ".1f" if ratio < 10 else ".0f"
    return gettext("{ratio} times").format(ratio=format(ratio, shape))


def listed(names: list[str]) -> str:
    """``64K, 2M and 4K``."""
    if len(names) == 1:
        return names[0]
    return gettext("{names} and {last}").format(names=", ".join(names[:-1]), last=names[-1])


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
            return gettext("{value} a second").format(value=f"{value:,.0f}" if value >= 10 else f"{value:.3g}")
        case "s":
            return _time(value)
        case _:
            return f"{value:,.3g} {unit}"


def _time(value: float) -> str:
    for least, factor, name in ((1.0, 1, "s"), (1e-3, 1e3, "ms")):
        if value >= least:
            return f"{value * factor:,.0f} {name}" if value * factor >= 100 else f"{value * factor:.3g} {name}"
    return f"{value * 1e6:.3g} µs"
