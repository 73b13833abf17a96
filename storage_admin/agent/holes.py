"""Digging holes: what a file keeps on disk as zeros becomes a hole, which reads as the same zeros and takes no space.

Nobody else may have the file open meanwhile (``door.py``): zeros that were read have to be zeros still when they go.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import struct

from storage_admin.agent.protocol import RefusedError

# linux/falloc.h
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2
# linux/fiemap.h: fm_start, fm_length, fm_flags, fm_mapped_extents, fm_extent_count, fm_reserved
_FIEMAP, _FIEMAP_REQUEST = 0xC020660B, struct.Struct("=QQLLLL")

#: Bytes that are read at once, and the most that one call lets go of: who waits at the door waits no longer than that.
PIECE_BYTES = 4 << 20
GAP_BYTES = 1 << 30
#: Bytes behind a file's end in which blocks may be reserved: an extent of XFS is no longer.
BEYOND_BYTES = 8 << 30
#: Pieces that the disk is asked for at once.
ASK_PIECES = 2
#: Block sizes that are worked with, and the one for filesystems that name a stranger one.
_BLOCKS = frozenset(1 << bit for bit in range(9, 21))
_USUAL_BLOCK = 4096
_ZERO_RUN = re.compile(rb"\x01+")

_LIBC = ctypes.CDLL(None, use_errno=True)
# Of the two, fallocate64 takes 64-bit offsets on every machine; musl has only the other, with such offsets.
_fallocate = getattr(_LIBC, "fallocate64", None) or _LIBC.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_fallocate.restype = ctypes.c_int


def punch(fd: int, offset: int, length: int) -> None:
    """Make a part of a file a hole; the file's size stays.

    Args:
        fd: descriptor, open for writing.
        offset: in bytes, on a block's boundary.
        length: in bytes; may reach beyond the end of the file.

    Raises:
        RefusedError: ``unsupported_pool``, where the filesystem has no holes to offer.
        OSError: as fallocate(2).
    """
    while _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in {errno.EOPNOTSUPP, errno.ENOSYS}:
            raise RefusedError(
                "unsupported_pool",
                "the filesystem of this storage pool cannot make holes in a file; reclaim the image by a copy instead",
            )
        raise OSError(number, os.strerror(number))


class Digger:
    """One way through a file, from its beginning to its end, a piece at a time.

    Between two pieces nothing is kept but the position.

    Args:
        file_size: of the file, in bytes.
        block: the filesystem's block size in bytes, as of :func:`block_size`.
        piece_bytes: the most that is read at once.
    """

    def __init__(self, file_size: int, block: int, piece_bytes: int = PIECE_BYTES) -> None:
        self._file_size, self._block = file_size, block
        count = max(1, min(piece_bytes // block, 1024))  # as many as one read takes (IOV_MAX)
        self._pieces = [bytearray(block) for _ in range(count)]
        self._zero = bytearray(block)
        self._asked = 0
        self._data_end = 0
        self._done = False
        #: How far it is, in bytes of the file.
        self.position = 0
        #: Bytes of the file that were let go of.
        self.dug = 0

    @property
    def done(self) -> bool:
        """Whether the whole file was gone through."""
        return self._done

    def step(self, fd: int) -> int:
        """Go through the next piece.

        Args:
            fd: descriptor of the file, open for reading and writing. Nobody else has the file open; between two steps
                others may, with a :meth:`pause` before.

        Returns:
            How many bytes were read.

        Raises:
            RefusedError: ``unsupported_pool``; ``stale_plan``, where the file has become shorter.
            OSError: the file cannot be read, or no hole can be made.
        """
        if self.position >= self._file_size:
            self._let_go_beyond_end(fd)
            self._done = True
            return 0
        if self.position >= self._data_end:
            data = self._next_data(fd)
            if data > self.position:
                self._let_go_of_gap(fd, min(data, self.position + GAP_BYTES))
                return 0
            self._data_end = min(self._up(os.lseek(fd, data, os.SEEK_HOLE)), self._file_size)
        return self._dig(fd)

    def pause(self) -> None:
        """Forget where data was seen: others may have the file from now on."""
        self._data_end = self.position

    def _next_data(self, fd: int) -> int:
        """Where the next data begins, on a block's boundary."""
        try:
            return os.lseek(fd, self.position, os.SEEK_DATA) // self._block * self._block
        except OSError as error:
            if error.errno == errno.ENXIO:
                return self._file_size  # none until the end
            raise

    def _let_go_of_gap(self, fd: int, end: int) -> None:
        """A gap may have blocks that were reserved and never written: preallocation. They read as zeros."""
        start, self.position = self.position, end
        if _has_blocks(fd, start, end - start):
            self._punch(fd, start, end)

    def _let_go_beyond_end(self, fd: int) -> None:
        """What was reserved for a file that grows, which XFS does by itself; nobody can ever read it."""
        start = self._up(self._file_size)
        if _has_blocks(fd, start, BEYOND_BYTES):
            try:
                punch(fd, start, BEYOND_BYTES)
            except OSError as error:
                if error.errno != errno.EFBIG:  # the file is nearly as large as any can be
                    raise

    def _dig(self, fd: int) -> int:
        """Read data, let go of its zeros."""
        start = self.position
        wanted = min(self._data_end - start, len(self._pieces) * self._block)
        self._ask_ahead(fd)
        read = os.preadv(fd, self._pieces[: -(-wanted // self._block)], start)
        # The end of a file counts as a block, also where it is none. A short read ends before it.
        whole = read if start + read >= self._file_size else read // self._block * self._block
        if not whole:
            raise RefusedError("stale_plan", "the image became shorter while the work went on; scan the host again")
        self.position = start + whole
        for first, last in self._zeros(whole):
            self._punch(fd, start + first, start + last)
        # The host's page cache belongs to the guests.
        os.posix_fadvise(fd, start, whole, os.POSIX_FADV_DONTNEED)
        return read

    def _ask_ahead(self, fd: int) -> None:
        """Have the disk read on while the processor compares."""
        begin = max(self._asked, self.position)
        until = min(self.position + ASK_PIECES * len(self._pieces) * self._block, self._data_end)
        if begin < until:
            os.posix_fadvise(fd, begin, until - begin, os.POSIX_FADV_WILLNEED)
            self._asked = until

    def _zeros(self, length: int) -> list[tuple[int, int]]:
        """Where the pieces hold zeros, from and to which byte."""
        block = self._block
        marks = bytes(map(self._zero.__eq__, self._pieces[: length // block]))
        rest = length % block
        if rest:
            marks += bytes([self._pieces[length // block][:rest] == self._zero[:rest]])
        return [(run.start() * block, run.end() * block) for run in _ZERO_RUN.finditer(marks)]

    def _punch(self, fd: int, start: int, end: int) -> None:
        punch(fd, start, self._up(end) - start)
        self.dug += min(end, self._file_size) - start

    def _up(self, offset: int) -> int:
        """The boundary of a block, at or after an offset."""
        return -(-offset // self._block) * self._block


def block_size(fd: int) -> int:
    """The size in bytes of the blocks in which a file's filesystem keeps data."""
    found = os.fstatvfs(fd).f_bsize
    return found if found in _BLOCKS else _USUAL_BLOCK


def _has_blocks(fd: int, start: int, length: int) -> bool:
    """Whether a part of a file has blocks on disk, as far as the filesystem tells; else true."""
    # Without room for extents the kernel only counts them. Only a hint: nothing is let go of by its word.
    request = _FIEMAP_REQUEST.pack(start, length, 0, 0, 0, 0)
    try:
        return bool(_FIEMAP_REQUEST.unpack(fcntl.ioctl(fd, _FIEMAP, request))[3])
    except OSError as error:
        if error.errno in {errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS}:
            return True
        raise
