"""Which clusters of a qcow2 image hold data, read from its L1 and L2 tables in memory that does not grow with them.

Layout: the qcow2 specification (qemu, docs/interop/qcow2.txt), "L1 table", "L2 table", "Extended L2 entries".
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from storage_admin.agent.formats.qcow2 import EXTENDED_L2, Header
from storage_admin.agent.protocol import RefusedError

_OFFSET = 0x00FFFFFFFFFFFE00
_COMPRESSED = 1 << 62
_ZERO = 1
_SUBCLUSTERS = 0xFFFFFFFF
#: L1 entries that are read at once.
_L1_CHUNK = 8192


@dataclass(frozen=True)
class Counts:
    """What the tables say, in clusters; ``compressed_bytes`` is what compressed ones take, as well as it is known."""

    data: int
    zero: int
    zero_allocated: int
    compressed: int
    compressed_bytes: int
    l2_tables: int


_EMPTY = Counts(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Cluster:
    """A data cluster: its place in the file, and which of its 32 subclusters are there (all, for the plain kind)."""

    offset: int
    subclusters: int


class Map:
    """The tables of one image.

    Args:
        fd: descriptor of the image, open for reading.
        file_size: in bytes.
        header: parsed and found within its bounds.
        check: called now and then; raises to stop.
    """

    def __init__(self, fd: int, file_size: int, header: Header, check: Callable[[], None]) -> None:
        self._fd = fd
        self._file_size = file_size
        self._header = header
        self._check = check
        self.cluster_size = 1 << header.cluster_bits
        self._extended = bool(header.incompatible & EXTENDED_L2)
        self._tables = array("Q")
        self._data_counts = array("I")

    def count(self) -> Counts:
        """Read every L2 table once.

        Raises:
            RefusedError: ``dirty_or_corrupt``, where a table lies outside the file or tables take more than the file.
        """
        data = zero = zero_allocated = compressed = compressed_bytes = used_tables = 0
        for read, offset in enumerate(self._l2_offsets(), 1):
            if read * self.cluster_size > self._file_size:
                raise RefusedError("dirty_or_corrupt", "the L2 tables take more than the whole file; check the image")
            table = self._count_table(os.pread(self._fd, self.cluster_size, offset))
            data += table.data
            zero += table.zero
            zero_allocated += table.zero_allocated
            compressed += table.compressed
            compressed_bytes += table.compressed_bytes
            used_tables += table.l2_tables
            if table.data:
                self._tables.append(offset)
                self._data_counts.append(table.data)
            if read % 16 == 0:
                self._check()
        return Counts(data, zero, zero_allocated, compressed, compressed_bytes, used_tables)

    def _count_table(self, raw: bytes) -> Counts:
        if not raw.strip(b"\0"):
            return _EMPTY
        words = _big_endian(raw)
        if not self._extended:
            # Most tables hold nothing but data that this image alone refers to (first byte 0x80, last one 0) and gaps.
            first, last = raw[::8], raw[7::8]
            data, gaps = first.count(0x80), first.count(0)
            if data + gaps == len(words) and not last.strip(b"\0") and (not gaps or words.count(0) == gaps):
                return Counts(data, 0, 0, 0, 0, 1)
        entries = words[::2] if self._extended else words
        compressed = [entry for entry in entries if entry & _COMPRESSED]
        zeros = [] if self._extended else [e for e in entries if e & (_ZERO | _COMPRESSED) == _ZERO]
        return Counts(
            data=len(self._data_indexes(raw)),
            zero=len(zeros),
            zero_allocated=sum(1 for entry in zeros if entry & _OFFSET),
            compressed=len(compressed),
            compressed_bytes=self._compressed_bytes(compressed),
            l2_tables=1,
        )

    def clusters(self, ordinals: list[int]) -> Iterator[Cluster]:
        """The data clusters with these numbers, counted over all tables.

        Args:
            ordinals: ascending, each below ``Counts.data``.
        """
        before, table, wanted = 0, 0, 0
        while wanted < len(ordinals):
            while ordinals[wanted] >= before + self._data_counts[table]:
                before += self._data_counts[table]
                table += 1
            raw = os.pread(self._fd, self.cluster_size, self._tables[table])
            found = self._data_indexes(raw)
            while wanted < len(ordinals) and ordinals[wanted] < before + self._data_counts[table]:
                # A guest that writes meanwhile changes tables: what is gone is not looked at.
                if ordinals[wanted] - before < len(found):
                    yield self._cluster(raw, found[ordinals[wanted] - before])
                wanted += 1
            self._check()

    def _l2_offsets(self) -> Iterator[int]:
        for start in range(0, self._header.l1_size, _L1_CHUNK):
            length = min(_L1_CHUNK, self._header.l1_size - start) * 8
            for entry in _big_endian(os.pread(self._fd, length, self._header.l1_offset + start * 8)):
                if entry:
                    offset = entry & _OFFSET
                    if offset % self.cluster_size or not offset or offset >= self._file_size:
                        raise RefusedError("dirty_or_corrupt", "an L2 table lies outside the file; check the image")
                    yield offset
            self._check()

    def _data_indexes(self, raw: bytes) -> Sequence[int]:
        """Which entries of a table stand for data, by their number."""
        words = _big_endian(raw)
        if self._extended:
            return [
                index
                for index, (entry, bitmap) in enumerate(zip(words[::2], words[1::2]))
                if entry & _OFFSET and not entry & _COMPRESSED and bitmap & _SUBCLUSTERS
            ]
        if raw[::8].count(0x80) == len(words) and not raw[7::8].strip(b"\0"):
            return range(len(words))
        return [
            index
            for index, entry in enumerate(words)
            if entry and entry & _OFFSET and not entry & (_COMPRESSED | _ZERO)
        ]

    def _cluster(self, raw: bytes, index: int) -> Cluster:
        if self._extended:
            entry, bitmap = struct.unpack_from(">QQ", raw, index * 16)
            return Cluster(entry & _OFFSET, bitmap & _SUBCLUSTERS)
        (entry,) = struct.unpack_from(">Q", raw, index * 8)
        return Cluster(entry & _OFFSET, _SUBCLUSTERS)

    def _compressed_bytes(self, entries: list[int]) -> int:
        """What compressed clusters take. A descriptor counts sectors; where the next one starts tells the rest."""
        shift = 62 - (self._header.cluster_bits - 8)
        place = (1 << shift) - 1
        total = 0
        for entry, following in zip(entries, [*entries[1:], 0]):
            sectors = ((entry & (_COMPRESSED - 1)) >> shift) + 1
            most = sectors * 512 - (entry & 511)
            distance = (following & place) - (entry & place)
            if max(most - 512, 0) < distance <= most:
                total += distance
            else:
                total += most // 2 if sectors == 1 else most - 256  # on average the last sector is half full
        return total


def _big_endian(raw: bytes) -> array[int]:
    words = array("Q", raw[: len(raw) // 8 * 8])
    if sys.byteorder == "little":
        words.byteswap()
    return words
