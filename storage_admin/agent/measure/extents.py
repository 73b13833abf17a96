"""Images of formats whose tables are not read here: ``qemu-img map`` says where their data stands, we look at it.

What a copy takes follows from how qemu writes each format: vmdk (block/vmdk.c) and a growing vdi (block/vdi.c) write a
whole grain or block once there is anything in it, the others only what is not zeros.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_right
from dataclasses import dataclass

from storage_admin.agent.formats import Facts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure import preallocation
from storage_admin.agent.measure.file_data import EDGES, DataMap, extent_blocks
from storage_admin.agent.measure.prediction import Fields, Prediction, impossible, result
from storage_admin.agent.measure.sampling import BLOCK, Pace, Sample, zero_runs
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError, display
from storage_admin.agent.qemu.img import Node

#: Bytes that are looked at as one where a format does not write more at once.
_PIECE = 64 * 1024


@dataclass(frozen=True)
class _Writer:
    """How qemu writes a format; sizes in bytes.

    ``unit`` is written as a whole once there is anything in it, 0 where only what is not zeros is. ``edge`` is lost for
    each stretch of data, where these do not start at a block of the file, and ``fixed`` is at most what tables take.
    """

    unit: int
    edge: int
    fixed: int

    @property
    def piece(self) -> int:
        """What is looked at as one."""
        return self.unit or _PIECE


def _writer(facts: Facts) -> _Writer | None:
    size, cluster, kind = facts.virtual_size, facts.cluster_size or 0, (facts.format, facts.subformat)
    if kind == ("vpc", "fixed"):
        return _Writer(0, 0, BLOCK)
    if not cluster:
        return None
    if kind == ("vmdk", "monolithicSparse"):
        # Two copies of the grain tables, with 4 bytes a grain, and of their directory.
        return _Writer(cluster, 0, 16 * BLOCK + 8 * (size // cluster) + 8 * (size // (512 * cluster)))
    if facts.format == "vdi":
        return _Writer(0 if facts.subformat == "static" else cluster, BLOCK, 2 * BLOCK + 4 * (size // cluster))
    if kind == ("vpc", "dynamic"):
        # Each block begins with a sector that says which of its sectors are there.
        return _Writer(0, BLOCK, 2 * BLOCK + (4 + BLOCK) * (size // cluster + 1))
    return None


def _why_not(facts: Facts) -> str:
    kind = f"{facts.format} with subformat {facts.subformat}" if facts.subformat else facts.format
    return f"the size of a copy of {kind} cannot be estimated yet"


class _Pieces:
    """The pieces of an image that its tables name, numbered in the guest's order.

    Args:
        listed: what ``qemu-img map`` said.
        piece: bytes of each.
        size: the virtual size in bytes.
    """

    def __init__(self, listed: list[dict[str, int]], piece: int, size: int) -> None:
        self._piece, self._size = piece, size
        self._starts, self._offsets, self._counts = array("Q"), array("Q"), array("Q", [0])
        for extent in listed:
            if not extent["data"]:
                continue
            self._starts.append(extent["start"])
            self._offsets.append(extent["offset"])
            self._counts.append(self._counts[-1] + -(-extent["length"] // piece))

    @property
    def count(self) -> int:
        """How many there are."""
        return self._counts[-1]

    def read(self, fd: int, number: int, data: DataMap) -> bytes:
        """A piece's bytes, filled up to a whole one."""
        at, length = self._place(number)
        return (os.pread(fd, length, at) if data.any_in(at, length) else b"").ljust(self._piece, b"\0")

    def holds_data(self, fd: int, number: int, data: DataMap) -> bool:
        """Whether anything in a piece is no zero; of most pieces the beginning tells."""
        at, length = self._place(number)
        return data.any_in(at, length) and any(
            os.pread(fd, min(_PIECE, at + length - start), start).strip(b"\0")
            for start in range(at, at + length, _PIECE)
        )

    def _place(self, number: int) -> tuple[int, int]:
        extent = bisect_right(self._counts, number) - 1
        inside = (number - self._counts[extent]) * self._piece
        return self._offsets[extent] + inside, min(self._piece, self._size - self._starts[extent] - inside)


def analyze_other(fd: int, facts: Facts, path: bytes, allocated: int, pace: Pace) -> Fields:
    """What each method would make of an image in another format than qcow2 and raw.

    Args:
        fd: descriptor of the image.
        facts: of the image.
        path: for the log.
        allocated: its allocated size in bytes.
        pace: how much is looked at.

    Raises:
        StoppedError: the controller stopped the work.
    """
    name, writer = facts.format, _writer(facts)
    methods = {
        "compress": impossible(f"a {name} image cannot hold compressed data; convert it to qcow2"),
        "copy": impossible(_why_not(facts)),
        "in_place": impossible(f"holes can be punched in qcow2 and raw images only, not in {name}"),
    }
    if writer is None or facts.extents or facts.backing_file is not None:
        return result(allocated, methods, {})
    try:
        listed = map_of(pace.io, Node(fd, facts.format, path))
        if any(extent["data"] and "offset" not in extent for extent in listed):
            raise HostError("its data is stored in a form that cannot be read in place")
    except HostError as error:
        return result(allocated, {**methods, "copy": impossible(error.detail)}, {})
    pieces = _Pieces(listed, writer.piece, facts.virtual_size)
    data = DataMap(fd, os.fstat(fd).st_size, pace.io.check)
    copy, basis = _copy(fd, pieces, writer, data, pace)
    blocks = preallocation.blocks(fd, pace.io.check)
    shared = min(blocks.shared, allocated) if blocks else 0
    return result(allocated, {**methods, "copy": copy.fields(allocated)}, basis, shared)


def map_of(io: AgentIO, node: Node, limits: tools.Limits = tools.QUERY) -> list[dict[str, int]]:
    """What ``qemu-img map`` says of an image; raises HostError where it fails."""
    done = tools.run(
        ["qemu-img", "map", "-U", "--output=json", node.argument()],
        io,
        limits=limits,
        files=node.files(),
        shown=["qemu-img", "map", "-U", "-f", node.format, display(node.path)],
    ).or_fail("qemu-img map failed,")
    return list(json.loads(done.stdout))


def _copy(fd: int, pieces: _Pieces, writer: _Writer, data: DataMap, pace: Pace) -> tuple[Prediction, Fields]:
    kept = Sample(pieces.count, writer.piece)
    begun, stretches = Sample(pieces.count, writer.piece // BLOCK), Sample(pieces.count, writer.piece // BLOCK)
    wanted = pace.looked_at(pieces.count)
    for numbers in pace.drawn(pieces.count):
        for number in numbers:
            if writer.unit:
                kept.add(writer.unit * pieces.holds_data(fd, number, data))
                stretches.add(1)
            else:
                content = pieces.read(fd, number, data)
                zeros, runs = zero_runs(content)
                kept.add(len(content) - zeros)
                # Data after zeros begins in this piece; what stands at its beginning may go on from the last one.
                begun.add(max(runs - (not content[-BLOCK:].strip(b"\0")), 0))
                stretches.add(runs + 1 if zeros < len(content) else 0)
            pace.tell("reading", kept.drawn * writer.piece, wanted * writer.piece)
    low, margin = kept.total(), kept.margin()
    after = low + min(writer.fixed, 2 * BLOCK) + begun.total() * writer.edge
    most = stretches.total() + stretches.margin()
    # Whole units stand one behind the other, so that an edge of one is the beginning of the next.
    edges = writer.edge * (1 if writer.unit else most)
    high = low + margin + edges + writer.fixed + extent_blocks(0 if writer.unit else most) + EDGES + low / 4096
    basis = {"sampled": kept.drawn, "piece_bytes": writer.piece, "pieces": pieces.count, "data_bytes": data.data_bytes}
    return Prediction(after, low - margin, high), basis
