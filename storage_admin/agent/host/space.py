"""How much room a filesystem has, what has to stay free on it for the guests that run, and which blocks a file has.

Of blocks the filesystem says what kind they are: written, reserved, shared with other files (FIEMAP).

What agents at work on one machine may still write: each tells the others before it begins. Two agents that look at the
same free space in the same moment would both find that they fit, and the controller cannot know how much of its scratch
space a job has written by now. So each agent writes its claim into a file of its own in a folder that all of them know,
one at a time for each filesystem, and lowers it as it writes. The file is locked as long as the agent lives: the claim
of one that was killed ends with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from storage_admin.agent.host import locking
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError

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


def extents_of(fd: int, check: Callable[[], None], shortest: int = 0) -> Extents | None:
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
    found = extents_of(fd, lambda: None)
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


@dataclass(frozen=True)
class Reserve:
    """What no job may take: the larger of a share of the filesystem (percent) and a number of bytes."""

    percent: float
    minimum_bytes: int

    @classmethod
    def parse(cls, args: Arguments) -> Reserve:
        """The argument ``reserve``; raises RefusedError(``invalid``)."""
        given = Arguments(args.get("reserve", dict, {}), frozenset({"percent", "bytes"}))
        reserve = cls(given.get("percent", float, 5.0), given.get("bytes", int, 2 << 30))
        if reserve.minimum_bytes < 0 or not 0 <= reserve.percent <= 100:
            raise RefusedError(INVALID, "a reserve is not negative, and at most 100 percent")
        return reserve

    def of(self, capacity_bytes: int) -> int:
        """In bytes, on a filesystem of that capacity."""
        return max(int(capacity_bytes * self.percent / 100), self.minimum_bytes)


@dataclass(frozen=True)
class Space:
    """A filesystem's capacity and what an ordinary user may still write to it, in bytes."""

    capacity_bytes: int
    available_bytes: int


def space(fd: int) -> Space:
    """The space of the filesystem that holds an open file or folder."""
    status = os.fstatvfs(fd)
    return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def allocated(fd: int) -> int:
    """What an open file occupies, in bytes."""
    return os.fstat(fd).st_blocks * 512


def owned(fd: int) -> int:
    """What the filesystem gets back where an open file goes, in bytes: shared blocks stay with who shares them."""
    return max(allocated(fd) - shared_bytes(fd), 0)


def allocated_on_disk(fd: int) -> int:
    """The same, once all that was written to it is on the disk.

    Until then a filesystem only guesses, and counts no blocks that its own tables will need.
    """
    os.fsync(fd)
    return allocated(fd)


def require(fd: int, needed_bytes: int, reserve: Reserve, reserved_elsewhere_bytes: int) -> None:
    """Refuse work that could fill a filesystem up.

    Args:
        fd: descriptor of a file or folder on it.
        needed_bytes: the most that the work may write.
        reserve: what has to stay free.
        reserved_elsewhere_bytes: what other admitted jobs there still need.

    Raises:
        RefusedError: ``not_enough_space``.
    """
    now = space(fd)
    kept = reserve.of(now.capacity_bytes)
    if now.available_bytes - reserved_elsewhere_bytes - needed_bytes < kept:
        raise RefusedError(
            "not_enough_space",
            f"the job may need {needed_bytes} bytes, other jobs need {reserved_elsewhere_bytes} and {kept} must "
            f"stay free, but only {now.available_bytes} are available; free some space in this storage pool, or "
            "analyze the image fully for a lower bound",
        )


def watch(fd: int, reserve: Reserve) -> None:
    """Refuse to go on once the reserve is reached.

    Raises:
        RefusedError: ``not_enough_space``.
    """
    now = space(fd)
    if now.available_bytes < reserve.of(now.capacity_bytes):
        raise RefusedError(
            "not_enough_space",
            f"only {now.available_bytes} bytes were left while the job ran; it was stopped to leave that space to "
            "running guests. Free some space in this storage pool and try again",
        )


#: Where agents that are root tell each other; gone when the machine starts anew, as they are.
FOLDER = "/run/storage-admin-agent"
#: Seconds to wait for agents that look right now; it takes them microseconds, unless one of them was stopped.
PATIENCE = 5.0
#: One claim: a filesystem and bytes, as text of a length that is written and read at once.
_BYTES = 64
_WRITABLE_BY_OTHERS = 0o022


@dataclass(frozen=True)
class Others:
    """What other jobs at work may write on the filesystem, as far as the controller knows, in bytes by their ids.

    Args:
        here: those on this machine. Their own agents' claims count instead, where these can be read: who has none yet
            looks after this one, and who has none any more has written all.
        elsewhere: those on other machines.
    """

    here: dict[str, int] = field(default_factory=dict)
    elsewhere: dict[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, args: Arguments) -> Others:
        """The argument ``others_bytes``; raises RefusedError(``invalid``)."""
        given = Arguments(args.get("others_bytes", dict, {}), frozenset({"here", "elsewhere"}))
        others = cls(given.get("here", dict, {}), given.get("elsewhere", dict, {}))
        for size in (*others.here.values(), *others.elsewhere.values()):
            if type(size) is not int or size < 0:
                raise RefusedError(INVALID, "others_bytes are bytes by a job's id")
        return others


class SpaceClaim:
    """What one job may still write on a filesystem. Without a folder of its own user, the controller's word counts.

    Args:
        job: the job's id.
        fd: descriptor of a file or folder on the filesystem.
        folder: where the others' claims are.
    """

    def __init__(self, job: str, fd: int, folder: str = FOLDER) -> None:
        self._fd = fd
        self._filesystem = _filesystem(fd)
        self._name = f"{job}.{os.getpid()}"
        self._own = -1
        self._folder = _open(folder)

    def __enter__(self) -> SpaceClaim:  # noqa: PYI034 - Self is younger than Python 3.9
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, needed_bytes: int, reserve: Reserve, others: Others) -> None:
        """Claim the most that the work may write, if there is room for it beside what others have yet to write.

        Raises:
            RefusedError: ``not_enough_space``; nothing is claimed.
        """
        with self._alone():
            here = others.here if self._folder < 0 else self._told()
            require(self._fd, needed_bytes, reserve, sum({**others.elsewhere, **here}.values()))
            self.left(needed_bytes)

    def left(self, still_bytes: int) -> None:
        """So much may still be written."""
        if self._folder < 0:
            return
        with contextlib.suppress(OSError):
            if self._own < 0:
                self._own = self._made()
            os.pwrite(self._own, f"{self._filesystem} {max(still_bytes, 0)}".encode().ljust(_BYTES), 0)

    def _made(self) -> int:
        """The claim's file, locked. Who looks between its birth and its lock may take it for an ended agent's."""
        while True:
            made = self._file(self._name)
            if locking.take_file(made, 0.0) and os.fstat(made).st_nlink:
                return made
            os.close(made)
            time.sleep(0.01)

    def close(self) -> None:
        """Nothing more is written."""
        if self._own >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)
            os.close(self._own)
        if self._folder >= 0:
            os.close(self._folder)
        self._own = self._folder = -1

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other agent looks at this filesystem. One that was stopped meanwhile is not waited for for ever."""
        turn = self._turn()
        if turn < 0:
            self.close()
            yield
            return
        try:
            locking.take_file(turn, PATIENCE)
            yield
        finally:
            os.close(turn)

    def _turn(self) -> int:
        """A descriptor of the file that is locked meanwhile; -1 where there can be none."""
        with contextlib.suppress(OSError):
            if self._folder >= 0:
                return self._file(f".{self._filesystem}.lock")
        return -1

    def _file(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=self._folder)

    def _told(self) -> dict[str, int]:
        """What the other agents may still write on the same filesystem, by the job's id."""
        found: dict[str, int] = {}
        for name in os.listdir(self._folder):
            if name == self._name or name.startswith("."):
                continue
            with contextlib.suppress(OSError, ValueError):
                claim = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._folder)
                try:
                    if locking.take_file(claim, 0.0):
                        os.unlink(name, dir_fd=self._folder)  # whose agent has ended
                        continue
                    filesystem, still = os.pread(claim, _BYTES, 0).decode("ascii").split()
                finally:
                    os.close(claim)
                if filesystem == self._filesystem:
                    job = name.partition(".")[0]
                    found[job] = found.get(job, 0) + int(still)
        return found


def _filesystem(fd: int) -> str:
    """A short name of the filesystem, or pool of filesystems, whose space a file takes."""
    mounts = Mounts.of_this_machine()
    mount = mounts.of_descriptor(fd)
    key = f"device {os.fstat(fd).st_dev}" if mount is None else mounts.space_key(mount)
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _open(path: str) -> int:
    """A descriptor of the folder, -1 where there is none that only this user writes to."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        status = os.fstat(folder)
        if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & _WRITABLE_BY_OTHERS:
            return folder
        os.close(folder)
    return -1
