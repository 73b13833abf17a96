"""Partition tables and the filesystems in them: how much of a disk from its beginning on is spoken for.

Layouts: UEFI specification 2.10 (5.2 "LBA 0", 5.3 "GUID Partition Table"); the superblocks of Linux
(``fs/ext4/ext4.h``, ``fs/xfs/libxfs/xfs_format.h``, ``include/uapi/linux/btrfs_tree.h``), of NTFS and FAT (their boot
sectors), of swap (``include/linux/swap.h``), LVM2 (``lib/format_text/layout.h``) and md
(``include/uapi/linux/raid/md_p.h``). All of it is a guest's, and may lie: whatever cannot be made sense of is unknown.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Callable

#: Reads bytes of the disk as its guest sees them: offset and length; less than that at the disk's end.
Read = Callable[[int, int], bytes]

_MOST_LOGICAL, _MOST_ENTRIES, _MOST_BYTES = 128, 1024, 256 << 10
_EXTENDED = frozenset({0x05, 0x0F, 0x85})
_PROTECTIVE = 0xEE
#: Of a dynamic disk of Windows, whose database is in the last MiB, outside of all partitions.
_DYNAMIC = 0x42
_MIB = 1 << 20
_GPT = struct.Struct("<8s4sIIIQQQQ16sQIII")
_MBR_ENTRY = struct.Struct("<B3sB3sII")


@dataclass(frozen=True)
class Partition:
    """One partition. Sizes and places are in bytes; ``end`` is the first byte behind it."""

    number: int
    start: int
    end: int


@dataclass(frozen=True)
class Gpt:
    """A GUID partition table, as its first copy says it.

    Args:
        sector: bytes of a logical sector.
        header: the whole first header.
        entries: the whole array of partitions.
    """

    sector: int
    header: bytes
    entries: bytes

    @property
    def tail(self) -> int:
        """Bytes that its second copy takes at the end of the disk."""
        return -(-len(self.entries) // self.sector) * self.sector + self.sector

    def moved(self, size: int) -> tuple[bytes, bytes]:
        """The first header and the end of the disk, with the second copy, of a disk of so many bytes: whole sectors."""
        last = size // self.sector - 1
        copy = last - (self.tail // self.sector - 1)
        first = self._header(here=1, other=last, usable=copy - 1, entries=None)
        second = self._header(here=last, other=1, usable=copy - 1, entries=copy)
        padded = self.entries + bytes(self.tail - self.sector - len(self.entries))
        return first, padded + second

    def protective(self, mbr: bytes, size: int) -> bytes:
        """The disk's first 512 bytes, in which the protective partition is as long as a disk of ``size`` bytes."""
        changed = bytearray(mbr)
        for entry in range(446, 510, 16):
            if changed[entry + 4] == _PROTECTIVE:
                struct.pack_into("<I", changed, entry + 12, min(size // self.sector - 1, 0xFFFFFFFF))
        return bytes(changed)

    def _header(self, *, here: int, other: int, usable: int, entries: int | None) -> bytes:
        told = list(_GPT.unpack_from(self.header))
        told[3], told[5], told[6], told[8] = 0, here, other, usable
        if entries is not None:
            told[10] = entries
        size = told[2]
        whole = _GPT.pack(*told) + self.header[_GPT.size : size]
        crc = struct.pack("<I", zlib.crc32(whole))
        return whole[:16] + crc + whole[20:] + bytes(self.sector - size)


@dataclass(frozen=True)
class Table:
    """A disk's partition table; ``kind`` is ``gpt``, ``mbr``, or empty where there is none."""

    kind: str
    partitions: tuple[Partition, ...] = ()
    gpt: Gpt | None = None
    #: What of it makes no sense; empty where all does.
    wrong: str = ""


@dataclass(frozen=True)
class Filesystem:
    """What is in a partition, or on a whole disk; ``size`` is in bytes, ``None`` where it does not say it."""

    name: str
    size: int | None = None
    free: int | None = None


@dataclass
class _Mbr:
    read: Read
    found: list[Partition] = field(default_factory=list)
    wrong: str = ""

    def logical(self, extended: int) -> None:
        """Follow the chain of the extended partition at that sector."""
        at, seen = extended, set[int]()
        while at not in seen and len(seen) < _MOST_LOGICAL:
            seen.add(at)
            entries = _entries(self.read(at * 512, 512))
            if entries is None:
                self.wrong = f"the extended partition at sector {at} has no table"
                return
            kind, start, count = entries[0]
            if kind:
                begin = (at + start) * 512
                self.found.append(Partition(4 + len(seen), begin, begin + count * 512))
            kind, start, count = entries[1]
            if kind not in _EXTENDED:
                return
            at = extended + start
        self.wrong = "the chain of logical partitions does not end"


def _entries(sector: bytes) -> list[tuple[int, int, int]] | None:
    """Type, first sector and number of sectors of the four entries; ``None`` for a sector without the mark."""
    if len(sector) < 512 or sector[510:512] != b"\x55\xaa":
        return None
    unpacked = (_MBR_ENTRY.unpack_from(sector, 446 + 16 * place) for place in range(4))
    return [(kind, start, count) if count else (0, 0, 0) for _, _, kind, _, start, count in unpacked]


def table(read: Read) -> Table:
    """The partition table of a disk as the kernel of a guest would take it; ``wrong`` where that is unsure."""
    entries = _entries(read(0, 512))
    there = signatures(read, 0)
    # The boot sectors of these have the mark, too, and code where a table has its entries.
    if entries is not None and there and there[0].name in {"ntfs", "vfat"}:
        entries = None
    used = [kind for kind, _, _ in entries or () if kind]
    gpt = next((found for sector in (512, 4096) if (found := _gpt(read, sector)) is not None), None)
    if gpt is not None and _PROTECTIVE not in used:
        return Table("gpt", gpt.partitions, wrong="a GUID partition table is there that the MBR does not name")
    if gpt is not None and used != [_PROTECTIVE]:
        return Table("gpt", gpt.partitions, wrong="it has a GUID partition table and an MBR with partitions of its own")
    if gpt is not None:
        return (
            gpt if not there else Table("gpt", gpt.partitions, wrong=f"beside its table, the disk has {there[0].name}")
        )
    if not used:
        return Table("")
    if there:
        return Table("mbr", wrong=f"the disk has a partition table and {there[0].name} at its beginning")
    if _PROTECTIVE in used:
        return Table("gpt", wrong="its GUID partition table is damaged")
    if _DYNAMIC in used:
        return Table("mbr", wrong="it is a dynamic disk of Windows, whose database is at its end")
    mbr = _Mbr(read)
    for place, (kind, start, count) in enumerate(entries or ()):
        if kind:
            mbr.found.append(Partition(place + 1, start * 512, (start + count) * 512))
        if kind in _EXTENDED:
            mbr.logical(start)
    return Table("mbr", tuple(mbr.found), wrong=mbr.wrong)


def _gpt(read: Read, sector: int) -> Table | None:
    header = read(sector, sector)
    if len(header) < sector or not header.startswith(b"EFI PART"):
        return None
    _, _, size, crc, _, here, _, _, _, _, place, count, width, entries_crc = _GPT.unpack_from(header)
    listed = 0 < count <= _MOST_ENTRIES and width >= 128 and count * width <= _MOST_BYTES
    if not _GPT.size <= size <= sector or here != 1 or not listed:
        return Table("gpt", wrong="its GUID partition table has a header that makes no sense")
    zeroed = header[:16] + bytes(4) + header[20:size]
    entries = read(place * sector, count * width)
    if zlib.crc32(zeroed) != crc or len(entries) != count * width or zlib.crc32(entries) != entries_crc:
        return Table("gpt", wrong="its GUID partition table does not match its checksum")
    found = []
    for number in range(count):
        entry = entries[number * width : (number + 1) * width]
        first, last = struct.unpack_from("<QQ", entry, 32)
        if entry[:16] != bytes(16):
            found.append(Partition(number + 1, first * sector, (last + 1) * sector))
    return Table("gpt", tuple(found), Gpt(sector, header, entries))


def filesystem(read: Read, at: int) -> Filesystem | None:
    """What begins at that byte of the disk: a filesystem, swap, or a part of an LVM or an array; ``None`` where that is
    nothing known, or more than one thing: a header may be left from what was there before.
    """
    found = signatures(read, at)
    return found[0] if len(found) == 1 else None


def signatures(read: Read, at: int) -> list[Filesystem]:
    """All that the bytes from that place on look like."""
    head = read(at, 4096)
    if len(head) < 4096:
        return []
    looks = (_luks, _xfs, _ntfs, _fat, _ext, _swap, _lvm)
    found = [*(look(head) for look in looks), _btrfs(read(at + 65536, 4096)), _array(read(at + 4096, 4096))]
    return [one for one in found if one is not None]


def _xfs(head: bytes) -> Filesystem | None:
    if not head.startswith(b"XFSB"):
        return None
    block, blocks = struct.unpack_from(">IQ", head, 4)
    (free,) = struct.unpack_from(">Q", head, 144)
    return Filesystem("xfs", block * blocks, block * free)


def _ext(head: bytes) -> Filesystem | None:
    block = head[1024:2048]
    if block[56:58] != b"\x53\xef":
        return None
    count, _, free = struct.unpack_from("<III", block, 4)
    (log,) = struct.unpack_from("<I", block, 24)
    (incompat,) = struct.unpack_from("<I", block, 96)
    if log > 6:
        return Filesystem("ext")
    if incompat & 0x80:  # 64bit
        high, _, free_high = struct.unpack_from("<III", block, 0x150)
        count, free = count | high << 32, free | free_high << 32
    name = "ext4" if incompat & 0x40 else "ext3" if block[92] & 4 else "ext2"
    return Filesystem(name, count << 10 + log, free << 10 + log)


def _ntfs(head: bytes) -> Filesystem | None:
    if head[3:11] != b"NTFS    ":
        return None
    (sector,) = struct.unpack_from("<H", head, 11)
    (count,) = struct.unpack_from("<Q", head, 40)
    return Filesystem("ntfs", (count + 1) * sector)  # its last sector is a copy of the first


def _fat(head: bytes) -> Filesystem | None:
    if head[510:512] != b"\x55\xaa" or not (head[54:57] == b"FAT" or head[82:85] == b"FAT"):
        return None
    (sector,) = struct.unpack_from("<H", head, 11)
    (small,) = struct.unpack_from("<H", head, 19)
    (large,) = struct.unpack_from("<I", head, 32)
    told = head[sector : sector + 512] if sector in {512, 1024, 2048} else b""  # FSInfo of FAT32
    free = None
    if head[82:87] == b"FAT32" and told[484:488] == b"rrAa":
        (count,) = struct.unpack_from("<I", told, 488)
        free = count * head[13] * sector if count != 0xFFFFFFFF else None
    return Filesystem("vfat", (small or large) * sector, free)


def _swap(head: bytes) -> Filesystem | None:
    if head[4086:4096] != b"SWAPSPACE2":
        return None
    version, last = struct.unpack_from("<II", head, 1024)
    return Filesystem("swap", (last + 1) * 4096 if version == 1 else None)


def _lvm(head: bytes) -> Filesystem | None:
    for sector in range(0, 2048, 512):
        label = head[sector : sector + 512]
        if label.startswith(b"LABELONE") and label[24:32] == b"LVM2 001":
            (offset,) = struct.unpack_from("<I", label, 20)
            if offset + 40 <= len(label):
                (size,) = struct.unpack_from("<Q", label, offset + 32)
                return Filesystem("LVM2_member", size)
            return Filesystem("LVM2_member")
    return None


def _luks(head: bytes) -> Filesystem | None:
    # As large as what it is in: what is in it cannot be seen.
    return Filesystem("crypto_LUKS") if head.startswith(b"LUKS\xba\xbe") else None


def _btrfs(block: bytes) -> Filesystem | None:
    if block[64:72] != b"_BHRfS_M":
        return None
    total, used = struct.unpack_from("<QQ", block, 112)
    (devices,) = struct.unpack_from("<Q", block, 136)
    (size,) = struct.unpack_from("<Q", block, 201 + 8)  # dev_item.total_bytes
    return Filesystem("btrfs", size) if devices > 1 else Filesystem("btrfs", total, max(total - used, 0))


def _array(block: bytes) -> Filesystem | None:
    """md with its superblock near the beginning (version 1.2)."""
    if len(block) < 256 or block[:4] != b"\xfc\x4e\x2b\xa9":
        return None
    offset, size = struct.unpack_from("<QQ", block, 128)
    return Filesystem("linux_raid_member", (offset + size) * 512)


def ends_of_arrays(read: Read, size: int) -> Iterator[str]:
    """What stands at the end of a disk that belongs to an array: md 0.90 and 1.0, SNIA's DDF, Intel's firmware."""
    if read((size & ~0xFFFF) - 0x10000, 4) in (b"\xfc\x4e\x2b\xa9", b"\xa9\x2b\x4e\xfc") and size > 0x10000:
        yield "md 0.90"
    if size > 0x2000 and read((size // 512 - 16 & ~7) * 512, 4) == b"\xfc\x4e\x2b\xa9":
        yield "md 1.0"
    if read(size - 512, 4) in (b"\xde\x11\xde\x11", b"\x11\xde\x11\xde"):
        yield "DDF"
    if read(size - 1024, 32).startswith(b"Intel Raid ISM Cfg Sig. "):
        yield "Intel"


class UnprovenError(Exception):
    """It cannot be shown what of a disk is unused; its argument says why."""


def needed(read: Read, size: int) -> tuple[int, Table]:
    """The least size of a disk that leaves all that is on it whole, in bytes, and its partition table.

    Args:
        size: of the disk.

    Raises:
        UnprovenError: that cannot be shown.
    """
    if array := next(ends_of_arrays(read, size), None):
        raise UnprovenError(f"the disk is part of an array whose metadata is at its end ({array})")
    found = table(read)
    if found.wrong:
        raise UnprovenError(found.wrong)
    if not found.kind:
        return _whole(read, size), found
    for part in found.partitions:
        if not 0 < part.start < part.end <= size:
            raise UnprovenError(f"partition {part.number} is not within the disk")
        inside = filesystem(read, part.start)
        if inside is not None and inside.size is not None and part.start + inside.size > part.end:
            raise UnprovenError(f"the {inside.name} in partition {part.number} reaches beyond the end of the partition")
    end = max((part.end for part in found.partitions), default=0)
    if not end:
        raise UnprovenError("the partition table is empty, so that it does not say what is used")
    if found.gpt is None:
        _prove_unit(read, found)
    tail = found.gpt.tail if found.gpt is not None else 0
    _refuse_written(read, max(size - _MIB, end), size - tail, "the last MiB of the disk")
    return end + tail, found


def _prove_unit(read: Read, found: Table) -> None:
    """An MBR counts in sectors of the disk, which are 4096 bytes on some, and does not say which."""
    if not any(signatures(read, part.start) for part in found.partitions):
        raise UnprovenError("none of its partitions begins with something known, so that its sectors may have any size")
    if any(signatures(read, part.start * 8) for part in found.partitions):
        raise UnprovenError("its partitions may be counted in sectors of 4096 bytes")


def _refuse_written(read: Read, start: int, end: int, what: str) -> None:
    """Refuse where somebody has something there: DRBD, GEOM, ZFS and dm-verity keep their own behind the rest."""
    there = read(start, end - start) if start < end else b""
    if len(there) != max(end - start, 0) or there.strip(b"\0"):
        raise UnprovenError(f"{what} is not empty; where that is old data, overwrite it with zeros in the guest")


def _whole(read: Read, size: int) -> int:
    inside = filesystem(read, 0)
    if inside is None:
        raise UnprovenError("the disk has no partition table, and no filesystem that is known here, or several")
    if inside.size is None or not 0 < inside.size <= size:
        raise UnprovenError(f"the {inside.name} on the disk does not say where it ends")
    _refuse_written(read, inside.size, min(inside.size + _MIB, size), f"what follows the {inside.name}")
    _refuse_written(read, max(size - _MIB, inside.size), size, "the last MiB of the disk")
    return inside.size
