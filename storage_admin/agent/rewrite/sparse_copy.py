"""A copy of a file as it lies on the disk, holes and all: what a tool that changes an image works on."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from typing import Callable

_MIB = 1 << 20
_PIECE = 8 * _MIB
#: linux/fs.h: share the blocks of another file, where the filesystem can (xfs, btrfs).
_FICLONE = 0x40049409
_CANNOT_SHARE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS, errno.EBADF, errno.EPERM}


def copy_file(
    source: int, target: int, bandwidth: int | None, watch: Callable[[], None], progress: Callable[[int], None]
) -> None:
    """Give an empty file the content of another one.

    Args:
        source: descriptor to read from.
        target: descriptor of an empty file, open for writing.
        bandwidth: bytes a second, at most.
        watch: called for each piece; what it raises ends the copy.
        progress: told how many bytes of the file, holes included, are done.

    Raises:
        OSError: it could not be read or written.
    """
    size = os.fstat(source).st_size
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in _CANNOT_SHARE:
            raise
    else:
        progress(size)
        return
    os.ftruncate(target, size)
    at, copied, started = 0, 0, time.monotonic()
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break  # nothing but a hole up to the end
            raise
        at = os.lseek(source, start, os.SEEK_HOLE)
        while start < at:
            done = _copy_piece(source, target, start, min(_PIECE, at - start))
            start, copied = start + done, copied + done
            watch()
            progress(start)
            if bandwidth:
                _wait_until(started + copied / bandwidth, watch)
    progress(size)


def _copy_piece(source: int, target: int, start: int, length: int) -> int:
    piece = os.pread(source, length, start)
    if not piece:
        raise OSError(errno.EIO, "the file became shorter while it was copied")
    done = 0
    while done < len(piece):
        done += os.pwrite(target, memoryview(piece)[done:], start + done)
    return done


def _wait_until(when: float, watch: Callable[[], None]) -> None:
    while (left := when - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))
        watch()
