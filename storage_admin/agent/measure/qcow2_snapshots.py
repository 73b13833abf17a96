"""What each internal snapshot of a qcow2 image alone holds: what deleting it gives back.

Layout: the qcow2 specification (qemu, docs/interop/qcow2.txt), "Snapshots", "Cluster mapping". A byte is kept for each
cluster of the file and each snapshot, with a bound. Whatever does not fit together, the answer is that it is not known.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from storage_admin.agent.formats import Reader, UnreadableError
from storage_admin.agent.formats.qcow2 import Header
from storage_admin.agent.measure.file_data import DataMap
from storage_admin.agent.measure.qcow2_leaks import MAX_CLUSTERS, UnknownError, Use

#: The most clusters of the file, times mappings: fifteen snapshots of 1 TiB in clusters of 64 KiB.
MAX_MARKS = 1 << 28


@dataclass(frozen=True)
class Held:
    """Bytes that each snapshot alone holds, in the table's order; ``None`` with a ``reason`` where unknown."""

    each: tuple[int, ...] | None
    reason: str = ""


def held_by_each(
    reader: Reader, header: Header, data: DataMap, check: Callable[[], None], deadline: float | None = None
) -> Held:
    """What is allocated of clusters, tables among them, that nothing but one snapshot refers to; nothing is changed.

    Of two snapshots that hold the same alone together, neither is said to hold it. What a running guest's qemu has not
    written yet is not known.

    Args:
        reader: of the image.
        header: parsed and found within its bounds.
        data: of the file: a cluster may be a hole in part.
        check: called now and then; raises to stop.
        deadline: on the monotonic clock; when it has passed the answer is that it is not known.
    """
    clusters = -(-reader.file_size // (1 << header.cluster_bits))
    if clusters >= MAX_CLUSTERS or clusters * (header.snapshots_count + 1) > MAX_MARKS:
        return Held(None, "the image has too many clusters and snapshots to keep count of each")
    try:
        mappings = [(header.l1_offset, header.l1_size, header.snapshots_offset)]
        mappings += Use(reader, header, check, deadline).snapshots()
        anything = more_than_one = 0
        each = []
        for offset, size, entry_end in mappings:
            use = Use(reader, header, check, deadline)
            use.refer_to_mapping(offset, size)
            if len(mappings) == 2:  # the table goes with its only entry
                use.refer_to(header.snapshots_offset, entry_end - header.snapshots_offset)
            refers = use.referred()
            more_than_one |= anything & refers
            anything |= refers
            each.append(refers)
    except UnknownError as unknown:
        return Held(None, str(unknown))
    except (UnreadableError, IndexError, struct.error):
        return Held(None, "the image's tables contradict each other; check the image when no guest uses it")
    marks = ((refers & ~more_than_one).to_bytes(clusters, "big") for refers in each[1:])
    return Held(tuple(sum(data.bytes_in(*run) for run in _runs(one, header.cluster_bits, check)) for one in marks))


def _runs(marks: bytes, cluster_bits: int, check: Callable[[], None]) -> Iterator[tuple[int, int]]:
    """Offset and length in the file of each row of clusters that are marked."""
    start = marks.find(1)
    while start >= 0:
        end = marks.find(0, start)
        end = len(marks) if end < 0 else end
        yield start << cluster_bits, (end - start) << cluster_bits
        check()
        start = marks.find(1, end)
