"""Requests as a guest makes them, without a guest: ``qemu-img bench`` on an image of the scratch folder."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from storage_admin.agent.bench.step import Bench
from storage_admin.agent.protocol import HostError

#: Requests in flight at a time.
DEPTH = 8
#: What is written, over and over; zeros would be left out by some filesystems and formats.
_PATTERN = 0xA5
#: Where ``qemu-img bench`` ends for its numbers.
_LARGEST_STEP = (1 << 31) - 1
#: Filesystems that can make a constant byte vanish.
COMPRESSING = frozenset({"bcachefs", "btrfs", "f2fs", "ubifs", "zfs"})
#: Requests of a first look at how long random ones take, and the seconds that all of them may take.
_FIRST_LOOK, _RANDOM_SECONDS, _MOST_RANDOM = 64, 2.0, 100_000
_TOOK = re.compile(rb"Run completed in ([0-9]+\.[0-9]+) seconds")


@dataclass(frozen=True)
class Guest:
    """An image as a guest has it.

    Args:
        bench: what it works with.
        name: of its topmost file.
        format: of that.
        window_bytes: how much of it, from its beginning, is read and written.
        direct: whether past the cache.
        cache, io: QEMU's words for how requests are made; empty for what it does by itself.
    """

    bench: Bench
    name: str
    format: str
    window_bytes: int
    direct: bool
    cache: str = ""
    io: str = ""

    def probe(self) -> None:
        """Make one request; raises HostError where that cannot be done."""
        self._run(1, 4096, 4096, 0, write=False)

    def sequential(self, block_bytes: int, *, write: bool) -> tuple[int, float]:
        """Go from end to end: how many bytes were done, and in how many seconds; writes with a flush in the end."""
        count = max(1, self.window_bytes // block_bytes)
        return count * block_bytes, self._run(count, block_bytes, block_bytes, 0, write=write)

    def random(self, block_bytes: int, *, write: bool) -> tuple[int, float]:
        """Jump about for about two seconds: how many requests were done, and in how many seconds.

        No place is visited twice: each is as far from the one before as the golden ratio says, or as qemu-img can jump.
        """
        blocks = max(1, self.window_bytes // block_bytes)
        stride = jump(blocks, _LARGEST_STEP // block_bytes)
        first = min(blocks, _FIRST_LOOK)
        seconds = self._run(first, block_bytes, stride * block_bytes, 0, write=write)
        left = min(blocks - first, _MOST_RANDOM)
        if left <= 0:
            return first, seconds
        count = max(min(first, left), min(left, int(first / max(seconds, 0.001) * _RANDOM_SECONDS)))
        start = first * stride % blocks * block_bytes
        return count, self._run(count, block_bytes, stride * block_bytes, start, write=write)

    def _run(self, count: int, block_bytes: int, step_bytes: int, offset: int, *, write: bool) -> float:
        depth = min(DEPTH, count)
        argv = [
            *("qemu-img", "bench", "-t", self.cache or ("none" if self.direct else "writeback")),
            *(["-i", self.io] if self.io else []),
            *("-c", str(count), "-d", str(depth)),
            *("-s", str(block_bytes), "-S", str(step_bytes), "-o", str(offset)),
            # One flush, after the last request: tables that were changed are on the disk as well then.
            *(["-w", f"--pattern={_PATTERN}", f"--flush-interval={count}"] if write else []),
            *("--image-opts", self._options()),
        ]
        if write and self.bench.filesystem in COMPRESSING:
            self.bench.note(
                f"qemu-img bench writes the same byte repeatedly: a {self.bench.filesystem} that compresses looks "
                "faster than it is"
            )
        found = _TOOK.search(self.bench.tool(argv))
        if found is None:
            raise HostError("qemu-img bench did not report how long it took")
        return float(found[1])

    def _options(self) -> str:
        filename = f"driver=file,PREFIX.filename={self.bench.scratch.path(self.name)}"
        if self.format == "raw":
            below = "file." + filename.replace("PREFIX", "file")
        else:
            below = f"file.driver={self.format},file.file." + filename.replace("PREFIX", "file.file")
        return f"driver=raw,size={self.window_bytes},{below}"


def jump(blocks: int, most: int) -> int:
    """How many blocks to go on each time, so that all are visited, each once, and neighbours late.

    Args:
        blocks: how many there are.
        most: the longest jump that can be made.
    """
    wanted = max(1, min(round(blocks * (math.sqrt(5) - 1) / 2), most))
    return next((step for step in range(wanted, 0, -1) if math.gcd(step, blocks) == 1), 1)
