"""Many things, so many at a time: what ``itertools.batched`` does from Python 3.12 on."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def batched(things: Iterable[T], size: int) -> Iterator[list[T]]:
    """The things in their order, in lists of at most ``size``; none is empty."""
    left = iter(things)
    while part := list(islice(left, size)):
        yield part
