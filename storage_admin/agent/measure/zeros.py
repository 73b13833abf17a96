"""Which blocks of a file hold zeros, told about as fast as memory can be read.

The stretch is read into memory that stays in a processor's own cache: to map it would take longer, as the kernel sets
up each of its pages. Nothing but zeros is told by one comparison; elsewhere four bytes of each block tell nearly all of
those that hold something.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections.abc import Callable

from storage_admin.agent.protocol import RefusedError

#: The longest stretch that is looked at in one go, how much of it is read and compared at once, and how much the disk
#: is asked for ahead of that, in bytes.
MOST_BYTES = 16 << 20
PART_BYTES = 1 << 20
_AHEAD_BYTES = 4 << 20
_MAYBE_ZEROS = re.compile(rb"\0+")

_LIBC = ctypes.CDLL(None, use_errno=True)
_memcmp = _LIBC.memcmp  # while it works, other threads run
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

#: Never written to, so that all of it is one page of the kernel's, which stays in the processor's nearest cache.
_ZEROS = mmap.mmap(-1, PART_BYTES, mmap.MAP_PRIVATE)
_ZEROS_AT = ctypes.addressof(ctypes.c_char.from_buffer(_ZEROS))


class _Memory(threading.local):
    """Each thread's own, for one part."""

    def __init__(self) -> None:
        self.bytes = (ctypes.c_char * PART_BYTES)()


_memory = _Memory()


def zero_runs(
    fd: int, start: int, end: int, block: int, is_wanted: Callable[[], bool] = lambda: True
) -> list[tuple[int, int]]:
    """The blocks of zeros in a stretch of a file.

    The host's page cache belongs to the guests: of what was not there, nothing stays.

    Args:
        fd: descriptor of the file, open for reading and writing.
        start: in bytes, on a block's boundary.
        end: the same, or the file's end, where a rest that fills no block counts as one; at most :data:`MOST_BYTES`
            behind ``start``.
        block: in bytes, a power of two and at most 1 MiB.
        is_wanted: asked for every :data:`PART_BYTES` whether to go on.

    Returns:
        From and to which byte of the file, in order; what touches may come as two.

    Raises:
        RefusedError: ``stale_plan``, where the file ends before ``end``.
        OSError: it cannot be read.
    """
    found: list[tuple[int, int]] = []
    brought: list[tuple[int, int]] = []
    ahead, address = start, ctypes.addressof(_memory.bytes)
    for part in range(start, end, PART_BYTES):
        if not is_wanted():
            break
        length = min(PART_BYTES, end - part)
        there = _read_cached(fd, part, length)
        if there < length:
            if part >= ahead:
                ahead = min(part + _AHEAD_BYTES, end)
                os.posix_fadvise(fd, part, ahead - part, os.POSIX_FADV_WILLNEED)
            brought.append((part + there, length - there))
            _read(fd, part, there, length)
        found += [(part + begin, part + after) for begin, after in _runs(address, length, block)]
    for part, length in brought:
        os.posix_fadvise(fd, part, length, os.POSIX_FADV_DONTNEED)
    return found


def _read_cached(fd: int, offset: int, length: int) -> int:
    """Read what the page cache has, up to the first byte that it has not; how many bytes that are."""
    try:
        return os.preadv(fd, [memoryview(_memory.bytes)[:length]], offset, os.RWF_NOWAIT)
    except OSError:
        return 0  # the disk would have to be asked, or the filesystem does not say


def _read(fd: int, offset: int, done: int, length: int) -> None:
    while done < length:
        read = os.preadv(fd, [memoryview(_memory.bytes)[done:length]], offset + done)
        if not read:
            raise RefusedError("stale_plan", "the image became shorter while the work went on; scan the host again")
        done += read


def _runs(address: int, length: int, block: int) -> list[tuple[int, int]]:
    """Where blocks of zeros are in memory; the last one may be shorter."""
    if _is_zero(address, length):
        return [(0, length)]
    rest = length % block
    whole = length - rest
    content = memoryview((ctypes.c_char * length).from_address(address))
    marks = 0
    for probe in (0, block // 4 + 3, block // 2 + 1, block - 1):
        marks |= int.from_bytes(content[probe:whole:block].tobytes(), "little")
    found: list[tuple[int, int]] = []
    for run in _MAYBE_ZEROS.finditer(marks.to_bytes(whole // block, "little")):
        found += _sure(address, run.start() * block, run.end() * block, block)
    if rest and _is_zero(address + whole, rest):
        found.append((whole, length))
    return found


def _sure(address: int, start: int, end: int, block: int) -> list[tuple[int, int]]:
    """Those of some blocks that are zeros to the last byte."""
    if _is_zero(address + start, end - start):
        return [(start, end)]
    if end - start == block:
        return []
    return [(at, at + block) for at in range(start, end, block) if _is_zero(address + at, block)]


def _is_zero(address: int, length: int) -> bool:
    return not _memcmp(address, _ZEROS_AT, length)
