"""When a filesystem is full if it goes on as it does, said only where its samples carry it. No Django, no clock.

A straight line through samples always has a slope. Whether that slope means anything is asked of what was added from
one stretch of days to the next: these steps scatter, and the scatter of their mean (Student's t, 95 %) says how well
the growth is known. That holds for a series that wanders (each day adds or takes away at random) as well as for one
that grows evenly with noise on top; residuals around a line would call the first one a trend. One large copy is one
large step among small ones: it widens the scatter as much as it raises the mean, and no number comes of it. A stretch
is longer where there are more days, which evens noise out.

The growth has to be known to within half of itself, and the last week has to have grown at half to twice that pace:
growth that has ended, or begun lately, is none to go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev

#: Days of a week, over which much repeats itself; so many steps are the least.
WEEK = 7
#: How far back samples are looked at, in days.
WINDOW = 30
#: The last sample may be so old, and two that follow each other so far apart, in days.
STALE, GAP = 2.0, 3.0
#: How well the growth has to be known: half the width of its interval, as part of it.
KNOWN = 0.5
#: As long as an alert is open, it does not end because the growth is known a little less well.
KNOWN_STILL = 0.8
#: What a day adds at least to be called growth, in bytes.
LEAST = 1.0
#: How much faster or slower than over all days the last week may have been.
PACE = 2.0
#: Quantiles of Student's t at 97.5 % by the number of steps, which has one degree of freedom more than the quantile.
_T = {6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262, 11: 2.228, 12: 2.201}


@dataclass(frozen=True)
class Day:
    """What was used over one day.

    Args:
        age: days before now, of the middle of its samples.
        used_bytes: their mean.
    """

    age: float
    used_bytes: float


@dataclass(frozen=True)
class Forecast:
    """In how many days it is full, if it goes on so.

    Args:
        days: by the mean growth.
        low, high: by the fastest and the slowest growth that the samples allow (95 %).
        growth_bytes: a day.
        over_days: what it rests on.
    """

    days: float
    low: float
    high: float
    growth_bytes: float
    over_days: int


def is_fresh(days: Sequence[Day]) -> bool:
    """Whether samples tell of now at all.

    Args:
        days: the oldest first.
    """
    return bool(days) and days[-1].age <= STALE


def forecast(days: Sequence[Day], available_bytes: int, known: float = KNOWN) -> Forecast | None:
    """In how many days ``available_bytes`` are gone; ``None`` where the samples do not carry it.

    Args:
        days: the oldest first.
        known: how well the growth has to be known (``KNOWN``).
    """
    recent = [day for day in days if day.age <= WINDOW]
    if len(recent) <= WEEK or not is_fresh(recent):
        return None
    apart = [before.age - after.age for before, after in pairwise(recent)]
    if max(apart) > GAP or min(apart) <= 0:
        return None
    low, high = _interval(_steps(_stretches(recent, len(recent) // WEEK)))
    growth, lately = (low + high) / 2, fmean(_steps(recent[-WEEK - 1 :]))
    if growth < LEAST or low < (1 - known) * growth or not growth / PACE <= lately <= growth * PACE:
        return None
    low, high = min(low, lately), max(high, lately)
    return Forecast(
        days=round(available_bytes / growth, 1),
        low=round(available_bytes / high, 1),
        high=round(available_bytes / low, 1),
        growth_bytes=growth,
        over_days=len(recent),
    )


def _stretches(days: Sequence[Day], length: int) -> list[Day]:
    """Means over so many days each, counted from the last one; what is left over at the beginning is left out."""
    first = len(days) % length
    cut = [days[start : start + length] for start in range(first, len(days), length)]
    return [Day(fmean(day.age for day in part), fmean(day.used_bytes for day in part)) for part in cut]


def _steps(days: Sequence[Day]) -> list[float]:
    """What was added from each to the next, in bytes a day."""
    return [(after.used_bytes - before.used_bytes) / (before.age - after.age) for before, after in pairwise(days)]


def _interval(steps: Sequence[float]) -> tuple[float, float]:
    """Between what the mean of such steps lies (95 %)."""
    mean = fmean(steps)
    reach = _T[len(steps)] * stdev(steps) / sqrt(len(steps))
    return mean - reach, mean + reach
