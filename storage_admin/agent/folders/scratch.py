"""The folder that a benchmark makes in a storage pool, works in, and removes: ``.sa-<job>.bench``.

Nothing outside of it is ever opened for writing. An exclusive ``flock`` on the file ``lock`` in it says that an agent
is at work there; the kernel drops it with the agent. A folder whose lock nobody holds was left behind, and may go.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator

from storage_admin.agent.folders.pools import JOB
from storage_admin.agent.host import locking
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import RefusedError, display

#: What became of a folder that was left behind.
REMOVED, BUSY, FOREIGN = "removed", "busy", "foreign"
#: Seconds that a new folder's lock may be looked at by a scan.
_PATIENCE = 1.0
_LOCK = "lock"
_NAME = re.compile(rf"\.sa-({JOB})\.bench")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def job_of(name: str) -> str | None:
    """The job that a benchmark's folder is named after, or ``None`` for any other name."""
    match = _NAME.fullmatch(name)
    return match.group(1) if match else None


def holds(path: bytes) -> bool:
    """Whether a path leads into a benchmark's folder, whoever names it: what lies there is nobody's image."""
    return any(job_of(name) is not None for name in os.fsdecode(path).split("/")[:-1])


def folder_name(job: str) -> str:
    """The name of a benchmark's folder."""
    return f".sa-{job}.bench"


class Scratch:
    """A benchmark's folder, open and locked. Use :func:`made`.

    Args:
        pool: descriptor of the folder that it is in; stays the caller's.
        pool_path: that folder's path, for the log.
        job: whose it is.
        fd: descriptor of the folder itself.
        lock: of its lock file.
    """

    def __init__(self, pool: int, pool_path: bytes, job: str, fd: int, lock: int) -> None:
        self.fd = fd
        self._pool, self._lock = pool, lock
        self._name = folder_name(job)
        self._shown = f"{display(pool_path).rstrip('/')}/{self._name}"
        #: Its path by its name, for a daemon that cannot be given a descriptor.
        self.named_path = pool_path.rstrip(b"/") + b"/" + os.fsencode(self._name)

    @property
    def folder(self) -> str:
        """A path for tools, which leads to this folder whatever its name leads to; they need ``fd``."""
        return f"/proc/self/fd/{self.fd}/."

    def path(self, name: str) -> str:
        """A path for tools to a file in it."""
        return f"/proc/self/fd/{self.fd}/{name}"

    def shown(self, argument: str) -> str:
        """A tool's argument as an admin should read it."""
        return argument.replace(self.folder, self._shown).replace(f"/proc/self/fd/{self.fd}", self._shown)

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a file in it, which the caller closes; with ``O_CREAT``, of a new one."""
        created = os.O_EXCL if flags & os.O_CREAT else 0
        return os.open(name, flags | created | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)

    def let_through(self) -> None:
        """Let other users, such as that of a hypervisor's guests, come to files in it whose names they know.

        A daemon that works for them comes here by the folder's name: nobody may be able to put another one there.

        Raises:
            RefusedError: ``unsupported_pool``, where somebody else could.
        """
        above = os.fstat(self._pool)
        shared = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
        named = os.stat(self._name, dir_fd=self._pool, follow_symlinks=False)
        if above.st_uid != os.geteuid() or shared or not os.path.samestat(named, os.fstat(self.fd)):
            raise RefusedError(
                "unsupported_pool",
                f"users other than the agent's could replace {self._shown} with another folder, and libvirt finds "
                "it only by name; choose a pool whose folder belongs to root and that nobody else may write to",
            )
        os.fchmod(self.fd, 0o711)

    def names(self) -> list[str]:
        """The files and folders in it, without its lock."""
        return sorted(name for name in os.listdir(self.fd) if name != _LOCK)

    def allocated_bytes(self, *names: str) -> int:
        """What some files occupy, or all of them; those in folders below are empty ones of bonnie++ and not counted."""
        total = 0
        for name in names or self.names():
            try:
                total += os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue  # a tool has just removed it
        return total

    def size(self, name: str) -> int:
        """The length of a file in it, in bytes."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_size

    def clear(self, *but: str) -> None:
        """Remove what is in it, except for some files."""
        _empty(self.fd, {_LOCK, *but})

    def direct_works(self) -> bool:
        """Whether the filesystem takes reads and writes past the cache (``O_DIRECT``)."""
        os.close(self.open("probe", os.O_RDWR | os.O_CREAT))
        try:
            os.close(self.open("probe", os.O_RDWR | os.O_DIRECT))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        finally:
            os.unlink("probe", dir_fd=self.fd)
        return True

    def remove(self, io: AgentIO) -> None:
        """Take it away with all that is in it; where that fails, a scan finds it and it is recovered."""
        try:
            _remove(self._pool, self._name, self.fd)
        except OSError as error:
            io.log(f"{self._shown} could not be removed: {error.strerror}; recover the host later", "warning")
        finally:
            os.close(self._lock)
            os.close(self.fd)


@contextlib.contextmanager
def made(pool: int, pool_path: bytes, job: str, io: AgentIO) -> Iterator[Scratch]:
    """A new, empty folder for a job, locked, and gone afterwards.

    Raises:
        RefusedError: ``busy``, where the job has one; ``unsupported_pool``, where it would not be the agent's own.
        OSError: it cannot be made.
    """
    scratch = _make(pool, pool_path, job)
    try:
        yield scratch
    finally:
        scratch.remove(io)


def _make(pool: int, pool_path: bytes, job: str) -> Scratch:
    name = folder_name(job)
    try:
        os.mkdir(name, 0o700, dir_fd=pool)
    except FileExistsError as error:
        raise RefusedError("busy", f"another agent is working on job {job} on this host") from error
    fd = os.open(name, _FOLDER, dir_fd=pool)
    try:
        if not _is_own(os.fstat(fd)) or set(os.listdir(fd)) - {_LOCK}:
            raise RefusedError(
                "unsupported_pool",
                f"a folder that the agent creates in {display(pool_path)} does not belong to it; choose a pool on a "
                "filesystem that keeps owners and modes (NFS: no_root_squash)",
            )
        lock = os.open(_LOCK, _NEW, 0o600, dir_fd=fd)
        if not locking.take_file(lock, _PATIENCE):
            os.close(lock)
            raise RefusedError("busy", f"another agent is working on job {job} on this host")
    except FileExistsError as error:
        os.close(fd)
        raise RefusedError("busy", f"another agent is working on job {job} on this host") from error
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=pool)
        raise
    return Scratch(pool, pool_path, job, fd, lock)


def is_abandoned(pool: int, name: str) -> bool:
    """Whether a name in an open folder is a benchmark's folder, of this agent's user, that nobody is at work in."""
    if job_of(name) is None:
        return False
    try:
        fd = os.open(name, _FOLDER, dir_fd=pool)
    except OSError:
        return False
    try:
        if not _is_own(os.fstat(fd)):
            return False
        lock = os.open(_LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=fd)
    except FileNotFoundError:
        return not os.listdir(fd)
    except OSError:
        return False
    finally:
        os.close(fd)
    try:
        return locking.take_file(lock, 0.0, kind=fcntl.LOCK_SH)
    finally:
        os.close(lock)


def settle(pool: int, name: str) -> str:
    """Remove a folder that a benchmark left behind.

    Args:
        pool: descriptor of the folder that it is in.
        name: one that :func:`job_of` knows.

    Returns:
        :data:`REMOVED`, :data:`BUSY` while an agent is at work in it, :data:`FOREIGN` where it is none of the agent's.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        fd = os.open(name, _FOLDER, dir_fd=pool)
    except FileNotFoundError:
        return REMOVED
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            return FOREIGN
        raise
    try:
        if not _is_own(os.fstat(fd)):
            return FOREIGN
        # The lock is the first file in it and the last: whoever may rename things in the pool called a folder so.
        if (names := os.listdir(fd)) and _LOCK not in names:
            return FOREIGN
        # One that is being made has no lock yet: whoever makes the file first is at work there, and the other leaves.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        lock = os.open(_LOCK, flags, 0o600, dir_fd=fd)
        try:
            if not locking.take_file(lock, 0.0):
                return BUSY
            _remove(pool, name, fd)
        finally:
            os.close(lock)
    finally:
        os.close(fd)
    return REMOVED


def clear_abandoned(pool: int, pool_path: bytes, io: AgentIO) -> None:
    """Remove what killed benchmarks left in a pool's folder; what cannot be removed is told, and left."""
    for name in sorted(name for name in os.listdir(pool) if job_of(name) is not None):
        shown = f"{display(pool_path).rstrip('/')}/{name}"
        try:
            if settle(pool, name) == REMOVED:
                io.log(f"{shown} was left by an earlier benchmark and was removed")
        except OSError as error:
            io.log(f"{shown} was left by an earlier benchmark and cannot be removed: {error.strerror}", "warning")


def _is_own(status: os.stat_result) -> bool:
    """Whether a folder is this user's, and nobody else can read or change it."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o066


def _remove(pool: int, name: str, fd: int) -> None:
    """Empty an open folder, its lock last, and take its name away."""
    _empty(fd, {_LOCK})
    for remove, what, folder in ((os.unlink, _LOCK, fd), (os.rmdir, name, pool)):
        try:
            remove(what, dir_fd=folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            # Somebody who found it without a lock in this moment has taken it over, and removes it.


def _empty(fd: int, but: set[str]) -> None:
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if entry.name not in but]
    for name, is_folder in found:
        with contextlib.suppress(FileNotFoundError):
            if not is_folder:
                os.unlink(name, dir_fd=fd)
                continue
            below = os.open(name, _FOLDER, dir_fd=fd)
            try:
                if stat.S_ISDIR(os.fstat(below).st_mode) and os.fstat(below).st_dev == os.fstat(fd).st_dev:
                    _empty(below, set())
            finally:
                os.close(below)
            os.rmdir(name, dir_fd=fd)
