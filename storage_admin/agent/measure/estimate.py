"""How large an image would be after each method of reclaim, how sure that is, and what it rests on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent.formats import Facts, Reader
from storage_admin.agent.formats.qcow2 import EXTENDED_L2, Header, parse_header
from storage_admin.agent.host.space import Extents
from storage_admin.agent.measure import preallocation
from storage_admin.agent.measure.clusters import PAIRED, Sums, Tally
from storage_admin.agent.measure.compressors import Sizers, sizers
from storage_admin.agent.measure.file_data import EDGES, DataMap, FileZeros
from storage_admin.agent.measure.prediction import Fields, Prediction, impossible, result
from storage_admin.agent.measure.qcow2_layout import Layout
from storage_admin.agent.measure.qcow2_leaks import Leaks, find_leaks
from storage_admin.agent.measure.qcow2_map import Counts, Map
from storage_admin.agent.measure.qcow2_snapshots import held_by_each
from storage_admin.agent.measure.sampling import BLOCK, MAX_PIECE, Pace

#: How the time of a sample is shared: clusters, and the file's blocks of zeros, which are quickly told.
_CLUSTERS, _BLOCKS = 0.8, 0.2
#: Seconds that a sample may take to find leaked clusters.
_LEAKS_SECONDS = 0.5
#: A compression that makes nothing smaller: what no other one exceeds.
_NONE = "none"
#: zstd looks further back than a piece of a sample reaches: so much smaller may larger clusters become.
_ZSTD_LESS = 0.25


@dataclass(frozen=True)
class _Qcow2:
    """What is known of a qcow2 image once it was looked at.

    ``sizers`` are the compressions that were measured, the one first that is taken unless another is asked for.
    """

    layout: Layout
    counts: Counts
    tally: Tally
    sizers: Sizers
    allocated: int
    overlay: bool
    whole: bool
    #: Of the other compressions there is a sample.
    others: _Qcow2 | None = field(default=None)

    def _l2_tables(self) -> tuple[int, int]:
        """How many a new image needs: at least, and at most."""
        counts = self.counts
        nothing = self.tally.plain.zeros.mean == 1 and not counts.compressed and not (self.overlay and counts.zero)
        # Nothing is left for them to point to.
        return (0 if nothing else counts.l2_tables), counts.l2_tables

    def _edges(self, data: float) -> float:
        # The filesystem's list of the file's pieces counts, too: a block of it for each 16 MiB of a file in small ones.
        return (4 * BLOCK if self.whole else EDGES) + data / 4096

    def compress(self, name: str) -> Prediction:
        """A copy of which each cluster is compressed so."""
        plain, size, layout = self.tally.plain, self.layout.cluster_size, self.layout
        repacked, repacked_margin = self._repacked(name)
        stored, margin, rounded = _stored(plain, name)
        if not layout.packs:
            stored = plain.kept.total() if layout.fills_gaps else rounded
        margin += repacked_margin
        share = plain.share(plain.plain, name)
        incompressible = share * plain.population * plain.piece / size
        packed = self.counts.data - incompressible + self.counts.compressed
        # A cluster that does not compress starts at a cluster: the block before it is left half empty.
        known = plain.in_order or size < PAIRED
        alone = plain.share(plain.breaks, name) if known else share * (1 - share)
        breaks = (self.counts.data * alone + layout.crowded(packed)) * layout.grain / 2 if layout.packs else 0.0
        low_tables, tables = self._l2_tables()
        data = stored + repacked
        after = layout.metadata(low_tables, data) + data + breaks
        rows = layout.rows_at_most(incompressible + margin / size, packed, tables, data + margin)
        # Zeros among data, less than qemu looks at in one go, are stored as a compressed cluster of a hundred bytes.
        stray = (plain.zeros.total() + self.tally.packed.zeros.total()) * self._zeros_become(name)
        # At worst each compressed cluster stands alone, and takes whole blocks.
        alone = max(rounded - stored, 0.0) + self.counts.compressed * layout.grain
        if layout.fills_gaps:
            alone = max(self._in_use() - data, 0.0)
            rows = rows if layout.packs else packed
        above = min(rows * layout.lost_at_most, alone) + stray + self._edges(data)
        high = layout.metadata_at_most(tables, data + margin + above) + data + margin + above
        least = data if layout.packs else rounded + repacked
        low = layout.metadata(low_tables, least) + least - margin - self._edges(0)
        if name == "zstd" and plain.piece < size:
            low -= _ZSTD_LESS * stored
        if not self.counts.compressed:
            # What is a hole in the file is zeros: no more than what it takes now can be there to be stored.
            most = self.allocated + above
            high = min(high, layout.metadata_at_most(tables, most) + most)
        return Prediction(after, low, high + self._from_base())

    def _zeros_become(self, name: str) -> int:
        """Bytes of a compressed piece of zeros."""
        every = {**self.sizers, **(self.others.sizers if self.others is not None else {})}
        sizers_asked = every.values() if name == _NONE else [every[name]]
        return max(size(bytes(self.tally.plain.piece)) for size in sizers_asked)

    def _in_use(self, margins: int = 1) -> float:
        """Bytes of all clusters that hold anything, each as a whole: at most, or with 0 as a guess."""
        plain = self.tally.plain
        used = plain.population * (1 - plain.zeros.mean) + margins * plain.zeros.margin()
        return min(used, plain.population) * plain.piece + self.counts.compressed * self.layout.cluster_size

    def _from_base(self) -> int:
        """A cluster of which a part stands in the base is compressed as a whole: at most all of it comes to be here."""
        return self.counts.partial * self.layout.cluster_size if self.overlay else 0

    def _repacked(self, name: str) -> tuple[float, float]:
        """What the compressed clusters take once they are compressed so, and how far that may be wrong."""
        sums = self.tally.packed
        if name not in sums.stored:
            return 0.0, 0.0
        new = (sums.stored if self.layout.packs else sums.rounded)[name]
        if new.drawn == new.population:
            return new.total(), 0.0
        # Of a sample the ratio is told, not the sum: compressed the same way again, they are as large as they were.
        before = self.counts.compressed_bytes
        now = new.mean * new.drawn
        ratio = now / self.tally.packed_bytes if self.tally.packed_bytes else 1.0
        change = abs(ratio - 1) * before
        unsure = self.counts.compressed * min(256, self.layout.cluster_size // 16)
        return ratio * before, min(change, new.margin()) + unsure

    def copy(self) -> Prediction:
        """A copy that leaves out zeros and unused clusters; compressed ones are unpacked."""
        size, layout = self.layout.cluster_size, self.layout
        plain, packed = self.tally.plain, self.tally.packed
        kept = plain.kept.total() + packed.kept.total()
        margin = plain.kept.margin() + packed.kept.margin()
        low_tables, tables = self._l2_tables()
        dragged = 0.0
        if size < BLOCK:
            # qemu-img looks for zeros in blocks of 4 KiB: what shares one with data is written with it.
            exact = self.whole and not self.counts.compressed
            dragged = (plain.dragged if exact else plain.zeros.total() + packed.zeros.total()) * size
        sure = dragged if self.whole and not self.counts.compressed else 0.0
        usual = max(kept, self._in_use(0)) if layout.fills_gaps and not self.counts.compressed else kept
        after = layout.metadata(low_tables, usual + sure) + usual + sure
        low = layout.metadata(low_tables, kept) + kept - margin - self._edges(0)
        edges = self._edges(kept)
        most = max(kept + margin, self._in_use() if layout.fills_gaps else 0.0) + dragged + edges
        if not self.counts.compressed:
            most = min(most, self.counts.data * size + edges)
        return Prediction(after, low, layout.metadata_at_most(tables, most) + most)

    def compressed(self) -> Fields:
        """The numbers of ``compress``: those of the compression taken unless another is asked for, and each one's."""
        predictions = {name: self.compress(name) for name in self.sizers}
        usual = next(iter(predictions))
        if self.others is not None:
            # Nothing was measured on all data: its bound is that of an image in which nothing becomes smaller.
            bound = self.compress(_NONE).high
            for name in self.others.sizers:
                guess = self.others.compress(name)
                predictions[name] = Prediction(guess.after, guess.low, bound)
        each = {name: prediction.fields(self.allocated) for name, prediction in predictions.items()}
        return {
            **each[usual],
            # A job may ask for any of them, and its space check rests on this.
            "predicted_low": min(fields["predicted_low"] for fields in each.values()),
            "predicted_high": max(fields["predicted_high"] for fields in each.values()),
            "compression": usual,
            "compressions": each,
        }


def analyze_qcow2(
    reader: Reader, facts: Facts, allocated: int, pace: Pace, rewrite_refused: str = "", compression: str = "auto"
) -> Fields:
    """What each method would make of a qcow2 image, its own layer only.

    Args:
        reader: of the image.
        facts: of the image.
        allocated: its allocated size in bytes.
        pace: how much is looked at.
        rewrite_refused: why the image cannot be written anew; then only ``in_place`` is told.
        compression: which one is measured on all data: ``zlib``, ``zstd``, ``all`` or, as ``auto``, the usual one.
            zlib takes six times as long as all the rest.

    Raises:
        RefusedError: ``dirty_or_corrupt``.
        StoppedError: the controller stopped the work.
        HostError: a sample would take too long.
    """
    header = parse_header(reader)
    tables = Map(reader.fd, reader.file_size, header, pace.io.check, pace.deadline_of_tables())
    counts = tables.count()
    data = DataMap(reader.fd, reader.file_size, pace.io.check)
    leaks = _leaks(reader, header, pace)
    zeros = FileZeros(data, whole=pace.whole)
    basis = _table_basis(tables.cluster_size, counts, leaks) | _snapshots_basis(reader, header, facts, data, pace)
    blocks = preallocation.blocks(reader.fd, pace.io.check)
    made = preallocation.of_qcow2(reader.fd, tables, counts, facts.virtual_size, data.data_bytes, blocks)
    if rewrite_refused:
        zeros.look(pace)
        refused = impossible(rewrite_refused)
        methods = {"compress": refused, "copy": refused, "in_place": zeros.in_place().fields(allocated)}
        return _told(allocated, methods, {**basis, **_zero_basis(zeros)}, blocks, made)
    measured, others = _shared_out(sizers(facts.compat), compression, whole=pace.whole)
    layout = Layout.of(reader.fd, header, facts, leaks.bitmaps_bytes)

    def looked_at(named: Sizers, pace: Pace, others: _Qcow2 | None = None) -> _Qcow2:
        tally = Tally(
            reader.fd, tables, counts, data, {**named, _NONE: len} if others else named, facts.compression or "zlib",
            extended=bool(header.incompatible & EXTENDED_L2),
        )  # fmt: skip
        tally.look(pace.share(_CLUSTERS))
        return _Qcow2(layout, counts, tally, named, allocated, facts.backing_file is not None, pace.whole, others)

    found = looked_at(measured, pace, looked_at(others, pace.as_sample()) if others else None)
    zeros.look(pace.share(_BLOCKS))
    methods = {
        "compress": found.compressed(),
        "copy": found.copy().fields(allocated),
        "in_place": zeros.in_place().fields(allocated),
    }
    basis |= {**_tally_basis(found.tally, counts, measured), **_zero_basis(zeros)}
    return _told(allocated, methods, basis, blocks, made)


def _told(allocated: int, methods: Fields, basis: Fields, blocks: Extents | None, made: str) -> Fields:
    told = result(allocated, methods, basis, min(blocks.shared, allocated) if blocks else 0)
    return {**told, "preallocation": made}


def _shared_out(known: Sizers, asked: str, *, whole: bool) -> tuple[Sizers, Sizers]:
    """The compressions to measure on what is looked at, and those of which a sample has to do."""
    if not whole or asked == "all":
        return known, {}
    chosen = asked if asked in known else next(iter(known))
    return {chosen: known[chosen]}, {name: size for name, size in known.items() if name != chosen}


def _stored(sums: Sums, name: str) -> tuple[float, float, float]:
    """Bytes of the clusters compressed so, how far that may be wrong, and their bytes in whole blocks."""
    if name not in sums.stored:
        return 0.0, sums.kept.margin(), 0.0
    return sums.stored[name].total(), sums.stored[name].margin(), sums.rounded[name].total()


def _leaks(reader: Reader, header: Header, pace: Pace) -> Leaks:
    deadline = None if pace.whole else time.monotonic() + _LEAKS_SECONDS
    return find_leaks(reader, header, pace.io.check, deadline)


def _snapshots_basis(reader: Reader, header: Header, facts: Facts, data: DataMap, pace: Pace) -> Fields:
    """What each internal snapshot alone holds, in the header's order, with its time; nothing where there is none."""
    if not facts.snapshots:
        return {}
    deadline = None if pace.whole else time.monotonic() + _LEAKS_SECONDS
    held = held_by_each(reader, header, data, pace.io.check, deadline)
    if held.each is None:
        return {"snapshots": None, "snapshots_reason": held.reason}
    pairs = zip(facts.snapshots, held.each)
    return {"snapshots": [{"created": one.created, "held_bytes": held_bytes} for one, held_bytes in pairs]}


def _table_basis(size: int, counts: Counts, leaks: Leaks) -> Fields:
    return {
        "cluster_size": size,
        "clusters_data": counts.data,
        "clusters_zero_allocated": counts.zero_allocated,
        "clusters_zero_flagged": counts.zero,
        "clusters_compressed": counts.compressed,
        "leaked_clusters": leaks.clusters,
        "leaked_bytes": None if leaks.clusters is None else leaks.clusters * size,
        **({} if leaks.clusters is not None else {"leaked_reason": leaks.reason}),
    }


def _tally_basis(tally: Tally, counts: Counts, measured: Sizers) -> Fields:
    plain, usual = tally.plain, next(iter(measured))
    sums: Sums = plain if plain.zeros.drawn or not tally.packed.zeros.drawn else tally.packed
    ratios = {name: round(sums.stored[name].mean / sums.piece, 4) for name in measured if name in sums.stored}
    return {
        "clusters_zero_allocated": counts.zero_allocated + round(plain.zeros.mean * counts.data),
        "clusters_unreadable": tally.unreadable,
        "sampled": plain.zeros.drawn + tally.packed.zeros.drawn,
        "piece_bytes": sums.piece,
        "compressed_ratio": ratios.get(usual),
        "compressed_ratios": ratios,
        "incompressible_share": round(plain.share(plain.plain, usual), 4),
    }


def _zero_basis(zeros: FileZeros) -> Fields:
    found, data = zeros.total()[0], zeros.data.data_bytes
    return {
        "data_bytes": data,
        "zero_bytes": round(found),
        "zero_share": round(found / data, 4) if data else None,
        "blocks_sampled": zeros.zeros.drawn,
    }


def analyze_raw(fd: int, file_size: int, allocated: int, pace: Pace) -> Fields:
    """What each method would make of a raw image.

    Args:
        fd: descriptor of the image.
        file_size: in bytes.
        allocated: its allocated size in bytes.
        pace: how much is looked at.

    Raises:
        StoppedError: the controller stopped the work.
    """
    zeros = FileZeros(DataMap(fd, file_size, pace.io.check), whole=pace.whole)
    zeros.look(pace)
    methods: dict[str, Any] = {
        "compress": impossible("a raw image cannot hold compressed data; convert it to qcow2"),
        "copy": zeros.sparse_copy().fields(allocated),
        "in_place": zeros.in_place().fields(allocated),
    }
    basis = {**_zero_basis(zeros), "sampled": zeros.zeros.drawn, "piece_bytes": MAX_PIECE}
    blocks = preallocation.blocks(fd, pace.io.check)
    return _told(allocated, methods, basis, blocks, preallocation.of_raw(fd, zeros.data.data_bytes, blocks))
