"""A door before a file: while it is shut, whoever opens the file waits in ``open`` until it is opened again.

Image locks refuse, and only qemu asks for them. A lease waits, but answers ``EWOULDBLOCK`` to those that open without
blocking, as libvirt does when it refreshes a storage pool, which then drops the whole pool. A permission event of
fanotify(7) makes every opener wait, whatever he is and however he opens: a guest that starts, ``mount -o loop``, a
container. He is let in as soon as the door opens, and also when this process dies: the kernel answers for it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import struct
import time
from types import TracebackType

from storage_admin.agent.host import locking
from storage_admin.agent.host.in_use import is_fellow, only_opens_to_read
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.protocol import RefusedError

# linux/fanotify.h
_CLASS_CONTENT, _CLOEXEC, _NONBLOCK = 0x4, 0x1, 0x2
_MARK_ADD, _OPEN_PERM = 0x1, 0x10000
# struct fanotify_event_metadata: event_len, vers, reserved, metadata_len, mask, fd, pid. struct fanotify_response.
_EVENT, _ANSWER, _DENY = struct.Struct("=IBBHQii"), struct.Struct("=iI"), 2

_LIBC = ctypes.CDLL(None, use_errno=True)


class Door:
    """A shut door. This process must not open the file either before :meth:`open` is called.

    Args:
        fd: descriptor of the file. Whoever has it open already is not affected.

    Raises:
        RefusedError: ``guests_unknown``, where the kernel lets nobody, or not this user, keep a door.
    """

    def __init__(self, fd: int) -> None:
        #: Descriptors that came with events which were read and not answered yet.
        self._waiting: list[int] = []
        self._group = _call("fanotify_init", _CLASS_CONTENT | _CLOEXEC | _NONBLOCK, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("fanotify_mark", self._group, _MARK_ADD, ctypes.c_uint64(_OPEN_PERM), fd, None)
            self._poll = select.poll()
            self._poll.register(self._group, select.POLLIN)
        except BaseException:
            self.open()
            raise

    def knocked(self, seconds: float = 0.0) -> bool:
        """Whether somebody waits to open the file; looks for at most so many seconds."""
        return bool(self._poll.poll(max(seconds, 0.0) * 1000))

    def stranger_knocked(self, seconds: float) -> bool:
        """The same, but for other agents of ours that only read, such as a scan: they do no harm, and go on waiting."""
        deadline = time.monotonic() + seconds
        while self.knocked(deadline - time.monotonic()):
            known = [is_fellow(pid) and only_opens_to_read(pid) for pid in self._heard()]
            if not all(known):
                return True
        return False

    def turn_away(self, seconds: float) -> None:
        """Whoever waits, or comes within so many seconds, is not let in: his ``open`` fails with ``EPERM``."""
        deadline = time.monotonic() + seconds
        self._deny()
        while self.knocked(deadline - time.monotonic()):
            self._heard()
            self._deny()

    def open(self) -> None:
        """Let in who waits. The end of the group is the kernel's leave for all of them."""
        if self._group >= 0:
            group, self._group = self._group, -1
            os.close(group)
        while self._waiting:
            os.close(self._waiting.pop())

    def _heard(self) -> list[str]:
        """The processes of some that wait, whose events are read."""
        events, pids = os.read(self._group, 4096), []
        while len(events) >= _EVENT.size:
            length, _, _, _, _, fd, pid = _EVENT.unpack_from(events)
            events = events[length:]
            self._waiting.append(fd)
            pids.append(str(pid))
        return pids

    def _deny(self) -> None:
        while self._waiting:
            fd = self._waiting.pop()
            os.write(self._group, _ANSWER.pack(fd, _DENY))
            os.close(fd)


def holds_everybody(fd: int) -> bool:
    """Whether a door before a file stops all who could open it: not on a filesystem that other machines may have."""
    mount = Mounts.of_this_machine().of_descriptor(fd)
    return mount is not None and not mount.is_network


class Doors:
    """The doors before a file that is to lose its name, and before the one that gets it, if any, while that happens.

    Where this host lets nobody keep doors there are none, and none on a filesystem of a network: what is asked about a
    file there may need it opened anew, and other machines come past any door. Use it as a context manager.

    Args:
        going: descriptor of the file that loses its name.
        coming: of the one that gets it; ``None`` where none does.
    """

    def __init__(self, going: int, coming: int | None = None) -> None:
        self._going: Door | None = None
        self._coming: Door | None = None
        if not holds_everybody(going):
            return
        try:
            self._coming = None if coming is None else Door(coming)
            self._going = Door(going)
        except (RefusedError, OSError):
            self.open()

    @property
    def shut(self) -> bool:
        """Whether there are any."""
        return self._going is not None

    def knocked(self, seconds: float = 0.0) -> bool:
        """Whether somebody waits to open the file that loses its name; looks for at most so many seconds."""
        return self._going is not None and self._going.knocked(seconds)

    def stranger_knocked(self, seconds: float) -> bool:
        """The same, but for agents of ours that only read."""
        return self._going is not None and self._going.stranger_knocked(seconds)

    def take_back(self, seconds: float) -> None:
        """The first file has its name again: who waits for it is let in, who waits for the other one has to ask again.

        Args:
            seconds: for so long they may come who found the other file under that name.
        """
        if self._going is not None and self._coming is not None:
            self._going.open()
            self._coming.turn_away(seconds)

    def turn_away(self, seconds: float) -> None:
        """The first file has no name any more: who waits for it, or comes within so many seconds, is told so."""
        if self._going is not None:
            self._going.turn_away(seconds)

    def keep_out(self) -> None:
        """Nothing takes over: who waits for the second file, which has no name but the job's own, is told so."""
        if self._coming is not None:
            self._coming.turn_away(0.0)

    def open(self) -> None:
        """Let in who waits."""
        for door in (self._going, self._coming):
            if door is not None:
                door.open()
        self._going = self._coming = None

    def __enter__(self) -> Doors:  # noqa: PYI034 - Self is younger than Python 3.9
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()


def shut_alone(fd: int) -> Door | None:
    """Shut the door before a file that nobody else has open.

    First the door, then the question: whoever is in counts by then, whoever is not waits. The kernel grants a write
    lease only where the asking descriptor is the only one on the file, in whatever process, container, mapping or part
    of the kernel (fcntl(2); a kernel before 5.3 counts the door itself). It is given back at once. Somebody who is just
    between the two, on the last steps of opening the file for reading only, may be in unseen: he changes nothing.

    Args:
        fd: the only descriptor of this process on the file, open for writing.

    Returns:
        The shut door, or ``None`` where somebody else has the file open, or is about to.

    Raises:
        RefusedError: ``guests_unknown``.
    """
    door = Door(fd)
    try:
        alone = locking.is_leased(fd, fcntl.F_WRLCK)
        if alone is None:
            # No leases here: the tables of processes, loop devices and swap have to do.
            alone = locking.user(fd) is None
    except BaseException:
        door.open()
        raise
    if alone:
        return door
    door.open()
    return None


def _call(name: str, *args: object) -> int:
    """One of fanotify's calls; a kernel or a user that cannot is a refusal."""
    function = getattr(_LIBC, name)
    function.restype = ctypes.c_int
    answer: int = function(*args)
    if answer >= 0:
        return answer
    number = ctypes.get_errno()
    if number in {errno.EPERM, errno.ENOSYS, errno.EINVAL}:
        raise RefusedError(
            "guests_unknown",
            f"this host does not let the agent hold back programs that open the image ({os.strerror(number)}); run "
            "the agent as root on the host itself, outside any container, or reclaim with a copy",
        )
    raise OSError(number, os.strerror(number))
