"""A file system for one tool, with nothing in it but what the tool was given: for kernels without Landlock.

There is no ``/proc`` in it, through which others lead out: what a tool was given as a descriptor stands there as a file
of its own, ``/proc/self/fd/N``, bound read-only unless it is to be written to. Its network is empty as well.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence

LIBC = ctypes.CDLL(None, use_errno=True)

# linux/sched.h, linux/mount.h
_NEW_MOUNTS, _NEW_IPC, _NEW_NETWORK = 0x00020000, 0x08000000, 0x40000000
_READ_ONLY, _NO_SETUID, _REMOUNT, _BIND, _MOVE, _RECURSIVE, _PRIVATE = 1, 2, 32, 4096, 8192, 16384, 1 << 18
#: Where it is put together, in a mount namespace of its own; what stands there is covered only for the tool.
_ROOT = "/tmp"  # noqa: S108 - nothing is read from it


def checked(result: int) -> int:
    """What a call of :data:`LIBC` answered; raises OSError where that is -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def possible() -> bool:
    """Whether this process may make such a file system: tried out."""
    program = "/bin/true"
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    with open("/dev/null", "rb") as empty:
        enclosure = Enclosure(read=[empty.fileno()], written=[], seen=[*libraries, program], used=[])
        try:
            done = subprocess.run([program], preexec_fn=enclosure.enter, check=False)
        except (OSError, subprocess.SubprocessError):
            return False
    return done.returncode == 0


class Enclosure:
    """What the tool will see.

    Args:
        read: descriptors of files that it may read.
        written: of those that it may write as well.
        seen: absolute paths of files and folders that it may read; those that are missing are left out.
        used: of those that it may write as well.
    """

    def __init__(
        self, *, read: Sequence[int], written: Sequence[int], seen: Sequence[str], used: Sequence[str]
    ) -> None:
        self._fds = [(fd, f"/proc/self/fd/{fd}", fd in written) for fd in sorted({*read, *written})]
        self._links, self._paths = [], []
        for path in dict.fromkeys((*seen, *used)):
            if os.path.islink(path) and os.path.isdir(path):
                self._links.append((path, os.readlink(path)))
            elif os.path.exists(path):
                self._paths.append((path, path in used))

    def enter(self) -> None:
        """Called in the tool's process, between fork and exec.

        Raises:
            OSError: it cannot be made, or the file that a descriptor leads to has another name by now.
        """
        checked(LIBC.unshare(_NEW_MOUNTS | _NEW_IPC | _NEW_NETWORK))
        self._mount(None, "/", _RECURSIVE | _PRIVATE)
        places = [(_named(fd), place, written) for fd, place, written in self._fds]
        places += [(os.open(path, os.O_PATH), path, used) for path, used in self._paths]
        self._mount("none", _ROOT, _NO_SETUID, b"tmpfs")
        for path, leads_to in self._links:
            os.makedirs(_ROOT + os.path.dirname(path), exist_ok=True)
            os.symlink(leads_to, _ROOT + path)
        for fd, place, written in places:
            self._bind(fd, _ROOT + place, written=written)
        self._mount(None, _ROOT, _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID)
        os.chdir(_ROOT)
        self._mount(".", "/", _MOVE)
        os.chroot(".")
        os.chdir("/")

    def _bind(self, fd: int, place: str, *, written: bool) -> None:
        source = f"/proc/self/fd/{fd}"
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.isdir(source):
            os.makedirs(place, exist_ok=True)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))
        self._mount(source, place, _BIND)
        if not written:
            self._mount(None, place, _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID)

    @staticmethod
    def _mount(source: str | None, target: str, flags: int, kind: bytes | None = None) -> None:
        named = None if source is None else os.fsencode(source)
        checked(LIBC.mount(named, os.fsencode(target), kind, ctypes.c_ulong(flags), None))


def _named(fd: int) -> int:
    """The same file in this mount namespace, where the descriptor's own mount is none that could be bound."""
    found = os.open(os.readlink(b"/proc/self/fd/%d" % fd), os.O_PATH | os.O_NOFOLLOW)
    if not os.path.sameopenfile(fd, found):
        raise FileNotFoundError("the file has another name by now")
    return found
