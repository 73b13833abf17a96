"""Zeros in a volume of a thin pool, by the chunks in which the pool gives and takes space; and how they are given back.

A thin volume reads as zeros where it has no chunk. So a chunk of zeros can go without a reader noticing, as long as
nobody writes to it between the look and the discard: whoever calls :func:`give_back` sees to that.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Callable

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure import holes, prediction, sampling
from storage_admin.agent.protocol import HostError

#: Chunks that a sample looks at, and bytes at most, of which large chunks are only few.
SAMPLES, SAMPLED_BYTES = 2000, 512 << 20
#: At most so many bytes are discarded and read again in one go.
_BATCH = 64 << 20
#: Smallest chunk of a thin pool; every other one is a multiple of it (lvmthin(7)).
_SMALLEST = 64 << 10
_BLKDISCARD = 0x1277  # linux/fs.h

Range = tuple[int, int]


def sample(fd: int, mapped: Sequence[Range], chunk: int, io: AgentIO) -> prediction.Fields:
    """What a reclaim would free, by chunks drawn evenly and by chance from those that a volume has.

    Args:
        fd: of the volume.
        mapped: from and to which of its chunks it has.
        chunk: in bytes.

    Returns:
        As the verb ``analyze`` says of an image.
    """
    count = sum(end - begin for begin, end in mapped)
    kept = sampling.Sample(count, chunk)
    for numbers in sampling.rounds(count, min(max(SAMPLED_BYTES // chunk, 16), SAMPLES), random.Random()):  # noqa: S311 (no secret)
        for place in _places(mapped, numbers):
            io.check()
            kept.add(0 if _is_zeros(fd, place * chunk, chunk) else chunk)
    found = prediction.Prediction(
        kept.total(), max(kept.total() - kept.margin(), 0), min(kept.total() + kept.margin(), count * chunk)
    )
    return prediction.result(count * chunk, {"in_place": found.fields(count * chunk)}, {"sampled": kept.drawn})


def _places(mapped: Sequence[Range], numbers: Sequence[int]) -> Iterator[int]:
    """Which chunks those of these numbers are, where only chunks that are there count; both in ascending order."""
    before, ranges = 0, iter(mapped)
    begin, end = next(ranges, (0, 0))
    for number in numbers:
        while number >= before + end - begin:
            before += end - begin
            begin, end = next(ranges)
        yield begin + number - before


def _is_zeros(fd: int, start: int, length: int) -> bool:
    """Whether a chunk holds nothing but zeros; the last one may be longer than the volume."""
    end = min(start + length, os.lseek(fd, 0, os.SEEK_END))
    return sum(stop - begin for begin, stop in _zero_runs(fd, start, end)) == end - start


def find(fd: int, mapped: Sequence[Range], chunk: int, step: Callable[[int], None]) -> list[Range]:
    """The stretches of a volume that it has and that hold zeros, in whole chunks.

    Args:
        fd: of the volume.
        mapped: from and to which of its chunks it has.
        chunk: in bytes.
        step: called with the bytes that were read, after each 16 MiB.

    Returns:
        From and to which byte, in order.
    """
    found: list[Range] = []
    size = os.lseek(fd, 0, os.SEEK_END)
    for begin, end in mapped:
        for start, stop in _merged(_zero_runs(fd, begin * chunk, min(end * chunk, size), step)):
            first, last = -(-start // chunk) * chunk, stop // chunk * chunk
            if first < last:
                found.append((first, last))
    return found


def give_back(fd: int, zeros: Sequence[Range], chunk: int, step: Callable[[int], None]) -> int:
    """Discard of these stretches what still holds zeros, and read it again.

    Args:
        fd: of the volume, for writing; nobody else can write to it.
        zeros: in whole chunks, in order.
        chunk: in bytes.
        step: called with the bytes that were read.

    Returns:
        The bytes that were discarded.

    Raises:
        HostError: what was discarded does not read as zeros; the work ends there.
        OSError: the kernel refuses.
    """
    done = 0
    for start, end in zeros:
        batch = max(_BATCH // chunk, 1) * chunk
        for first in range(start, end, batch):
            whole = [(first // chunk, min(first + batch, end) // chunk)]
            for begin, stop in find(fd, whole, chunk, step):
                fcntl.ioctl(fd, _BLKDISCARD, struct.pack("QQ", begin, stop - begin))
                if find(fd, [(begin // chunk, stop // chunk)], chunk, lambda _: None) != [(begin, stop)]:
                    raise HostError(f"the bytes from {begin} to {stop} do not read as zeros after they were discarded")
                done += stop - begin
    return done


def _zero_runs(fd: int, start: int, end: int, step: Callable[[int], None] = lambda _: None) -> Iterator[Range]:
    for part in range(start, end, holes.MOST_BYTES):
        stop = min(part + holes.MOST_BYTES, end)
        yield from holes.zero_runs(fd, part, stop, _SMALLEST)
        step(stop - part)


def _merged(runs: Iterator[Range]) -> Iterator[Range]:
    """The same stretches, those that touch as one."""
    last: Range | None = None
    for run in runs:
        if last is not None and run[0] == last[1]:
            last = (last[0], run[1])
        else:
            if last is not None:
                yield last
            last = run
    if last is not None:
        yield last
