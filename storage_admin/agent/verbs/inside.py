"""Look at what is on a disk: its partition table, LVM, and how full its filesystems are. No file of a guest is read."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Callable

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure import lvm, partitions
from storage_admin.agent.measure.partitions import Filesystem, Read
from storage_admin.agent.protocol import Arguments, Request
from storage_admin.agent.qemu import content
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite.base import COMMON, Wish, opened

#: So many parts are told at most, physical volumes read, and bytes of a name kept.
_MOST_PARTS, _MOST_GROUPS, _LONGEST_NAME = 256, 16, 128
#: Codes of refusals that matter only where something is written.
HARMLESS = frozenset({"has_internal_snapshots", "hard_linked", "immutable", "dirty_or_corrupt"})


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
        links.refuse_unsafe(chain, children_known=True, carried=HARMLESS)
        chain.refuse_in_use()
        disk = content.Disk(io, chain.node(), chain.image.facts.virtual_size)
        found = _found(disk.read, chain.image.facts.virtual_size, io.check)
        chain.refuse_stale()
    return {**found, "read_bytes": disk.read_bytes, "seconds": round(time.monotonic() - started, 3)}


def _found(read: Read, size: int, check: Callable[[], None]) -> dict[str, Any]:
    table = partitions.table(read)
    spans = [(part.number, part.start, part.end) for part in table.partitions] or [(0, 0, size)]
    parts: list[dict[str, Any]] = []
    groups = 0
    for number, start, end in spans:
        check()
        if not 0 <= start < end <= size or len(parts) >= _MOST_PARTS:
            continue
        inside = partitions.filesystem(read, start)
        parts.append(_part(number, "", start, end - start, inside))
        group = None
        if inside is not None and inside.name == "LVM2_member" and groups < _MOST_GROUPS:
            group, groups = lvm.group(read, start), groups + 1
        for volume in group.volumes[: _MOST_PARTS - len(parts)] if group is not None else ():
            check()
            there = None
            if volume.start is not None and volume.start + volume.size <= end:
                there = partitions.filesystem(read, volume.start)
            name = f"{group.name}/{volume.name}" if group is not None else volume.name
            parts.append(_part(number, name, volume.start or 0, volume.size, there))
    return {"table": table.kind, "wrong": table.wrong, "parts": parts}


def _part(number: int, volume: str, start: int, size: int, inside: Filesystem | None) -> dict[str, Any]:
    told = asdict(inside) if inside is not None else {"name": None, "size": None, "free": None}
    if told["free"] is not None and not 0 <= told["free"] <= (told["size"] or 0):
        told["free"] = None
    return {
        "number": number, "volume": volume[:_LONGEST_NAME], "start": start, "size": size,
        "name": told["name"], "filesystem_bytes": told["size"], "free_bytes": told["free"],
    }  # fmt: skip
