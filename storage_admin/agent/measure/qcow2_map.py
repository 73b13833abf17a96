"""Which clusters of a qcow2 image hold data, read from its L1 and L2 tables in memory that does not grow with them.

Layout: the qcow2 specification (qemu, docs/interop/qcow2.txt), "L1 table", "L2 table", "Extended L2 entries".
"""

from __future__ import annotations

import os
import struct
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

from storage_admin.agent.formats.qcow2 import EXTENDED_L2, Header
from storage_admin.agent.measure.file_data import DataMap
from storage_admin.agent.protocol import HostError, RefusedError

OFFSET = 0x00FFFFFFFFFFFE00
COMPRESSED = 1 << 62
_ZERO = 1
_SUBCLUSTERS = 0xFFFFFFFF
TOO_MANY = "the image has too many tables for a sample; analyze it fully"
#: L1 entries that are read at once.
_L1_CHUNK = 8192


@dataclass(frozen=True)
class Counts:
    """What the tables say, in clusters; ``compressed_bytes`` is what compressed ones take, as well as it is known.

    ``partial`` of the ``data`` ones have subclusters that are not there.
    """

    data: int
    zero: int
    zero_allocated: int
    compressed: int
    compressed_bytes: int
    l2_tables: int
    partial: int = 0


_EMPTY = Counts(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Cluster:
    """A data cluster: its number as the guest counts, its place in the file, and which of its 32 subclusters are there.

    All are, for the plain kind.
    """

    number: int
    offset: int
    subclusters: int


@dataclass(frozen=True)
class Packed:
    """A compressed cluster: its place in the file, and how many bytes from there on hold it and more."""

    number: int
    offset: int
    length: int


class Map:
    """The tables of one image.

    Args:
        fd: descriptor of the image, open for reading.
        file_size: in bytes.
        header: parsed and found within its bounds.
        check: called now and then; raises to stop.
        deadline: on the monotonic clock, for what goes through all tables. A file of some megabytes may name terabytes
            of tables in its holes.
    """

    def __init__(
        self, fd: int, file_size: int, header: Header, check: Callable[[], None], deadline: float | None = None
    ) -> None:
        self._fd = fd
        self._file_size = file_size
        self._header = header
        self._check, self._deadline = check, deadline
        self.cluster_size = 1 << header.cluster_bits
        self._extended = bool(header.incompatible & EXTENDED_L2)
        self._entry_bytes = 16 if self._extended else 8
        self._entries = self.cluster_size // self._entry_bytes
        #: Tables that anything is found through: their place, the number of the first cluster, what is in them.
        self._tables, self._firsts = array("Q"), array("Q")
        self._data_counts, self._packed_counts = array("I"), array("I")
        self._places: array[int] | None = None
        self._at_hand = -1, b""

    def count(self) -> Counts:
        """Read every L2 table once.

        Raises:
            RefusedError: ``dirty_or_corrupt``, where a table lies outside the file or tables take more than the file.
            HostError: the deadline has passed.
        """
        totals = [0] * 7
        for read, (place, offset) in enumerate(self._l2_offsets(), 1):
            table = self._count_table(os.pread(self._fd, self.cluster_size, offset))
            totals = [total + more for total, more in zip(totals, astuple(table))]
            if table.data or table.compressed:
                self._tables.append(offset)
                self._firsts.append(place * self._entries)
                self._data_counts.append(table.data)
                self._packed_counts.append(table.compressed)
            if read % 16 == 0:
                self._look()
        return Counts(*totals)

    def in_order_of_creation(self) -> bool:
        """Whether clusters stand one behind the other as the guest counts them, as a preallocation lays them.

        Only tables are between them: a few breaks for each. Call it after :meth:`count`.
        """
        breaks, most, size, expected = 0, 4 * len(self._tables) + 16, self.cluster_size, 0
        for offset in self._tables:
            self._check()
            words = self._entries_of(os.pread(self._fd, size, offset))
            first, end = words[0], words[0] + len(words) * size
            if first & OFFSET and words[-1] == end - size and words == array("Q", range(first, end, size)):
                breaks += first & OFFSET != expected
                expected = end & OFFSET
                continue
            for entry in words:
                place = entry & OFFSET
                if place:
                    breaks += place != expected
                    expected = place + size
            if breaks > most:
                return False
        return True

    def covered(self) -> Iterator[tuple[int, int]]:
        """Start and length of each stretch of the guest's bytes that the image has by itself, as data or as zeros.

        Raises:
            RefusedError, HostError: as :meth:`count`.
        """
        entries, piece = self._entries, self.cluster_size // (32 if self._extended else 1)
        start = end = 0
        for table, offset in self._l2_offsets():
            raw = os.pread(self._fd, self.cluster_size, offset)
            self._look()
            first, whole = table * entries * self.cluster_size, not self._extended and raw[::8].count(0x80) == entries
            if whole:  # data alone, as in most tables that are not empty
                runs: Iterable[tuple[int, int]] = [(0, entries)]
            else:
                runs = ((number, 1) for number in self._covered_pieces(big_endian(raw))) if raw.strip(b"\0") else ()
            for number, count in runs:
                at = first + number * piece
                if at != end:
                    if end > start:
                        yield start, end - start
                    start = at
                end = at + count * piece
        if end > start:
            yield start, end - start

    def _look(self) -> None:
        self._check()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise HostError(TOO_MANY)

    def _covered_pieces(self, words: array[int]) -> Iterator[int]:
        """Numbers of the clusters of a table that are there, or of their 32 parts."""
        if not self._extended:
            yield from (number for number, entry in enumerate(words) if entry & (OFFSET | COMPRESSED | _ZERO))
            return
        for cluster, (entry, bitmap) in enumerate(zip(words[::2], words[1::2])):
            parts = _SUBCLUSTERS if entry & COMPRESSED else (bitmap | bitmap >> 32) & _SUBCLUSTERS
            yield from (cluster * 32 + part for part in range(32) if parts >> part & 1)

    def bytes_in(self, data: DataMap, start: int, length: int) -> int:
        """What the file stores of the clusters that lie as a whole in a stretch of the guest's bytes.

        Args:
            data: of the file: a cluster may be a hole, or one in part.
            start, length: of the stretch; the last cluster may go beyond the virtual size.

        Raises:
            RefusedError, HostError: as :meth:`count`.
        """
        size, found = self.cluster_size, 0
        first, end = -(-start // size), (start + length) // size
        if start + length >= self._header.size:
            end = max(end, -(-self._header.size // size))
        while first < end:
            table, index = divmod(first, self._entries)
            count = min(end - first, self._entries - index)
            at = held = 0
            for entry in self._entries_of(self._table(table))[index : index + count]:
                if entry & COMPRESSED:
                    found += self._compressed_bytes([entry])
                elif place := entry & OFFSET:
                    if place != at + held:
                        found += data.bytes_in(at, held)
                        at, held = place, 0
                    held += size
            found += data.bytes_in(at, held)
            first += count
        return found

    def _table(self, number: int) -> bytes:
        """An L2 table by its number in the L1 table; empty where there is none. The last one is at hand."""
        self._look()
        if self._places is None:
            self._places = array("Q", bytes(8 * self._header.l1_size))
            for known, offset in self._l2_offsets():
                self._places[known] = offset
        if self._at_hand[0] != number:
            place = self._places[number] if number < len(self._places) else 0
            self._at_hand = number, os.pread(self._fd, self.cluster_size, place) if place else b""
        return self._at_hand[1]

    def _count_table(self, raw: bytes) -> Counts:
        if not raw.strip(b"\0"):
            return _EMPTY
        words = big_endian(raw)
        if not self._extended:
            # Most tables hold nothing but data that this image alone refers to (first byte 0x80, last one 0) and gaps.
            first, last = raw[::8], raw[7::8]
            data, gaps = first.count(0x80), first.count(0)
            if data + gaps == len(words) and not last.strip(b"\0") and (not gaps or words.count(0) == gaps):
                return Counts(data, 0, 0, 0, 0, 1)
        entries = words[::2] if self._extended else words
        compressed = [entry for entry in entries if entry & COMPRESSED]
        partial = 0
        if self._extended:
            plain = [(e, b) for e, b in zip(entries, words[1::2]) if not e & COMPRESSED]
            zeros = [entry for entry, bitmap in plain if bitmap >> 32 and not bitmap & _SUBCLUSTERS]
            kept = [entry for entry, bitmap in plain if entry & OFFSET and not bitmap & _SUBCLUSTERS]
            partial = sum(1 for entry, b in plain if entry & OFFSET and 0 < b & _SUBCLUSTERS < _SUBCLUSTERS)
        else:
            zeros = [entry for entry in entries if entry & (_ZERO | COMPRESSED) == _ZERO]
            kept = [entry for entry in zeros if entry & OFFSET]
        return Counts(
            data=len(self._data_indexes(raw)),
            zero=len(zeros),
            zero_allocated=len(kept),
            compressed=len(compressed),
            compressed_bytes=self._compressed_bytes(compressed),
            l2_tables=1,
            partial=partial,
        )

    def clusters(self, ordinals: Sequence[int]) -> Iterator[Cluster]:
        """The data clusters with these numbers, counted over all tables.

        Args:
            ordinals: ascending, each below ``Counts.data``.
        """
        for raw, first, index in self._located(ordinals, self._data_counts, self._data_indexes):
            yield self._cluster(raw, first, index)

    def packed(self, ordinals: Sequence[int]) -> Iterator[Packed]:
        """The compressed clusters with these numbers, counted over all tables.

        Args:
            ordinals: ascending, each below ``Counts.compressed``.
        """
        shift = 62 - (self._header.cluster_bits - 8)
        for raw, first, index in self._located(ordinals, self._packed_counts, self._packed_indexes):
            (entry,) = struct.unpack_from(">Q", raw, index * self._entry_bytes)
            offset = entry & ((1 << shift) - 1)
            sectors = ((entry & (COMPRESSED - 1)) >> shift) + 1
            yield Packed(first + index, offset, sectors * 512 - (offset & 511))

    def _located(
        self, ordinals: Sequence[int], counts: array[int], indexes: Callable[[bytes], Sequence[int]]
    ) -> Iterator[tuple[bytes, int, int]]:
        """Tables, the number of their first cluster, and which of their entries are wanted."""
        before, table, wanted = 0, 0, 0
        while wanted < len(ordinals):
            while ordinals[wanted] >= before + counts[table]:
                before += counts[table]
                table += 1
            raw = os.pread(self._fd, self.cluster_size, self._tables[table])
            found = indexes(raw)
            while wanted < len(ordinals) and ordinals[wanted] < before + counts[table]:
                # A guest that writes meanwhile changes tables: what is gone is not looked at.
                if ordinals[wanted] - before < len(found):
                    yield raw, self._firsts[table], found[ordinals[wanted] - before]
                wanted += 1
            self._check()

    def _l2_offsets(self) -> Iterator[tuple[int, int]]:
        """Number in the L1 table, and place in the file."""
        tables = 0
        for start in range(0, self._header.l1_size, _L1_CHUNK):
            length = min(_L1_CHUNK, self._header.l1_size - start) * 8
            table = os.pread(self._fd, length, self._header.l1_offset + start * 8)
            for number, entry in enumerate(big_endian(table), start):
                if entry:
                    offset = entry & OFFSET
                    if offset % self.cluster_size or not offset or offset >= self._file_size:
                        raise RefusedError("dirty_or_corrupt", "an L2 table is outside the file; check the image")
                    tables += 1
                    if tables * self.cluster_size > self._file_size:
                        why = "the L2 tables take more than the whole file; check the image"
                        raise RefusedError("dirty_or_corrupt", why)
                    yield number, offset
            self._check()

    def _data_indexes(self, raw: bytes) -> Sequence[int]:
        """Which entries of a table stand for data, by their number."""
        words = big_endian(raw)
        if self._extended:
            return [
                index
                for index, (entry, bitmap) in enumerate(zip(words[::2], words[1::2]))
                if entry & OFFSET and not entry & COMPRESSED and bitmap & _SUBCLUSTERS
            ]
        if raw[::8].count(0x80) == len(words) and not raw[7::8].strip(b"\0"):
            return range(len(words))
        return [
            index for index, entry in enumerate(words) if entry and entry & OFFSET and not entry & (COMPRESSED | _ZERO)
        ]

    def _packed_indexes(self, raw: bytes) -> Sequence[int]:
        """Which entries of a table stand for compressed clusters, by their number."""
        return [index for index, entry in enumerate(self._entries_of(raw)) if entry & COMPRESSED]

    def _cluster(self, raw: bytes, first: int, index: int) -> Cluster:
        if self._extended:
            entry, bitmap = struct.unpack_from(">QQ", raw, index * 16)
            return Cluster(first + index, entry & OFFSET, bitmap & _SUBCLUSTERS)
        (entry,) = struct.unpack_from(">Q", raw, index * 8)
        return Cluster(first + index, entry & OFFSET, _SUBCLUSTERS)

    def _entries_of(self, raw: bytes) -> array[int]:
        """The entries of a table, without the bitmaps of their subclusters."""
        words = big_endian(raw)
        return words[::2] if self._extended else words

    def _compressed_bytes(self, entries: list[int]) -> int:
        """What compressed clusters take. A descriptor counts sectors; where the next one starts tells the rest."""
        shift = 62 - (self._header.cluster_bits - 8)
        place = (1 << shift) - 1
        total = 0
        for entry, following in zip(entries, [*entries[1:], 0]):
            sectors = ((entry & (COMPRESSED - 1)) >> shift) + 1
            most = sectors * 512 - (entry & 511)
            distance = (following & place) - (entry & place)
            if max(most - 512, 0) < distance <= most:
                total += distance
            else:
                total += most // 2 if sectors == 1 else most - 256  # on average the last sector is half full
        return total


def big_endian(raw: bytes) -> array[int]:
    """The 64-bit words of a table; what is left over at its end is no word."""
    words = array("Q", raw[: len(raw) // 8 * 8])
    if sys.byteorder == "little":
        words.byteswap()
    return words
