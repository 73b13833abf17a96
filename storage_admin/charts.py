"""What every chart has, whatever it shows."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Chart:
    """One chart: an id for its elements, a heading, its configuration for Chart.js, and the same as a table.

    Args:
        broad: whether it needs the whole width of a page.
    """

    id: str
    title: str
    config: dict[str, Any]
    heads: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    broad: bool = False


def told_apart(names: Iterable[str]) -> Iterator[str]:
    """The names in their order; one that was there before has a number behind it."""
    seen = Counter[str]()
    for name in names:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} ({seen[name]})"
