"""What a new image takes on the disk before a guest has written anything, by its format and options.

Layouts: QEMU, docs/interop/qcow2.txt (header, refcounts, L1 and L2 tables); VMware, Virtual Disk Format 5.0 (grain
directories); the formats' headers as qemu-img writes them. Compared with what a filesystem then gave:
``tests/images/test_create.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20
#: Blocks of most filesystems; each part of a file may take one more than it needs.
_BLOCK = 4096
#: What a filesystem may need for its own lists of blocks, or set aside behind a file's end.
_SLACK = 16 * _BLOCK
#: A LUKS header with the room for eight keys, and the part of it that one takes (qemu-img with AES-256 in XTS mode).
_LUKS, _KEY = 2_068_480, 256 * KIB
_SIZE = re.compile(
    r"(?:0x(?P<hex>[0-9a-f]+)|(?P<number>[0-9]{1,15}(?:\.[0-9]{1,9})?)(?P<unit>[bkmgt]?))", re.IGNORECASE
)
_UNITS = {"": 1, "b": 1, "k": KIB, "m": MIB, "g": 1 << 30, "t": 1 << 40}
#: The words by which qemu-img switches an option on.
ON = frozenset({"on", "yes", "true", "y"})


class Room(NamedTuple):
    """Allocated bytes of a new image: the best guess (``None`` where there is none), at least, at most."""

    after: int | None
    low: int
    high: int


def room(form: str, options: Mapping[str, str], virtual_size: int, *, locked: bool = False) -> Room:
    """What an image of that virtual size takes.

    Args:
        form: its format, in qemu's word.
        options: creation options as qemu-img takes them, all of them sound.
        virtual_size: in bytes.
        locked: whether it is encrypted, as qcow2 and raw can be.

    Raises:
        ValueError, ArithmeticError: an option is not sound.
    """
    if form == "qcow2":
        return _qcow2(options, virtual_size, _LUKS if locked else 0)
    if locked:
        return Room(_KEY, _BLOCK, _LUKS + _SLACK)
    filled = options.get("preallocation") in {"falloc", "full"}
    if form == "raw":
        # Its first block is written by QEMU, which finds out by it how a guest's requests have to be aligned.
        return Room(virtual_size, virtual_size, virtual_size + _SLACK) if filled else Room(_BLOCK, 0, _SLACK)
    if filled or options.get("subformat") == "fixed":
        # Some are written in full, some get holes: that depends on the version.
        return Room(None, 0, virtual_size + virtual_size // 1024 + 16 * MIB)
    tables = {
        # Header and descriptor, and two directories of grain tables: 4 bytes for each table of 512 grains of 64 KiB.
        "vmdk": _BLOCK + 21 * 512 + 8 * _up(virtual_size, 32 * MIB),
        # 4 bytes for each block of 1 MiB, or of 2 MiB.
        "vdi": 512 + 4 * _up(virtual_size, MIB),
        "vpc": 2 * KIB + 4 * _up(virtual_size, 2 * MIB),
    }
    if form not in tables:  # how large VHDX makes its log and its blocks, qemu-img decides by the size
        return Room(None, MIB, 16 * MIB + virtual_size // MIB * 8)
    size = _up(tables[form], _BLOCK) * _BLOCK
    return Room(size, _BLOCK, size + MIB)


def tables(cluster_size: int | None, virtual_size: int) -> int:
    """What the tables of an empty qcow2 of that size take at most, in bytes: so much more may one take that grows."""
    return room("qcow2", {"cluster_size": str(cluster_size or 512), "extended_l2": "on"}, virtual_size).high


def _qcow2(options: Mapping[str, str], virtual_size: int, beside: int = 0) -> Room:
    cluster = size_of(options.get("cluster_size", "64k")) or 0
    entry = 16 if options.get("extended_l2") in ON else 8
    refcount_bits = int(options.get("refcount_bits", "16"))
    clusters = _up(virtual_size, cluster)
    tables = _up(clusters, cluster // entry)
    # Header, refcount table, one block of refcounts, and the L1 table, which does not fill its last cluster.
    size = 3 * cluster + 8 * tables + _up(beside, cluster) * cluster
    wanted = options.get("preallocation", "off")
    if wanted != "off":
        blocks = _up((clusters + tables + size // cluster + 1) * refcount_bits, 8 * cluster)
        size += (tables + blocks - 1) * cluster
        if wanted == "metadata" and cluster < _BLOCK:
            # They lie between the data, which has no blocks yet: each may have one of its own.
            return Room(None, size, size * _BLOCK // cluster + _SLACK)
    if wanted in {"falloc", "full"}:
        size += virtual_size
    size = _up(size, _BLOCK) * _BLOCK
    return Room(size, max(size - cluster - 4 * _BLOCK, 0), size + size // 64 + 2 * cluster + _SLACK)


def _up(amount: int, unit: int) -> int:
    return -(-amount // unit)


def size_of(value: str) -> int | None:
    """A size as qemu-img reads it, in bytes; ``None`` where it is none, or no whole number of bytes."""
    matched = _SIZE.fullmatch(value)
    if matched is None:
        return None
    if matched["hex"]:
        return int(matched["hex"], 16)
    size = Decimal(matched["number"]) * _UNITS[matched["unit"].lower()]
    return int(size) if size == int(size) else None
