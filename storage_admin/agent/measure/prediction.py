"""What a method would make of an image, in numbers that a page can show and a space check can rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Methods from the one that asks least of an image and its pool to the one that asks most. ``in_place`` needs no
#: scratch space and holds no undo copy; ``copy`` leaves the image as quick as it was; ``compress`` makes reads cost
#: processor time and is undone piece by piece by the guest's writes.
GENTLEST_FIRST = ("in_place", "copy", "compress")
#: A gentler method is taken where it wins at least this share of what the best one wins.
_NEARLY_AS_MUCH = 0.98
_NUMBERS = (
    "predicted_after_bytes", "predicted_low", "predicted_high",
    "reclaimable_bytes", "reclaimable_low", "reclaimable_high",
)  # fmt: skip

Fields = dict[str, Any]


@dataclass(frozen=True)
class Prediction:
    """Allocated bytes after a method: the best guess, the lowest and the highest."""

    after: float
    low: float
    high: float

    def fields(self, allocated: int) -> Fields:
        """As numbers of a result, with what would be won.

        Args:
            allocated: what the image takes now, in bytes.
        """
        low, high = max(round(self.low), 0), round(self.high)
        after = min(max(round(self.after), low), high)
        values = (after, low, high, *(max(allocated - size, 0) for size in (after, high, low)))
        return dict(zip(_NUMBERS, values))


def impossible(reason: str) -> Fields:
    """The numbers of a method that cannot be used: all unknown, with a sentence that says why."""
    return {**dict.fromkeys(_NUMBERS), "reason": reason}


def best(methods: Mapping[str, Mapping[str, Any]], offered: Sequence[str]) -> str | None:
    """The method that an admin would want: the one that wins most, or a gentler one that wins nearly as much.

    Of those that win at least 98 % of the largest win, it is ``in_place`` before ``copy`` before ``compress``
    (:data:`GENTLEST_FIRST`). Where nothing can be won it is the gentlest one that is known.

    Args:
        methods: the numbers of each, as :meth:`Prediction.fields` and :func:`impossible` make them.
        offered: the methods that there are to choose from.

    Returns:
        ``None`` where no method's win is known.
    """
    wins = {
        name: methods[name]["reclaimable_bytes"]
        for name in GENTLEST_FIRST
        if name in offered and methods.get(name, {}).get("reclaimable_bytes") is not None
    }
    most = max(wins.values(), default=0)
    return next((name for name, win in wins.items() if win >= _NEARLY_AS_MUCH * most), None)


def result(allocated: int, methods: Mapping[str, Fields], basis: Fields, shared: int = 0) -> Fields:
    """The result for an image: every method's numbers, and those of the best one on top.

    Args:
        allocated: its allocated size in bytes.
        methods: the numbers of each method.
        basis: how they were found.
        shared: bytes of it that other files have as well (reflinks, snapshots of the filesystem): they stay taken
            when the image lets go of them, so that less is won.
    """
    if shared:
        methods = {name: _but_for_shared(name, fields, allocated, shared) for name, fields in methods.items()}
        basis = {**basis, "shared_bytes": shared}
    chosen = best(methods, GENTLEST_FIRST)
    top = methods[chosen] if chosen else impossible(next(fields["reason"] for fields in methods.values()))
    kept = {name: top[name] for name in (*_NUMBERS, "reason") if name in top}
    return {"method": chosen, "allocated_size": allocated, **kept, "methods": dict(methods), "basis": basis}


def _but_for_shared(method: str, fields: Fields, allocated: int, shared: int) -> Fields:
    """A method's numbers with what is won as the filesystem counts it."""
    if fields.get("predicted_after_bytes") is None:
        return fields
    own = max(allocated - shared, 0)
    after, low, high = (fields[name] for name in _NUMBERS[:3])
    if method == "in_place":
        # Where among the blocks the zeros are is not known: at best in those that are the image's own.
        won = round((allocated - after) * own / allocated)
        wins = (won, max(allocated - high - shared, 0), min(allocated - low, own))
    else:
        wins = (own - after, own - high, own - low)
    changed = {**fields, **{name: max(win, 0) for name, win in zip(_NUMBERS[3:], wins)}}
    if "compressions" in fields:
        each = fields["compressions"].items()
        changed["compressions"] = {name: _but_for_shared(method, one, allocated, shared) for name, one in each}
    return changed


def unknown(allocated: int, reason: str) -> Fields:
    """The result for an image that no method can be predicted for.

    Args:
        allocated: its allocated size in bytes.
        reason: a sentence for the admin.
    """
    return result(allocated, {name: impossible(reason) for name in GENTLEST_FIRST}, {})
