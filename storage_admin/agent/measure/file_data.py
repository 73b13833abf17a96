"""Where a file's data stands, and which of it are zeros that could be holes: the same for every format.

What a method that works in place would win is a question about the file and not about what it means: blocks of 4 KiB
of zeros, wherever they stand, and blocks that were set aside and never written.
"""

from __future__ import annotations

import errno
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable

from storage_admin.agent.measure.prediction import Prediction
from storage_admin.agent.measure.sampling import BLOCK, MAX_PIECE, Pace, Sample, is_zeros, zero_runs

#: What the filesystem adds or saves at the edges of what is written, in bytes.
EDGES = 64 * 1024
#: Bytes of a full look that are read at once.
_STRETCH = 4 << 20
#: Extents that one block of a file's extent tree holds, as they are when it was split half and half. An ext4 extent
#: takes 12 bytes, one of XFS 16 (Linux, fs/ext4/ext4_extents.h, fs/xfs/libxfs/xfs_format.h).
_EXTENTS_A_BLOCK = BLOCK // 16 // 2
#: Extents that usually need no block of their own.
_EXTENTS_INLINE = 4


def extent_blocks(extents: float) -> float:
    """The most that the filesystem's own list of a file's pieces takes, in bytes: it counts as the file's blocks.

    What is one piece to a reader may be several on the disk, so that there may be a list where none is expected.
    """
    return (extents / _EXTENTS_A_BLOCK + 2) * BLOCK


class DataMap:
    """Which stretches of a file are data and not a hole, in the order they stand.

    Args:
        fd: descriptor of the file.
        file_size: in bytes.
        check: called now and then; raises to stop.
    """

    def __init__(self, fd: int, file_size: int, check: Callable[[], None]) -> None:
        self._fd = fd
        self._starts, self._sums = array("Q"), array("Q", [0])
        at = 0
        while at < file_size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break  # nothing but a hole up to the end
                raise
            at = os.lseek(fd, start, os.SEEK_HOLE)
            at += -at % BLOCK  # the file's last block is there as a whole
            self._starts.append(start)
            self._sums.append(self._sums[-1] + at - start)
            if len(self._starts) % 1000 == 0:
                check()

    @property
    def data_bytes(self) -> int:
        """Of all stretches."""
        return self._sums[-1]

    @property
    def stretches(self) -> int:
        """How many there are."""
        return len(self._starts)

    def any_in(self, start: int, length: int) -> bool:
        """Whether any of ``length`` bytes from ``start`` on are data."""
        number = bisect_right(self._starts, start + length - 1) - 1
        return number >= 0 and self._starts[number] + self._sums[number + 1] - self._sums[number] > start

    def bytes_in(self, start: int, length: int) -> int:
        """How many of ``length`` bytes from ``start`` on are data."""
        return self._below(start + length) - self._below(start)

    def _below(self, at: int) -> int:
        """How many bytes before that place are data."""
        stretch = bisect_right(self._starts, at) - 1
        if stretch < 0:
            return 0
        return min(self._sums[stretch] + at - self._starts[stretch], self._sums[stretch + 1])

    def place(self, at: int) -> int:
        """Where in the file a byte of the data alone is."""
        stretch = bisect_right(self._sums, at) - 1
        return self._starts[stretch] + at - self._sums[stretch]

    def read(self, at: int, length: int) -> bytes:
        """Bytes of the data alone, as if there were no holes."""
        parts, found = [], 0
        stretch = bisect_right(self._sums, at) - 1
        while found < length and stretch < len(self._starts):
            inside = at + found - self._sums[stretch]
            wanted = min(length - found, self._sums[stretch + 1] - self._sums[stretch] - inside)
            parts.append(os.pread(self._fd, wanted, self._starts[stretch] + inside).ljust(wanted, b"\0"))
            found += wanted
            stretch += 1
        return b"".join(parts)


class FileZeros:
    """Blocks of zeros in a file's data.

    Args:
        data: of the file.
        whole: all of it is looked at, else a sample.
    """

    def __init__(self, data: DataMap, *, whole: bool) -> None:
        self.data = data
        self._piece = _STRETCH if whole else MAX_PIECE
        pieces = -(-data.data_bytes // self._piece)
        self.zeros = Sample(pieces, self._piece)
        self.runs = Sample(pieces, self._piece // BLOCK)
        self._seen = self._found = self._cuts = 0

    def look(self, pace: Pace) -> None:
        """Read as much as ``pace`` wants, and tell how far it is."""
        wanted = pace.looked_at(self.zeros.population)
        for numbers in pace.drawn(self.zeros.population):
            for piece in numbers:
                at = piece * self._piece
                length = min(self._piece, self.data.data_bytes - at)
                content = self.data.read(at, length)
                zeros, runs = zero_runs(content)
                self._cuts += max(runs - is_zeros(content[:BLOCK]) - is_zeros(content[-BLOCK:]), 0)
                self._seen, self._found = self._seen + length, self._found + zeros
                self.zeros.add(zeros)
                self.runs.add(runs)
                pace.tell("zeros", self.zeros.drawn * self._piece, wanted * self._piece)

    def total(self) -> tuple[float, float]:
        """Bytes of zeros in the data, and how far that may be wrong."""
        # By bytes and not by pieces: the last one may be shorter than the others.
        share = self._found / self._seen if self._seen else 0.0
        return share * self.data.data_bytes, self.zeros.margin()

    def in_place(self) -> Prediction:
        """What the file takes once holes are dug where it holds zeros.

        Blocks that were set aside and never written are dug out with them. Nothing is written, but the filesystem's
        list of the file's pieces gets longer, which may take more than was won.
        """
        return self._without_zeros(0)

    def sparse_copy(self) -> Prediction:
        """What a copy of a raw image takes that leaves out what is zeros."""
        return self._without_zeros(BLOCK + self.data.data_bytes // 4096)

    def _without_zeros(self, edges: int) -> Prediction:
        zeros, margin = self.total()
        kept = max(self.data.data_bytes - zeros, 0.0)
        edges = max(EDGES, edges) if margin else edges
        listed = extent_blocks(self.runs.total() + self.runs.margin() + self.data.stretches)
        usual = BLOCK if max(self._cuts + 1, self.data.stretches) > _EXTENTS_INLINE else 0
        return Prediction(kept + usual, kept - margin - edges, kept + margin + edges + listed)
