"""How much of one image another one still holds: blocks with data, drawn at random, read from both as a guest would."""

from __future__ import annotations

import os
import random
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from storage_admin.agent.formats import Reader, qcow2
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure.extents import map_of
from storage_admin.agent.measure.file_data import DataMap
from storage_admin.agent.measure.qcow2_map import Map
from storage_admin.agent.qemu import content
from storage_admin.agent.qemu.node import SLOW_QUERY, Node

#: Blocks that are compared, and bytes of each.
WANTED, BLOCK = 64, 4096
#: Blocks that one process reads: what it prints of them stays below the limit of a query's output.
_AT_ONCE = 128
#: Draws of so many: of an image in which most of what is set aside are zeros, few blocks tell anything.
_ROUNDS = 8
#: Seconds for the tables of the copy, where somebody waits.
_TABLES = 60.0


@dataclass(frozen=True)
class Likeness:
    """How many blocks of data of the one image were looked at, and in how many the other has the same bytes."""

    looked_at: int
    equal: int

    @property
    def half(self) -> bool:
        """Whether at least half of them are equal; also where the one holds nothing but zeros."""
        return self.equal * 2 >= self.looked_at


def likeness(
    io: AgentIO, copy: Node, image: Node, draw: random.Random | None = None, seconds: float | None = _TABLES
) -> Likeness:
    """Compare blocks of the copy's own data with what is at their place in the image.

    Of an overlay and the image below it, too: what a guest wrote in part of a cluster stands in the overlay with the
    rest of the base's cluster.

    Args:
        io: the controller.
        copy: what it may hold alone; its base is not looked at.
        image: where the same should be; a guest may be at work on it.
        draw: what draws the blocks; without it, nobody can foresee them.
        seconds: for the tables of the copy.

    Raises:
        HostError: one of them cannot be read.
        RefusedError: ``dirty_or_corrupt``; ``tool_missing``.
    """
    draw = draw or random.SystemRandom()
    blocks = _Blocks(io, copy, None if seconds is None else time.monotonic() + seconds)
    held: dict[int, bytes] = {}
    for _ in range(_ROUNDS):
        drawn = blocks.draw(draw, _AT_ONCE)
        held.update((at, found) for at, found in _read(io, copy, drawn).items() if found.strip(b"\0"))
        if len(held) >= WANTED or len(drawn) < _AT_ONCE:
            break
    wanted = sorted(draw.sample(sorted(held), min(WANTED, len(held))))
    found = _read(io, image, wanted)
    return Likeness(len(wanted), sum(found.get(at) == held[at] for at in wanted))


class _Blocks:
    """The blocks that a file holds data for: where they are for a guest, in bytes."""

    def __init__(self, io: AgentIO, node: Node, deadline: float | None) -> None:
        self._io, self._node = io, node
        size = os.fstat(node.fd).st_size
        self._stretches: list[tuple[int, int]] = []
        self._data: DataMap | None = None
        self._map: Map | None = None
        if node.format == "qcow2":
            header = qcow2.parse_header(Reader(node.fd, size))
            self._map = Map(node.fd, size, header, io.check, deadline)
            self._counts = self._map.count()
        elif node.format in {"raw", "iso"}:
            self._data = DataMap(node.fd, size, io.check)
        else:
            listed = map_of(io, node, SLOW_QUERY)
            self._stretches = [(one["start"], one["length"]) for one in listed if one["data"] and not one["zero"]]

    def draw(self, draw: random.Random, count: int) -> list[int]:
        """At most so many places, ascending; fewer where there are no more."""
        if self._map is not None:
            return self._of_clusters(self._map, draw, count)
        if self._data is not None:
            blocks = -(-self._data.data_bytes // BLOCK)
            return sorted(self._data.place(number * BLOCK) for number in draw.sample(range(blocks), min(count, blocks)))
        sums = [0, *accumulate(-(-length // BLOCK) for _, length in self._stretches)]
        found = []
        for number in sorted(draw.sample(range(sums[-1]), min(count, sums[-1]))):
            stretch = bisect_right(sums, number) - 1
            found.append(self._stretches[stretch][0] + (number - sums[stretch]) * BLOCK)
        return found

    def _of_clusters(self, tables: Map, draw: random.Random, count: int) -> list[int]:
        data, packed = self._counts.data, self._counts.compressed
        each = max(tables.cluster_size // BLOCK, 1)
        numbers = sorted(draw.sample(range((data + packed) * each), min(count, (data + packed) * each)))
        inside: dict[int, list[int]] = {}
        for number in numbers:
            inside.setdefault(number // each, []).append(number % each)
        plain = [number for number in inside if number < data]
        others = [number for number in inside if number >= data]
        places = [cluster.number for cluster in tables.clusters(plain)]
        places += [cluster.number for cluster in tables.packed([number - data for number in others])]
        parts = [inside[number] for number in (*plain, *others)]
        size = tables.cluster_size
        return sorted(place * size + part * BLOCK for place, some in zip(places, parts) for part in some)


def _read(io: AgentIO, node: Node, places: Sequence[int]) -> dict[int, bytes]:
    """Blocks as a guest reads them, by their place."""
    return dict(zip(places, content.read(io, node, [(at, BLOCK) for at in places])))
