"""Clusters of a qcow2 image that are marked as used and that nothing refers to: leaked.

Layout: the qcow2 specification (qemu, docs/interop/qcow2.txt), "Host cluster management", "Cluster mapping",
"Snapshots", "Bitmaps". Two bytes are kept for each cluster of the file: 32 MiB for 1 TiB in clusters of 64 KiB. A file
of some kilobytes may claim to be larger than any memory, so there is a bound. Whatever does not fit together, the
answer is that it is not known: no guess is made.
"""

from __future__ import annotations

import os
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from storage_admin.agent.formats import Reader, UnreadableError, qcow2
from storage_admin.agent.formats.qcow2 import EXTENDED_L2, Header
from storage_admin.agent.measure.qcow2_map import COMPRESSED, OFFSET, TOO_MANY, big_endian

#: The most clusters that a file may have: 2 TiB in clusters of 64 KiB.
MAX_CLUSTERS = 1 << 25
#: Entries of a table that are read at once, and bytes of a refcount block.
_CHUNK = 8192
_PIECE = 32 * 1024
#: The largest directory that is read, in bytes.
_DIRECTORY_BYTES = 4 << 20
_NO_REFCOUNT = "a cluster in use has no refcount; check the image when no guest uses it"
#: A byte that is not zero, as 1.
_ANY = bytes([0]) + bytes([1]) * 255


class UnknownError(Exception):
    """It cannot be told; its argument is a sentence."""


@dataclass(frozen=True)
class Leaks:
    """How many clusters are leaked, ``None`` with a ``reason`` where that is not known.

    ``bitmaps_bytes`` is what persistent bitmaps take with their directory.
    """

    clusters: int | None
    bitmaps_bytes: int = 0
    reason: str = ""


def find_leaks(reader: Reader, header: Header, check: Callable[[], None], deadline: float | None = None) -> Leaks:
    """Look which clusters have a refcount and which are referred to; nothing is changed.

    A cluster that is referred to less often than its refcount says is no leak here: it is used. What a running guest's
    qemu has not written yet is not known either: some of its newest clusters may look leaked.

    Args:
        reader: of the image.
        header: parsed and found within its bounds.
        check: called now and then; raises to stop.
        deadline: on the monotonic clock; when it has passed the answer is that it is not known.
    """
    if reader.file_size >> header.cluster_bits >= MAX_CLUSTERS:
        return Leaks(None, reason=f"the file has more than {MAX_CLUSTERS} clusters, too many to keep count of each")
    used = Use(reader, header, check, deadline)
    bitmaps = 0
    try:
        bitmaps = used.refer_to_bitmaps()
        used.refer_to_everything_else()
        return Leaks(used.unreferred(), bitmaps)
    except UnknownError as unknown:
        return Leaks(None, bitmaps, str(unknown))
    except (UnreadableError, IndexError, struct.error):
        return Leaks(None, bitmaps, "the image's tables contradict each other; check the image when no guest uses it")


class Use:
    """The clusters of a file, by what refers to them."""

    def __init__(self, reader: Reader, header: Header, check: Callable[[], None], deadline: float | None) -> None:
        self._reader, self._header = reader, header
        self._check, self._deadline = check, deadline
        self._bits = header.cluster_bits
        self._size = 1 << header.cluster_bits
        clusters = -(-reader.file_size // self._size)
        self._plain, self._packed = bytearray(clusters), bytearray(clusters)
        self._extended = bool(header.incompatible & EXTENDED_L2)
        self._masks: dict[int, tuple[int, int]] = {}
        self._l1_bytes = 0

    def refer_to_everything_else(self) -> None:
        """The header, refcounts, snapshots, and every mapping with what it leads to."""
        header = self._header
        self.refer_to(0, self._size)
        self.refer_to(header.refcount_table_offset, header.refcount_table_clusters << self._bits)
        for offset in self._refcount_blocks():
            if offset:
                self.refer_to(offset, self._size)
        self.refer_to_mapping(header.l1_offset, header.l1_size)
        end = header.snapshots_offset
        for l1_offset, l1_size, entry_end in self.snapshots():
            self.refer_to_mapping(l1_offset, l1_size)
            end = entry_end
        self.refer_to(header.snapshots_offset, end - header.snapshots_offset)

    def refer_to_bitmaps(self) -> int:
        """The directory of persistent bitmaps, their tables and their data; how many bytes all of them take."""
        place = self._bitmaps_place()
        if place is None:
            return 0
        count, size, at = place
        clusters = self.refer_to(at, size)
        directory = self._reader.at(at, size, "the bitmap directory")
        offset = 0
        for _ in range(count):
            table_offset, entries, _, _, _, name, extra = qcow2.BITMAP.unpack_from(directory, offset)
            offset = (offset + qcow2.BITMAP.size + extra + name + 7) & ~7
            clusters += self.refer_to(table_offset, entries * 8)
            for chunk in self._words(table_offset, entries):
                for entry in chunk:
                    if entry & OFFSET:
                        clusters += self.refer_to(entry & OFFSET, self._size)
        return clusters * self._size

    def referred(self) -> int:
        """The clusters that something refers to, as a number with a byte for each: 1, or 0."""
        return int.from_bytes(self._plain, "big") | int.from_bytes(self._packed, "big")

    def unreferred(self) -> int:
        """How many clusters have a refcount and nothing that refers to them."""
        leaked = at = 0
        for counted in self._counted():
            leaked += self._unreferred_of(at, counted)
            at += len(counted)
        if self._plain.find(1, at) >= 0 or self._packed.find(1, at) >= 0:
            raise UnknownError(_NO_REFCOUNT)
        return leaked

    def _unreferred_of(self, at: int, counted: bytes) -> int:
        """The same of a row of clusters, each with a byte that says whether its refcount is above zero."""
        end = at + len(counted)
        plain, packed = (int.from_bytes(refers[at:end], "big") for refers in (self._plain, self._packed))
        if plain & packed:
            raise UnknownError("a cluster is used for two things; check the image when no guest uses it")
        have = int.from_bytes(counted, "big")
        if (plain | packed) & ~have:
            raise UnknownError(_NO_REFCOUNT)
        return bin(have & ~(plain | packed)).count("1")

    def _counted(self) -> Iterator[bytes]:
        """For each cluster of the file a byte: whether its refcount is above zero; in rows of some thousands."""
        left, order = len(self._plain), self._header.refcount_order
        for offset in self._refcount_blocks():
            for start in range(0, self._size, _PIECE):
                if not left:
                    return
                length = min(_PIECE, self._size - start)
                if offset:
                    counted = _nonzero(self._reader.at(offset + start, length, "a refcount block"), order)[:left]
                else:
                    counted = bytes(min(length * 8 >> order, left))
                left -= len(counted)
                yield counted
            self._pause()

    def _refcount_blocks(self) -> Iterator[int]:
        entries = self._header.refcount_table_clusters << self._bits >> 3
        for chunk in self._words(self._header.refcount_table_offset, entries):
            for entry in chunk:
                if entry % self._size:
                    raise UnknownError(
                        "a refcount block does not start at a cluster; check the image when no guest uses it"
                    )
                yield entry

    def refer_to_mapping(self, l1_offset: int, l1_size: int) -> None:
        """An L1 table, its L2 tables, and the clusters that these refer to."""
        self._l1_bytes += l1_size * 8
        if self._l1_bytes > self._reader.file_size:
            raise UnknownError("the L1 tables take more than the whole file; check the image when no guest uses it")
        self.refer_to(l1_offset, l1_size * 8)
        for chunk in self._words(l1_offset, l1_size):
            for entry in chunk:
                offset = entry & OFFSET
                # A table that a snapshot shares was read before.
                if offset and not self._plain[offset >> self._bits]:
                    self.refer_to(offset, self._size)
                    self._table(self._reader.at(offset, self._size, "an L2 table"))
                    self._pause()

    def _table(self, raw: bytes) -> None:
        if self._extended:
            raw = array("Q", array("Q", raw)[::2]).tobytes()  # every other word is a bitmap of subclusters
        if any(first & 0x40 for first in set(raw[::8])):
            self._mixed_table(big_endian(raw))
            return
        offsets, within = self._mask(len(raw) // 8)
        table = int.from_bytes(raw, "big") & offsets
        if table & within:
            raise UnknownError("a data cluster does not start at a cluster; check the image when no guest uses it")
        plain = self._plain
        # All entries at once: each is a lane of 64 bits whose low bits are zero, so that no lane spills into the next.
        for number in big_endian((table >> self._bits).to_bytes(len(raw), "big")):
            plain[number] = 1

    def _mixed_table(self, entries: array[int]) -> None:
        shift = 62 - (self._bits - 8)
        place, packed = (1 << shift) - 1, self._packed
        for entry in entries:
            if entry & COMPRESSED:
                offset = entry & place
                end = (offset & ~511) + (((entry & (COMPRESSED - 1)) >> shift) + 1) * 512
                # The last sector may lie behind the end of a file that was not filled up to it.
                for number in range(offset >> self._bits, min((end - 1) >> self._bits, len(packed) - 1) + 1):
                    packed[number] = 1
                packed[offset >> self._bits] = 1
            elif entry & OFFSET:
                self.refer_to(entry & OFFSET, self._size)

    def _mask(self, words: int) -> tuple[int, int]:
        if words not in self._masks:
            within = struct.pack(">Q", (self._size - 1) & OFFSET)
            self._masks[words] = (
                int.from_bytes(struct.pack(">Q", OFFSET) * words, "big"),
                int.from_bytes(within * words, "big"),
            )
        return self._masks[words]

    def refer_to(self, offset: int, length: int) -> int:
        """Refer to what lies there; how many clusters that are."""
        if offset % self._size:
            raise UnknownError("a table or cluster does not start at a cluster; check the image when no guest uses it")
        first, end = offset >> self._bits, -(-(offset + length) >> self._bits)
        if end > len(self._plain):
            raise IndexError("it is outside the file")
        self._plain[first:end] = b"\1" * (end - first)
        return end - first

    def _words(self, offset: int, count: int) -> Iterator[array[int]]:
        if offset + count * 8 > self._reader.file_size:
            raise UnknownError("a table is outside the file; check the image when no guest uses it")
        for start in range(0, count, _CHUNK):
            yield big_endian(os.pread(self._reader.fd, min(_CHUNK, count - start) * 8, offset + start * 8))
            self._pause()

    def snapshots(self) -> Iterator[tuple[int, int, int]]:
        """Place and entries of each snapshot's L1 table, and where its own entry ends."""
        at = self._header.snapshots_offset
        for _ in range(self._header.snapshots_count):
            l1_offset, l1_size, id_size, name_size, _, _, _, _, extra = qcow2.SNAPSHOT.unpack(
                self._reader.at(at, qcow2.SNAPSHOT.size, "the snapshot table")
            )
            at = (at + qcow2.SNAPSHOT.size + extra + id_size + name_size + 7) & ~7
            yield l1_offset, l1_size, at
            self._pause()

    def _bitmaps_place(self) -> tuple[int, int, int] | None:
        """Count, size and offset of the bitmap directory; also one that no longer holds takes its clusters."""
        for magic, offset, _ in qcow2.walk_extensions(self._reader, self._header) if self._header.version >= 3 else ():
            if magic == qcow2.EXT_LUKS:
                raise UnknownError("the image is encrypted")
            if magic == qcow2.EXT_BITMAPS:
                count, _, size, at = qcow2.BITMAPS.unpack(
                    self._reader.at(offset, qcow2.BITMAPS.size, "the bitmaps extension")
                )
                if size > _DIRECTORY_BYTES:
                    raise UnknownError("the bitmap directory is beyond the bounds")
                return count, size, at
        return None

    def _pause(self) -> None:
        self._check()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise UnknownError(TOO_MANY)


def _nonzero(block: bytes, order: int) -> bytes:
    """One byte for each refcount of a block, 1 where it is above zero. ``order``: of two, how many bits one has."""
    if order < 3:
        width = 1 << order
        spread = [
            bytes([value >> bit & ((1 << width) - 1) for bit in range(0, 8, width)]).translate(_ANY)
            for value in range(256)
        ]
        return b"".join([spread[value] for value in block])
    width = 1 << (order - 3)
    if width == 1:
        return block.translate(_ANY)
    lanes = 0
    for byte in range(width):
        lanes |= int.from_bytes(block[byte::width], "big")
    return lanes.to_bytes(len(block) // width, "big").translate(_ANY)
