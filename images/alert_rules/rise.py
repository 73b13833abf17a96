"""When a pool that fills up within hours is full, from looks that are minutes apart. No Django, no clock.

What has risen steadily for a while is taken to rise about as long again: a copy that has taken twice of what is left is
told of, while the same copy on a pool with much room is not. That holds for ten minutes as for ten hours, as it goes by
what was added and not by the clock.

The pace is the median of the slopes between any two looks (Theil and Sen), which single outliers do not change. A rise
is one where nearly all these slopes go up, and that has not ended: in its last quarter as well. It is looked for in the
last five minutes, and in ever longer times before now.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

#: A rise is told of when it has added so many times of what is left; once it is told of, as long as this holds.
ADDED, ADDED_STILL = 2.0, 1.0
#: So many of the slopes go up; once it is told of, so many.
UP, UP_STILL = 0.8, 0.6
#: How much slower its last quarter may have been.
LATELY = 1 / 3
#: Looks that it needs, and that are taken of a long time.
LEAST, MOST = 4, 40
#: Minutes: the shortest time that is looked at, how much longer each further one is, the longest, and how old the last
#: look may be.
SHORTEST, LONGER, LONGEST, STALE = 5.0, 1.5, 24 * 60.0, 7.0


@dataclass(frozen=True)
class Look:
    """What was used at one look.

    Args:
        age: minutes before now.
        used_bytes: of the pool, or of its metadata.
    """

    age: float
    used_bytes: int


@dataclass(frozen=True)
class Rise:
    """A steady rise.

    Args:
        minutes: until it is full, if it goes on so.
        bytes_a_minute: its pace.
        since: minutes that it has lasted, as far as it was looked at.
        added_bytes: in that time.
    """

    minutes: float
    bytes_a_minute: float
    since: float
    added_bytes: int


def rise(looks: Sequence[Look], free_bytes: int, *, told: bool = False) -> Rise | None:
    """The rise that fills a pool soon; ``None`` where there is none.

    Args:
        looks: the oldest first.
        free_bytes: what is left.
        told: whether it is told of already.
    """
    for recent in _times(looks):
        pace, up = _slope(recent)
        since = recent[0].age - recent[-1].age
        added = min(pace * since, recent[-1].used_bytes - recent[0].used_bytes)
        if up < (UP_STILL if told else UP) or added < (ADDED_STILL if told else ADDED) * free_bytes or added <= 0:
            continue
        lately, _ = _slope(recent[-max(len(recent) // 4, 3) :])
        if lately >= LATELY * pace:
            return Rise(free_bytes / pace, pace, since, round(added))
    return None


def _times(looks: Sequence[Look]) -> Iterator[Sequence[Look]]:
    """The looks of the last minutes, of ever more of them; each of these times once."""
    before, length = 0, SHORTEST
    while length <= LONGEST * LONGER:
        recent = [look for look in looks if look.age - looks[-1].age <= length]
        length *= LONGER
        if len(recent) >= LEAST and len(recent) > before:
            before = len(recent)
            yield _thinned(recent)


def _thinned(looks: Sequence[Look]) -> Sequence[Look]:
    step = (len(looks) - 1) / (MOST - 1)
    return looks if len(looks) <= MOST else [looks[round(step * number)] for number in range(MOST)]


def _slope(looks: Sequence[Look]) -> tuple[float, float]:
    """The median of the slopes, in bytes a minute, and which part of them goes up."""
    slopes = [
        (after.used_bytes - before.used_bytes) / (before.age - after.age)
        for before, after in combinations(looks, 2)
        if before.age > after.age
    ]
    return (median(slopes), sum(slope > 0 for slope in slopes) / len(slopes)) if slopes else (0.0, 0.0)
