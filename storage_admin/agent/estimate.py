"""How large an image would be after a reclaim, and how sure that is."""

from __future__ import annotations

import errno
import os
import random
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.formats import Facts
from storage_admin.agent.formats.qcow2 import l1_entries, parse_header
from storage_admin.agent.formats.reader import Reader
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.qcow2_map import Cluster, Counts, Map
from storage_admin.agent.sampling import BLOCK, MAX_PIECE, Budget, Sample, compressed_size, rounds, zero_bytes

#: How far the size by zstd lies from that by zlib, which is what is measured: so much less to so much more.
_ZSTD_LESS, _ZSTD_MORE = 0.10, 0.10
#: Clusters below this many bytes are looked at in pairs: what one costs depends on its neighbour.
_SMALL = 16 * 1024
#: What the filesystem adds or saves at the edges of what is written, in bytes.
_EDGES = 64 * 1024


def unknown(allocated: int, reason: str) -> dict[str, Any]:
    """The result for an image that no estimate is made for.

    Args:
        allocated: its allocated size in bytes.
        reason: a sentence for the admin.
    """
    nothing = dict.fromkeys(("method", "predicted_after_bytes", "predicted_low", "predicted_high"))
    more = dict.fromkeys(("reclaimable_bytes", "reclaimable_low", "reclaimable_high"))
    return {**nothing, "allocated_size": allocated, **more, "reason": reason, "basis": {}}


def _result(
    method: str, allocated: int, after: float, low: float, high: float, basis: dict[str, Any]
) -> dict[str, Any]:
    return {
        "method": method,
        "allocated_size": allocated,
        "predicted_after_bytes": round(after),
        "predicted_low": max(round(low), 0),
        "predicted_high": round(high),
        "reclaimable_bytes": max(round(allocated - after), 0),
        "reclaimable_low": max(round(allocated - high), 0),
        "reclaimable_high": max(round(allocated - max(low, 0)), 0),
        "basis": basis,
    }


@dataclass
class _Found:
    """What the pieces of a qcow2 image were, as they were looked at."""

    stored: Sample
    zeros: Sample
    incompressible: int = 0
    breaks: int = 0

    def add(self, piece: bytes, following: bytes | None) -> None:
        is_zero = not piece.strip(b"\0")
        size = 0 if is_zero else compressed_size(piece)
        self.stored.add(size)
        self.zeros.add(is_zero)
        if size == len(piece):
            self.incompressible += 1
        elif not is_zero and following is not None:
            self.breaks += compressed_size(following) == len(following)

    def share(self, count: int) -> float:
        return count / len(self.stored.values) if self.stored.values else 0.0


def analyze_qcow2(
    reader: Reader, facts: Facts, allocated: int, samples: int, seconds: float, chance: random.Random, io: AgentIO
) -> dict[str, Any]:
    """What ``qemu-img convert -c`` would make of a qcow2 image, its own layer only.

    Args:
        reader: of the image.
        facts: of the image.
        allocated: its allocated size in bytes.
        samples: how many pieces are wanted.
        seconds: of processor time that the sample may take.
        chance: where the luck comes from.
        io: the controller.

    Raises:
        RefusedError: ``dirty_or_corrupt``.
        StoppedError: the controller stopped the work.
    """
    header = parse_header(reader)
    tables = Map(reader.fd, reader.file_size, header, io.check)
    counts = tables.count()
    size = tables.cluster_size
    piece_size = min(size, MAX_PIECE)
    pieces, l2_tables = counts.data * (size // piece_size), counts.l2_tables
    found = _Found(Sample(pieces, piece_size), Sample(pieces, 1))
    for piece, following in _qcow2_pieces(reader.fd, tables, pieces, piece_size, samples, seconds, chance, io):
        found.add(piece, following)
    stored, zeros, share = found.stored, found.zeros, found.share(found.incompressible)
    if zeros.mean == 1 and not counts.compressed and not counts.zero:
        l2_tables = 0  # nothing is left for them to point to
    metadata = _metadata(size, l2_tables, l1_entries(header), stored.total() + counts.compressed_bytes, facts)
    # A cluster that does not compress starts at a cluster: the block before it is left half empty.
    breaks = counts.data * (found.share(found.breaks) if size < _SMALL else share * (1 - share)) * min(BLOCK, size) / 2
    after = metadata + stored.total() + breaks + counts.compressed_bytes
    squeezed = stored.total() - share * pieces * piece_size + counts.compressed_bytes
    # Zeros among data, less than qemu looks at in one go, are stored as a compressed cluster of a hundred bytes.
    stray = zeros.total() * compressed_size(bytes(piece_size))
    unsure = counts.compressed * min(256, size // 16) + _EDGES + (counts.l2_tables - l2_tables) * size
    low = after - stored.margin() - squeezed * _ZSTD_LESS - breaks - unsure
    high = after + stored.margin() + squeezed * _ZSTD_MORE + breaks + stray + unsure
    # What is a hole in the file is zeros: no more than what it takes now can be there to be stored.
    high = min(high, metadata + max(allocated, counts.compressed_bytes) + breaks + unsure)
    basis = {**_basis(size, piece_size, counts, found), "metadata_bytes": round(metadata)}
    return _result("compress", allocated, after, low, high, basis)


def _basis(size: int, piece_size: int, counts: Counts, found: _Found) -> dict[str, Any]:
    sampled = len(found.stored.values)
    return {
        "cluster_size": size,
        "clusters_data": counts.data,
        "clusters_zero_allocated": counts.zero_allocated + round(found.zeros.mean * counts.data),
        "clusters_zero_flagged": counts.zero,
        "clusters_compressed": counts.compressed,
        "sampled": sampled,
        "piece_bytes": piece_size,
        "compressed_ratio": round(found.stored.mean / piece_size, 4) if sampled else None,
        "incompressible_share": round(found.share(found.incompressible), 4),
        "compressor": "zlib, as qemu; zstd is estimated by the same, the range allows for it",
    }


def _metadata(size: int, l2_tables: int, l1_size: int, data: float, facts: Facts) -> float:
    """Header, L1, L2 and refcounts as qemu-img writes them, in bytes on disk."""
    fixed = size + -(-l1_size * 8 // BLOCK) * BLOCK + l2_tables * size
    clusters = (fixed + data) / size + 3
    blocks = -(-clusters * (facts.refcount_bits or 16) // (size * 8))
    table = -(-blocks * 8 // size)
    return fixed + (blocks + table) * size


def _qcow2_pieces(
    fd: int,
    tables: Map,
    pieces: int,
    piece_size: int,
    samples: int,
    seconds: float,
    chance: random.Random,
    io: AgentIO,
) -> Iterator[tuple[bytes, bytes | None]]:
    budget, each, done = Budget(seconds), tables.cluster_size // piece_size, 0
    last = pieces // each - 1
    pairs = tables.cluster_size < _SMALL
    for drawn in rounds(pieces, samples, chance):
        if not budget.allows_another_round():
            return
        ordinals = [piece // each for piece in drawn]
        if pairs:
            ordinals = [near for ordinal in ordinals for near in (ordinal, min(ordinal + 1, last))]
        places, clusters = iter(drawn), tables.clusters(ordinals)
        for cluster in clusters:
            at = next(places, 0) % each * piece_size
            follower = next(clusters, None) if pairs else None
            following = None if follower is None else _read_piece(fd, follower, 0, piece_size, tables.cluster_size)
            yield _read_piece(fd, cluster, at, piece_size, tables.cluster_size), following
            done += 1
            if done % 20 == 0:
                io.check()
                io.progress("sampling", done, min(samples, pieces))


def _read_piece(fd: int, cluster: Cluster, start: int, length: int, cluster_size: int) -> bytes:
    piece = os.pread(fd, length, cluster.offset + start)
    piece += bytes(length - len(piece))
    if cluster.subclusters == 0xFFFFFFFF:
        return piece
    # What a subcluster that is not there would read as does not count as this layer's data.
    step = cluster_size // 32
    parts = [
        piece[at : at + step] if cluster.subclusters >> ((start + at) // step) & 1 else bytes(step)
        for at in range(0, length, step)
    ]
    return b"".join(parts)


def analyze_raw(
    fd: int, file_size: int, allocated: int, samples: int, seconds: float, chance: random.Random, io: AgentIO
) -> dict[str, Any]:
    """What digging holes where a raw image holds zeros would give back; arguments as :func:`analyze_qcow2`."""
    starts, sums = _data_map(fd, file_size, io.check)
    data = sums[-1]
    pieces = -(-data // MAX_PIECE)
    zeros = Sample(pieces, MAX_PIECE)
    budget, done = Budget(seconds), 0
    for drawn in rounds(pieces, samples, chance):
        if not budget.allows_another_round():
            break
        for piece in drawn:
            at = piece * MAX_PIECE
            length = min(MAX_PIECE, data - at)
            content = _read_mapped(fd, starts, sums, at, length)
            zeros.add(zero_bytes(content) * MAX_PIECE / length)
            done += 1
            if done % 20 == 0:
                io.check()
                io.progress("sampling", done, min(samples, pieces))
    scale = data / (pieces * MAX_PIECE) if pieces else 0.0
    found, margin = zeros.total() * scale, zeros.margin() * scale
    found = min(found, allocated)
    basis = {
        "data_bytes": data,
        "zero_share": round(found / data, 4) if data else None,
        "sampled": done,
        "piece_bytes": MAX_PIECE,
    }
    edges = _EDGES if margin else 0
    low, high = allocated - min(found + margin + edges, data, allocated), allocated - max(found - margin - edges, 0)
    return _result("in_place", allocated, allocated - found, low, high, basis)


def _data_map(fd: int, file_size: int, check: Callable[[], None]) -> tuple[array[int], array[int]]:
    """Where the file's data starts, and how many bytes of data there are before each start and in all."""
    starts, sums = array("Q"), array("Q", [0])
    at = 0
    while at < file_size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break  # nothing but a hole up to the end
            raise
        at = min(os.lseek(fd, start, os.SEEK_HOLE), file_size)
        starts.append(start)
        sums.append(sums[-1] + at - start)
        if len(starts) % 1000 == 0:
            check()
    return starts, sums


def _read_mapped(fd: int, starts: array[int], sums: array[int], at: int, length: int) -> bytes:
    """Bytes of the data without its holes."""
    content = bytearray()
    stretch = bisect_right(sums, at) - 1
    while len(content) < length and stretch < len(starts):
        inside = at + len(content) - sums[stretch]
        wanted = min(length - len(content), sums[stretch + 1] - sums[stretch] - inside)
        got = os.pread(fd, wanted, starts[stretch] + inside)
        content += got + bytes(wanted - len(got))
        stretch += 1
    return bytes(content)
