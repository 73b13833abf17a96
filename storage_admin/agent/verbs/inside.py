"""Look at what is on a disk: its partition table, LVM, and how full its filesystems are. No file of a guest is read."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure import lvm, partitions
from storage_admin.agent.measure.partitions import Filesystem, Read
from storage_admin.agent.protocol import Arguments, Request
from storage_admin.agent.qemu import content
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite.base import COMMON, Wish, opened

#: What is read at once: most of what is looked at stands at the beginning of a filesystem.
_WINDOW = 128 << 10
#: So many volumes are looked into, and windows read.
_MOST_VOLUMES, _MOST_WINDOWS = 64, 2000


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """What is on an image that nobody uses.

    Args:
        request: its ``args`` are :data:`base.COMMON`.
        io: the controller.

    Returns:
        ``table`` (``gpt``, ``mbr`` or empty), ``wrong`` (what of it makes no sense), ``parts``: each ``number`` (0 for
        the whole disk), ``volume`` (name of a logical volume, with that of its group, or empty), ``start``, ``size``,
        and of what is in it ``name``, ``filesystem_bytes`` and ``free_bytes``, null where that is not known;
        ``read_bytes``; ``seconds``.

    Raises:
        RefusedError, HostError, StoppedError: as of every look at a chain.
    """
    args = Arguments(request.args, COMMON)
    wish, started = Wish.parse(request.args, args), time.monotonic()
    with opened(wish) as chain:
        links.refuse_unsafe(chain, children_known=True, carried=_HARMLESS)
        chain.refuse_in_use()
        windows = Windows(io, chain.node(), chain.image.facts.virtual_size)
        found = _found(windows.read, chain.image.facts.virtual_size)
        chain.refuse_stale()
    return {**found, "read_bytes": windows.read_bytes, "seconds": round(time.monotonic() - started, 3)}


#: What matters only to whoever writes.
_HARMLESS = frozenset({"has_internal_snapshots", "hard_linked", "immutable", "dirty_or_corrupt"})


class Windows:
    """A disk as its guest reads it, in pieces that are kept."""

    def __init__(self, io: AgentIO, node: Node, size: int) -> None:
        self._io, self._node, self._size = io, node, size
        self._kept: dict[int, bytes] = {}

    @property
    def read_bytes(self) -> int:
        """How much was read."""
        return sum(len(piece) for piece in self._kept.values())

    def read(self, at: int, length: int) -> bytes:
        """Bytes from that place on; fewer at the disk's end."""
        end = min(at + length, self._size)
        if at < 0 or end <= at:
            return b""
        places = range(at // _WINDOW * _WINDOW, end, _WINDOW)
        missing = [place for place in places if place not in self._kept]
        if missing and len(self._kept) + len(missing) <= _MOST_WINDOWS:
            asked = [(place, min(_WINDOW, self._size - place) + 15 & ~15) for place in missing]
            for one in asked:  # one at a time: what a tool prints is bounded
                self._kept[one[0]] = content.read(self._io, self._node, [one])[0]
        whole = b"".join(self._kept.get(place, b"") for place in places)
        return whole[at - places[0] : end - places[0]]


def _found(read: Read, size: int) -> dict[str, Any]:
    table = partitions.table(read)
    spans = [(part.number, part.start, part.end) for part in table.partitions] or [(0, 0, size)]
    parts: list[dict[str, Any]] = []
    for number, start, end in spans:
        if not 0 <= start < end <= size:
            continue
        inside = partitions.filesystem(read, start)
        parts.append(_part(number, "", start, end - start, inside))
        group = lvm.group(read, start) if inside is not None and inside.name == "LVM2_member" else None
        for volume in group.volumes[:_MOST_VOLUMES] if group is not None else ():
            there = None
            if volume.start is not None and volume.start + volume.size <= end:
                there = partitions.filesystem(read, volume.start)
            name = f"{group.name}/{volume.name}" if group is not None else volume.name
            parts.append(_part(number, name, volume.start or 0, volume.size, there))
    return {"table": table.kind, "wrong": table.wrong, "parts": parts}


def _part(number: int, volume: str, start: int, size: int, inside: Filesystem | None) -> dict[str, Any]:
    told = asdict(inside) if inside is not None else {"name": None, "size": None, "free": None}
    return {
        "number": number, "volume": volume, "start": start, "size": size,
        "name": told["name"], "filesystem_bytes": told["size"], "free_bytes": told["free"],
    }  # fmt: skip
