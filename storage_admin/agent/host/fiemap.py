"""Which blocks of a file the filesystem has, and of what kind: written, reserved, shared with other files (FIEMAP)."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# linux/fiemap.h: fm_start, fm_length, fm_flags, fm_mapped_extents, fm_extent_count, fm_reserved
_FIEMAP, _REQUEST = 0xC020660B, struct.Struct("=QQLLLL")
# fe_logical, fe_physical, fe_length, two reserved words, fe_flags, three reserved ones
_EXTENT = struct.Struct("=QQQQQLLLL")
_LAST, _UNWRITTEN, _SHARED = 0x1, 0x800, 0x2000
_AT_ONCE = 512
_NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS})


@dataclass(frozen=True)
class Extents:
    """What the filesystem says of a file's blocks, up to the file's end, in bytes.

    Args:
        mapped: all that is no hole.
        reserved: set aside and never written, in runs of at least the length that was asked for.
        shared: also part of another file or of a snapshot of the filesystem: to let go of it frees nothing.
    """

    mapped: int
    reserved: int
    shared: int


def has_blocks(fd: int, start: int, length: int) -> bool:
    """Whether a part of a file has blocks on disk, as far as the filesystem tells; else true.

    Raises:
        OSError: the file cannot be asked about.
    """
    # Without room for extents the kernel only counts them.
    told = _ask(fd, start, length, bytearray(_REQUEST.size))
    return told is None or bool(told)


def look(fd: int, check: Callable[[], None], shortest: int = 0) -> Extents | None:
    """Add up a file's extents.

    Args:
        fd: descriptor of a regular file.
        check: called now and then; raises to stop.
        shortest: bytes in a row that count as ``reserved``, at least.

    Returns:
        ``None`` where the filesystem does not tell.

    Raises:
        OSError: the file cannot be asked about.
    """
    mapped = reserved = shared = run = run_end = 0
    try:
        for start, length, flags in _extents(fd, os.fstat(fd).st_size, check):
            mapped += length
            shared += length if flags & _SHARED else 0
            if flags & _UNWRITTEN:
                run = run + length if start == run_end and run else length
                run_end = start + length
                # What makes a run long enough counts from its beginning.
                reserved += 0 if run < shortest else run if run - length < shortest else length
    except _UnknownError:
        return None
    return Extents(mapped, reserved, shared)


def shared_bytes(fd: int) -> int:
    """Bytes of a file that other files have as well; 0 where the filesystem does not tell, or knows no such thing."""
    found = look(fd, lambda: None)
    return found.shared if found is not None else 0


class _UnknownError(Exception):
    pass


def _extents(fd: int, size: int, check: Callable[[], None]) -> Iterator[tuple[int, int, int]]:
    """Start and length in bytes, and flags of each, in order."""
    at, room = 0, bytearray(_REQUEST.size + _AT_ONCE * _EXTENT.size)
    while at < size:
        check()
        count = _ask(fd, at, size - at, room)
        if count is None:
            raise _UnknownError
        if not count:
            return
        found = _EXTENT.iter_unpack(memoryview(room)[_REQUEST.size : _REQUEST.size + count * _EXTENT.size])
        for logical, _physical, length, _one, _two, flags, *_rest in found:
            start, at = max(logical, at), logical + length
            # An extent may reach behind the file's end, where nobody reads: its last block alone is the file's.
            end = min(at, size + -size % 4096)
            if end > start:
                yield start, end - start, flags
            if flags & _LAST:
                return


def _ask(fd: int, start: int, length: int, room: bytearray) -> int | None:
    """How many extents there are, or are in ``room`` behind the request by now; ``None`` where nobody tells."""
    fits = (len(room) - _REQUEST.size) // _EXTENT.size
    _REQUEST.pack_into(room, 0, start, length, 0, 0, fits, 0)
    try:
        fcntl.ioctl(fd, _FIEMAP, room)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            return None
        raise
    found: int = _REQUEST.unpack_from(room)[3]
    return found
