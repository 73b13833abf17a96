"""A qcow2 image's own clusters, looked at one by one: zeros, and how small each would be compressed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Optional

from storage_admin.agent.measure.compressors import Sizers, inflate
from storage_admin.agent.measure.file_data import DataMap
from storage_admin.agent.measure.qcow2_map import Cluster, Counts, Map, Packed
from storage_admin.agent.measure.sampling import BLOCK, MAX_PIECE, Pace, Sample, is_zeros, zero_runs

#: Clusters below this many bytes are sampled in pairs: what one costs depends on its neighbour.
PAIRED = 16 * 1024
_ALL = 0xFFFFFFFF
#: Bytes that are handed to another processor at once.
_HANDFUL = 512 * 1024
_MOST_AT_ONCE = 4
#: Of the time for plain clusters and compressed ones, what the latter get where there are both.
_PACKED_SHARE = 0.3

#: A piece to measure: its number as the guest counts clusters, its bytes, whether a copy keeps it even where it is
#: zeros, and the one that follows it.
Piece = tuple[int, bytes, bool, Optional[bytes]]


@dataclass(frozen=True)
class Measured:
    """One piece: whether it is zeros, bytes that a copy keeps, its sizes and those of the one that follows."""

    number: int
    zero: bool
    kept: int
    sizes: dict[str, int]
    following: dict[str, int]


@dataclass
class Sums:
    """What was found in clusters of one kind, by the name of the compression where it depends on that.

    ``stored`` are the compressed sizes, ``rounded`` those in whole blocks, ``plain`` counts what does not compress, and
    ``breaks`` what compresses and is followed by what does not.

    Args:
        population: how many pieces there are.
        piece: bytes of each.
        in_order: every piece is looked at, one after the other.
    """

    population: int
    piece: int
    in_order: bool = False
    stored: dict[str, Sample] = field(default_factory=dict)
    rounded: dict[str, Sample] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.zeros = Sample(self.population, 1)
        self.kept = Sample(self.population, self.piece)
        self._zero_blocks: tuple[int, int, bool] = (-1, 0, False)
        self._before: dict[str, int] = {}
        #: Clusters of zeros that share a block of 4 KiB with others that are none: a copy writes these, too.
        self.dragged = 0

    def add(self, found: Measured) -> None:
        """Take in one more piece."""
        self.zeros.add(found.zero)
        self.kept.add(found.kept)
        for name, size in found.sizes.items():
            self.stored.setdefault(name, Sample(self.population, self.piece)).add(size)
            self.plain[name] = self.plain.get(name, 0) + (size == self.piece)
            grain = min(BLOCK, self.piece)
            self.rounded.setdefault(name, Sample(self.population, self.piece)).add(size + -size % grain)
            self.breaks[name] = self.breaks.get(name, 0) + self._breaks_off(found, name)
        if self.piece < BLOCK:
            self._drag(found)

    def add_zeros(self, count: int, names: Iterable[str]) -> None:
        """Take in pieces of zeros that need not be measured."""
        self.zeros.add(1, count)
        self.kept.add(0, count)
        for name in names:
            for sizes in (self.stored, self.rounded):
                sizes.setdefault(name, Sample(self.population, self.piece)).add(0, count)

    def _breaks_off(self, found: Measured, name: str) -> bool:
        """Whether a row of compressed clusters ends with this piece, or in order, before it."""
        size, before = found.sizes[name], self._before.get(name, 0)
        if not self.in_order:
            return 0 < size < self.piece and found.following.get(name) == self.piece
        self._before[name] = size or before
        return size == self.piece and 0 < before < self.piece

    def _drag(self, found: Measured) -> None:
        block = found.number * self.piece // BLOCK
        last, zeros, data = self._zero_blocks
        if block != last:
            zeros, data = 0, False
        elif data:
            self.dragged -= zeros
        zeros, data = zeros + found.zero, data or not found.zero
        self.dragged += zeros if data else 0
        self._zero_blocks = (block, zeros, data)

    def share(self, counts: dict[str, int], name: str) -> float:
        """Of the pieces looked at, the share that was counted so."""
        return counts.get(name, 0) / self.zeros.drawn if self.zeros.drawn else 0.0


class Tally:
    """Everything that is measured on an image's clusters.

    Args:
        fd: descriptor of the image.
        tables: of the image, counted.
        counts: what they say.
        data: where the file has data.
        sizers: the compressions to measure.
        compression: that its compressed clusters have.
        extended: whether its clusters have subclusters.
    """

    def __init__(
        self, fd: int, tables: Map, counts: Counts, data: DataMap, sizers: Sizers, compression: str, *, extended: bool
    ) -> None:
        self._fd, self._tables, self._counts, self._data = fd, tables, counts, data
        self._sizers, self._compression = sizers, compression
        self._size = tables.cluster_size
        self._unit = max(BLOCK, self._size // 32) if extended else self._size
        self.plain = Sums(0, self._size)
        self.packed = Sums(counts.compressed, self._size)
        #: Bytes that the compressed clusters which were looked at take now.
        self.packed_bytes = 0
        #: Compressed clusters that could not be unpacked.
        self.unreadable = 0
        self._holes = 0

    def look(self, pace: Pace) -> None:
        """Read as many clusters as ``pace`` wants.

        Raises:
            StoppedError: the controller stopped the work.
        """
        piece = self._size if pace.whole else min(self._size, MAX_PIECE)
        self.plain = Sums(self._counts.data * (self._size // piece), piece, pace.whole)
        both = self._counts.data and self._counts.compressed
        packed_share = _PACKED_SHARE if both else 1.0
        wanted = pace.looked_at(self.plain.population) * piece
        wanted += pace.looked_at(self.packed.population) * self._size
        done, at_once = 0, min(_MOST_AT_ONCE, os.cpu_count() or 1) if pace.whole else 1
        for sums, pieces in (
            (self.plain, self._plain_pieces(piece, pace.share(1 - packed_share if both else 1.0))),
            (self.packed, self._packed_pieces(pace.share(packed_share))),
        ):
            for found in _in_parallel(pieces, self._measure, at_once):
                sums.add(found)
                done += sums.piece
                pace.tell("reading", done + self._holes * self._size, wanted)
        self.plain.add_zeros(self._holes, self._sizers)

    def _plain_pieces(self, piece: int, pace: Pace) -> Iterator[Piece]:
        each = self._size // piece
        pairs = self._size < PAIRED and not pace.whole
        last = self._counts.data - 1
        for drawn in pace.drawn(self.plain.population):
            if pace.whole:
                yield from self._whole_clusters(drawn)
                continue
            ordinals = [number // each for number in drawn]
            if pairs:
                ordinals = [near for ordinal in ordinals for near in (ordinal, min(ordinal + 1, last))]
            places, clusters = iter(drawn), self._tables.clusters(ordinals)
            for cluster in clusters:
                at = next(places, 0) % each * piece
                follower = next(clusters, None) if pairs else None
                content = self._read(cluster, at, piece)
                # A piece of zeros in a cluster that holds something is copied with it.
                kept = piece < self._unit and is_zeros(content) and not is_zeros(self._read(cluster, 0, self._size))
                yield cluster.number, content, kept, None if follower is None else self._read(follower, 0, piece)

    def _whole_clusters(self, drawn: Sequence[int]) -> Iterator[Piece]:
        for cluster in self._tables.clusters(drawn):
            if self._size >= BLOCK and not self._data.any_in(cluster.offset, self._size):
                self._holes += 1  # of an image that was set aside and not written, millions
            else:
                yield cluster.number, self._read(cluster, 0, self._size), False, None

    def _packed_pieces(self, pace: Pace) -> Iterator[Piece]:
        for drawn in pace.drawn(self._counts.compressed):
            for cluster in self._tables.packed(drawn):
                yield cluster.number, self._unpack(cluster), False, None

    def _unpack(self, cluster: Packed) -> bytes:
        unpacked = inflate(os.pread(self._fd, cluster.length, cluster.offset), self._size, self._compression)
        if unpacked is None:
            # A guest has put something else there meanwhile, or it is damaged: it may become as large as a cluster can.
            self.unreadable += 1
            self.packed_bytes += cluster.length
            return os.urandom(self._size)
        self.packed_bytes += unpacked[1]
        return unpacked[0]

    def _read(self, cluster: Cluster, start: int, length: int) -> bytes:
        if not self._data.any_in(cluster.offset + start, length):
            return bytes(length)
        piece = os.pread(self._fd, length, cluster.offset + start)
        piece += bytes(length - len(piece))
        if cluster.subclusters == _ALL:
            return piece
        # What a subcluster that is not there would read as does not count as this layer's data.
        step = self._size // 32
        parts = [
            piece[at : at + step] if cluster.subclusters >> ((start + at) // step) & 1 else bytes(step)
            for at in range(0, length, step)
        ]
        return b"".join(parts)

    def _measure(self, piece: Piece) -> Measured:
        number, content, kept_anyway, following = piece
        zero = is_zeros(content)
        return Measured(
            number,
            zero,
            len(content) if kept_anyway else 0 if zero else _kept(content, self._unit),
            {name: 0 if zero else measure(content) for name, measure in self._sizers.items()},
            {} if following is None else {name: measure(following) for name, measure in self._sizers.items()},
        )


def _kept(content: bytes, unit: int) -> int:
    """Bytes that a copy keeps of a piece that is not all zeros."""
    if unit >= len(content):
        return len(content)
    if unit == BLOCK:
        return len(content) - zero_runs(content)[0]
    return unit * sum(1 for at in range(0, len(content), unit) if not is_zeros(content[at : at + unit]))


def _in_parallel(pieces: Iterable[Piece], measure: Callable[[Piece], Measured], at_once: int) -> Iterator[Measured]:
    """Measure pieces on several processors, in their order: both libraries work outside the interpreter's lock."""
    if at_once == 1:
        yield from map(measure, pieces)
        return
    waiting: deque[Future[list[Measured]]] = deque()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for handful in _handfuls(pieces):
                waiting.append(pool.submit(lambda some: [measure(piece) for piece in some], handful))
                if len(waiting) > 2 * at_once:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _handfuls(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    handful: list[Piece] = []
    size = 0
    for piece in pieces:
        handful.append(piece)
        size += len(piece[1])
        if size >= _HANDFUL:
            yield handful
            handful, size = [], 0
    if handful:
        yield handful
