"""Digging holes: what a file keeps on disk as zeros becomes a hole, which reads as the same zeros and takes no space.

Nobody else may have the file open meanwhile (``open_gate.py``): zeros that were read have to be zeros still when they
go.

Zeros are found about as fast as memory can be read. A stretch is read into memory that stays in a processor's own
cache: to map it would take longer, as the kernel sets up each of its pages. Nothing but zeros is told by one
comparison; elsewhere four bytes of each block tell nearly all of those that hold something.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Optional

from storage_admin.agent.host.space import has_blocks
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
    fd: int, start: int, end: int, block: int, is_dropped: Callable[[], bool] = lambda: False
) -> list[tuple[int, int]]:
    """The blocks of zeros in a stretch of a file.

    The host's page cache belongs to the guests: of what was not there, nothing stays.

    Args:
        fd: descriptor of the file, open for reading and writing.
        start: in bytes, on a block's boundary.
        end: the same, or the file's end, where a rest that fills no block counts as one; at most :data:`MOST_BYTES`
            behind ``start``.
        block: in bytes, a power of two and at most 1 MiB.
        is_dropped: asked for every :data:`PART_BYTES` whether nobody wants to know any more.

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
        if is_dropped():
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
            raise RefusedError("stale_plan", "the image became shorter while the job ran; scan the host and try again")
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


# linux/falloc.h
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2

#: Bytes that a thread looks at before it is asked again, and the most that one call lets go of.
PIECE_BYTES = MOST_BYTES
RUN_BYTES = 64 << 20
GAP_BYTES = 1 << 30
#: Bytes behind a file's end in which blocks may be reserved: an extent of XFS is no longer.
BEYOND_BYTES = 8 << 30
#: Pieces for each thread that are looked at before their turn, and seconds that a step waits for its own.
AHEAD = 4
STEP_SECONDS = 0.02
#: Block sizes that are worked with, and the one for filesystems that name a stranger one.
_BLOCKS = frozenset(1 << bit for bit in range(9, 21))
_USUAL_BLOCK = 4096

#: A stretch of a file in bytes, from and to, and whether it is data; the same with the zeros in it, if it is.
_Stretch = tuple[int, int, bool]
_Looked = tuple[int, int, Optional[list[tuple[int, int]]]]

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
                "the filesystem of this storage pool cannot punch holes in a file; reclaim the image with a copy "
                "instead",
            )
        raise OSError(number, os.strerror(number))


class Digger:
    """One way through a file, from its beginning to its end, a piece at a time. Close it in the end.

    While one piece's zeros are let go of, the next ones are looked at already. What was not let go of is looked at
    again after a :meth:`pause`: over that, nothing is kept but the position.

    Args:
        file_size: of the file, in bytes.
        block: the filesystem's block size in bytes, as of :func:`block_size`.
        piece_bytes: the most that is read at once.
        at_once: pieces that are read at the same time. With one, no more is read than each :meth:`step` says.
    """

    def __init__(self, file_size: int, block: int, piece_bytes: int = PIECE_BYTES, at_once: int = 1) -> None:
        self._file_size, self._block = file_size, block
        self._piece_bytes = max(piece_bytes // block, 1) * block
        self._readers, self._dropped = ThreadPoolExecutor(at_once), threading.Event()
        #: Pieces in the order of the file, whose turn has not come.
        self._asked: deque[Future[list[_Looked]]] = deque()
        self._ahead = at_once * AHEAD if at_once > 1 else 1
        self._planned = self._data_end = self._passed = 0
        #: Zeros that end where the work is: the next piece may begin with more of them.
        self._run = (0, 0)
        #: Whether the whole file was gone through.
        self.done = False
        #: Bytes of the file that were let go of.
        self.dug = 0

    @property
    def position(self) -> int:
        """How far it is, in bytes of the file."""
        return self._run[0] if self._run[0] < self._run[1] else self._passed

    def step(self, fd: int) -> int:
        """Go through the next piece, if it is read within some milliseconds.

        Args:
            fd: descriptor of the file, open for reading and writing. Nobody else has the file open; between two steps
                others may, with a :meth:`pause` before.

        Returns:
            How many bytes were read: none where the disk takes longer.

        Raises:
            RefusedError: ``unsupported_pool``; ``stale_plan``, where the file has become shorter.
            OSError: the file cannot be read, or no hole can be made.
        """
        while self._planned < self._file_size and len(self._asked) < self._ahead:
            piece = self._next_piece(fd)
            self._asked.append(self._readers.submit(_look, fd, piece, self._block, self._dropped.is_set))
        if not self._asked:
            self.finish_run(fd)
            self._let_go_beyond_end(fd)
            self.done = True
            return 0
        if not wait([self._asked[0]], STEP_SECONDS).done:
            return 0
        read = 0
        for start, end, zeros in self._asked.popleft().result():
            if zeros is None:
                self.finish_run(fd)
                self._let_go_of_gap(fd, start, end)
            else:
                read += end - start
                self._let_go_of_zeros(fd, zeros)
            self._passed = end
            if self._run[1] < end:
                self.finish_run(fd)
        return read

    def pause(self) -> None:
        """Be sure that nobody is at work on the file, and forget what was seen: others may have it from now on."""
        self._drop()
        self._planned = self._data_end = self._passed = self.position
        self._run = (0, 0)

    def close(self) -> None:
        """End its threads."""
        self._drop()
        self._readers.shutdown()

    def _drop(self) -> None:
        """Forget what was asked, and wait until nobody is at work."""
        self._dropped.set()
        for one in self._asked:
            one.cancel()
        wait(self._asked)
        self._asked.clear()
        self._dropped = threading.Event()

    def _next_piece(self, fd: int) -> list[_Stretch]:
        """Data and the gaps between, up to a piece of data, a large gap, or a large number of either."""
        piece: list[_Stretch] = []
        read = gap = 0
        while self._planned < self._file_size and read < self._piece_bytes and gap < MOST_BYTES and len(piece) < 64:
            start = self._planned
            if start >= self._data_end:
                found = self._next_data(fd)
                data = found if found == self._file_size else found // self._block * self._block
                if data > start:
                    self._planned = min(data, start + GAP_BYTES)
                    gap = self._planned - start
                    piece.append((start, self._planned, False))
                    continue
                # Not from the block's boundary: a filesystem may keep holes that are smaller than its blocks.
                self._data_end = min(self._up(os.lseek(fd, found, os.SEEK_HOLE)), self._file_size)
            self._planned = min(self._data_end, start + self._piece_bytes - read, start + MOST_BYTES)
            read += self._planned - start
            piece.append((start, self._planned, True))
        return piece

    def _next_data(self, fd: int) -> int:
        """Where the next data begins."""
        try:
            return os.lseek(fd, self._planned, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return self._file_size  # none until the end
            raise

    def _let_go_of_zeros(self, fd: int, zeros: Sequence[tuple[int, int]]) -> None:
        """What touches goes with one call: where a filesystem tells its disk of each, a call takes its time."""
        for start, end in zeros:
            if start != self._run[1]:
                self.finish_run(fd)
                self._run = (start, end)
            else:
                self._run = (self._run[0], end)
            if end - self._run[0] >= RUN_BYTES:
                self.finish_run(fd)

    def finish_run(self, fd: int) -> None:
        """Let go of the zeros that it has come through: call it before a pause, so that each turn brings it on."""
        start, end = self._run
        if start < end:
            punch(fd, start, self._up(end) - start)
            self.dug += end - start
            self._run = (end, end)

    def _let_go_of_gap(self, fd: int, start: int, end: int) -> None:
        """A gap may have blocks that were reserved and never written: preallocation. They read as zeros."""
        if has_blocks(fd, start, end - start):
            punch(fd, start, self._up(end) - start)
            self.dug += min(end, self._file_size) - start

    def _let_go_beyond_end(self, fd: int) -> None:
        """What was reserved for a file that grows, which XFS does by itself; nobody can ever read it."""
        start = self._up(self._file_size)
        if has_blocks(fd, start, BEYOND_BYTES):
            try:
                punch(fd, start, BEYOND_BYTES)
            except OSError as error:
                if error.errno != errno.EFBIG:  # the file is nearly as large as any can be
                    raise

    def _up(self, offset: int) -> int:
        """The boundary of a block, at or after an offset."""
        return -(-offset // self._block) * self._block


def _look(fd: int, piece: Sequence[_Stretch], block: int, is_dropped: Callable[[], bool]) -> list[_Looked]:
    """Where the data of a piece is zeros; who waits at the door does not wait for all of it."""
    looked: list[_Looked] = []
    for start, end, data in piece:
        if is_dropped():
            break
        looked.append((start, end, zero_runs(fd, start, end, block, is_dropped) if data else None))
    return looked


def block_size(fd: int) -> int:
    """The size in bytes of the blocks in which a file's filesystem keeps data."""
    found = os.fstatvfs(fd).f_bsize
    return found if found in _BLOCKS else _USUAL_BLOCK
