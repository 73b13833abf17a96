"""The file in which an upload is gathered, beside where it is to be: ``.sa-<job>.part``.

It outlives the agents that write to it, one after the other; how much of it is whole only the controller knows. An
exclusive ``flock`` says that one is at it.
"""

from __future__ import annotations

import os
import stat
from types import TracebackType

from storage_admin.agent.folders.pools import open_parent, wrong_name
from storage_admin.agent.host import locking
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, SQUASHED, Arguments, RefusedError, Request
from storage_admin.agent.swap.journal import file_name
from storage_admin.agent.swap.outcome import stat_in, unlink

#: What is all zeros in pieces of this size is not written: a hole takes no space.
_HOLE = 64 << 10
#: Seconds that an agent which was cut off may take to notice it.
_PATIENCE = 45.0
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write(fd: int, content: bytes | memoryview, at: int) -> None:
    """Put all of these bytes there."""
    while content:
        done = os.pwrite(fd, content, at)
        content, at = content[done:], at + done


def write_sparse(fd: int, piece: bytes, at: int) -> None:
    """Put bytes there, zeros as holes; the file may be too short afterwards."""
    view = memoryview(piece)
    for start in range(0, len(piece), _HOLE):
        part = view[start : start + _HOLE]
        if part.tobytes().strip(b"\0"):
            write(fd, part, at + start)


class Incoming:
    """That file, open and locked. Use it as a context manager.

    Args:
        place: ``pool_path_b64`` and ``path_b64`` of the file that the upload becomes.
        request: whose it is.
        io: the controller.
        create: whether it may be missing.
        named: inode of the file that may have its name already, and not the other one any more.

    Raises:
        RefusedError: ``stale_plan`` where it is missing or is not the file that an agent made; ``busy``; ``invalid``;
            ``outside_pool``; ``immutable``, where what root makes there is somebody else's.
        OSError: it cannot be opened.
    """

    def __init__(self, place: object, request: Request, io: AgentIO, *, create: bool, named: int | None = None) -> None:
        where = Arguments(place if isinstance(place, dict) else {}, frozenset({"pool_path_b64", "path_b64"}))
        path = where.path("path_b64")
        if why := wrong_name(os.path.basename(path)):
            raise RefusedError(INVALID, why)
        self.folder, self.name = open_parent(where.path("pool_path_b64"), path)
        self.part = file_name(request.job, "part")
        self.fd = -1
        try:
            found = stat_in(self.folder, self.name) if named is not None else None
            self._own = self.name if found is not None and found.inode == named else self.part
            self.fd = self._opened(create)
            self._lock(io)
            self.check()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Incoming:  # noqa: PYI034 - Self is younger than Python 3.9
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of it; it stays where it is."""
        if self.fd >= 0:
            os.close(self.fd)
        os.close(self.folder)

    def _opened(self, create: bool) -> int:
        if create:
            try:
                fd = os.open(self.part, _OPEN | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.folder)
            except FileExistsError:
                pass
            else:
                if os.fstat(fd).st_uid == os.geteuid():
                    return fd
                os.close(fd)
                unlink(self.folder, self.part)
                raise RefusedError("immutable", SQUASHED)
        try:
            return os.open(self._own, _OPEN, dir_fd=self.folder)
        except FileNotFoundError:
            raise RefusedError("stale_plan", "what was uploaded so far is gone; upload the file again") from None

    def _lock(self, io: AgentIO) -> None:
        if not locking.take_file(self.fd, _PATIENCE, io.check):
            raise RefusedError("busy", "the file is being uploaded by another request")

    def check(self) -> None:
        """Only an agent can have made it, and nobody else can write to it; raises RefusedError."""
        status, named = os.fstat(self.fd), stat_in(self.folder, self._own)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        names = 1 if self._own == self.part or stat_in(self.folder, self.part) is None else 2
        if not ours or status.st_nlink != names or named is None or named.inode != status.st_ino:
            raise RefusedError("stale_plan", "the file that collects the upload was replaced; upload the file again")

    def keep(self, end: int) -> None:
        """Make it so long, and have it on the disk."""
        if os.fstat(self.fd).st_size != end:
            os.ftruncate(self.fd, end)
        os.fsync(self.fd)
