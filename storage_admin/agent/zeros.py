"""Which blocks of a file hold zeros, told about as fast as memory can be read.

The stretch is mapped: copying it would take as long as everything else. Nothing but zeros is told by one comparison;
elsewhere four bytes of each block tell nearly all of those that hold something.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable

from storage_admin.agent.protocol import RefusedError

#: The longest stretch that is looked at in one go, and how much of it is read and compared at once, in bytes. To map
#: and to take away again is what threads keep each other from: less of it is quicker.
MOST_BYTES = 16 << 20
PART_BYTES = 4 << 20
# linux/mman.h, since Linux 5.14: have the pages read in, and say whether that could be done.
_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value
_MAYBE_ZEROS = re.compile(rb"\0+")

_LIBC = ctypes.CDLL(None, use_errno=True)
# While these work, other threads run. Of the two, mmap64 takes 64-bit offsets on every machine (musl has only mmap).
_mmap, _munmap = getattr(_LIBC, "mmap64", None) or _LIBC.mmap, _LIBC.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_memcmp, _madvise = _LIBC.memcmp, _LIBC.madvise
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

#: Never written to, so that all of it is one page of the kernel's, which stays in the processor's nearest cache.
_ZEROS = mmap.mmap(-1, PART_BYTES, mmap.MAP_PRIVATE)
_ZEROS_AT = ctypes.addressof(ctypes.c_char.from_buffer(_ZEROS))


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
    first = start - start % mmap.PAGESIZE
    mapped = _mmap(None, end - first, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, first)
    found: list[tuple[int, int]] = []
    brought: list[int] = []
    try:
        for part in range(start, end, PART_BYTES):
            if not is_wanted():
                break
            length = min(PART_BYTES, end - part)
            if not (_in_memory(fd, part) and _in_memory(fd, part + length - 1)):
                os.posix_fadvise(fd, part, length, os.POSIX_FADV_WILLNEED)
                brought.append(part)
            address = None if mapped == _FAILED else mapped + part - first
            found += [(part + begin, part + after) for begin, after in _runs_of(fd, address, part, length, block)]
    finally:
        if mapped != _FAILED:
            _munmap(mapped, end - first)
    for part in brought:
        os.posix_fadvise(fd, part, min(PART_BYTES, end - part), os.POSIX_FADV_DONTNEED)
    return found


def _runs_of(fd: int, address: int | None, start: int, length: int, block: int) -> list[tuple[int, int]]:
    """Where blocks of zeros are in a part of a file that is mapped there, or could not be mapped."""
    if address is not None:
        within = address % mmap.PAGESIZE
        # Memory that cannot be read would end the process; so it is read in first, where that is an answer.
        if not _madvise(address - within, length + within, _POPULATE_READ):
            return _runs(address, length, block)
    # An older kernel, a disk with an error, a shorter file: reading tells.
    copy = _copied(fd, start, length)
    return _runs(ctypes.addressof(copy), length, block)


def _in_memory(fd: int, offset: int) -> bool:
    """Whether the page cache has a byte of a file; to ask for each page would take a tenth of all the time."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False  # the disk would have to be asked, or the filesystem does not say


def _copied(fd: int, start: int, length: int) -> ctypes.Array[ctypes.c_char]:
    copy = (ctypes.c_char * length)()
    done = 0
    while done < length:
        read = os.preadv(fd, [memoryview(copy)[done:]], start + done)
        if not read:
            raise RefusedError("stale_plan", "the image became shorter while the work went on; scan the host again")
        done += read
    return copy


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
