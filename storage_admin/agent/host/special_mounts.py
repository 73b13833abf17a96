"""Mounts that need care: those whose server may be away, and those of a single file.

Whoever looks at a file of a server that is away waits until it is back, perhaps for ever. A scan looks at none of them
that gives no sign of life, and nobody who asks which process has a file open looks at what lies there. Else one storage
that is away would stop all work on a host.

Where a file is mounted by itself, that is a further name of it, which no folder and no count of links tells of.
``mount --bind`` makes one, and docker, podman and LXC do for each single file that a container gets. Whoever uses it
goes on with the file that was mounted, whatever takes the file's own name.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from storage_admin.agent.host.mounts import Mount, Mounts, is_quiet, mounted, opened, parse
from storage_admin.agent.protocol import RefusedError, display

#: Seconds for a sign of life: a server that is up and busy answers sooner, one that starts again later.
PATIENCE = 10.0
#: Pools that this process leaves alone, as they did not answer when it began.
left_alone: set[bytes] = set()
#: Each path in a thread of its own; what answers is told by its place. An error is an answer, too. Once, or again after
#: so many seconds, until nobody listens any more.
_LOOK = r"""
import os, sys, threading, time
def look(place, path, again):
    while True:
        try:
            os.statvfs(path)
            with os.scandir(path) as entries:
                next(entries, None)
        except OSError:
            pass
        try:
            os.write(1, b"%d\n" % place)
        except OSError:
            return
        if not again:
            return
        time.sleep(again)
for place, path in enumerate(sys.argv[2:]):
    threading.Thread(target=look, args=(place, os.fsencode(path), float(sys.argv[1]))).start()
"""


def trusted(paths: Sequence[bytes], mounts: Mounts, check: Callable[[], None]) -> set[bytes]:
    """Has the pools that answer looked at from now on, and what is mounted below them and answers, too.

    Args:
        paths: of pools.
        mounts: of this machine; learns which filesystems are read anyway.
        check: called now and then; raises to stop.

    Returns:
        The pools that do not answer, which nobody may touch.
    """
    looked_at = [*paths, *mounts.shared_below(paths)]
    away = silent(looked_at, check) if mounts.waits else set()
    for path in looked_at:
        if path not in away:
            mounts.trust(mounts.of_path(os.path.normpath(path)))
    left_alone.update(away)
    return away.intersection(paths)


def silent(paths: Sequence[bytes], check: Callable[[], None], patience: float | None = None) -> set[bytes]:
    """Those folders that do not answer. Another process looks at them, which can be left behind.

    Args:
        paths: absolute ones.
        check: called now and then; raises to stop.
        patience: seconds for all of them together; :data:`PATIENCE` where it is not given.
    """
    if not paths:
        return set()
    deadline = time.monotonic() + (PATIENCE if patience is None else patience)
    process = looking(paths, 0)
    answered: set[int] = set()
    try:
        if process.stdout is None:
            raise TypeError("the pipe is missing")
        pending = b""
        while time.monotonic() < deadline:
            check()
            if not select.select([process.stdout], [], [], 0.2)[0]:
                continue
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:  # it has seen them all, or could not be started: what it did not tell is looked at
                return set()
            *lines, pending = (pending + chunk).split(b"\n")
            answered.update(map(int, lines))
    finally:
        process.kill()
        # One that the kernel does not let go ends when the server is back; nobody waits for it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        if process.stdout is not None:
            process.stdout.close()
    return {path for place, path in enumerate(paths) if place not in answered}


def looking(paths: Sequence[bytes], again: float) -> subprocess.Popen[bytes]:
    """A process that looks at each of these paths and writes the number of each that answers to its pipe, a line each.

    Args:
        again: seconds after which it looks again; 0 for one look. It goes on until the pipe is closed.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LOOK, str(again), *paths], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


class Descriptors:
    """Which open files of other processes are better not looked at. Made once for a look at all of them.

    Args:
        devices: of the files that are looked for (``st_dev``): those are read anyway.
        inodes: their numbers.
    """

    def __init__(self, devices: Collection[int], inodes: Collection[int]) -> None:
        self._devices, self._inodes = devices, inodes
        self._here = _mounts("self")
        self._known = {_namespace("self"): self._here}
        #: The process that was asked about last, and its mounts: one is asked about descriptor by descriptor.
        self._of = "", self._here

    def may_wait(self, pid: str, descriptor: str) -> bool:
        """Whether looking at a process's open file could take for ever: of its mount alone, and never of the file.

        A mount that nobody sees any more (``umount --lazy``) may be one of those that do not answer. Of a file that was
        reached through one the number decides whether it could be one that is looked for.
        """
        if self._of[0] != pid:
            namespace = _namespace(pid)
            if namespace not in self._known:
                self._known[namespace] = _mounts(pid)
            self._of = pid, self._known[namespace]
        try:
            mount, inode = opened(pid, descriptor)
        except OSError:
            return False  # closed meanwhile, or not ours to look into: as looking at it will tell
        # Also here: an open file may have come from another process.
        for known in (self._of[1], self._here):
            if mount in known:
                device = known[mount]
                return device is not None and device not in self._devices
        return inode is not None and inode not in self._inodes


def _namespace(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""  # ended, or another user's


def _mounts(pid: str) -> dict[int, int | None]:
    """The mounts by their ids: the devices of those that may make one wait, ``None`` for the others."""
    try:
        return {mount.id: mount.device if mount.may_wait else None for mount in mounted(pid)}
    except OSError:
        return {}


#: The mark of a name that is gone (fs/proc_namespace.c).
_GONE = b"//deleted"


@dataclass(frozen=True)
class _Sought:
    """The file: ``device`` of its filesystem as mountinfo has it (on btrfs not ``st_dev``), ``root`` its path there."""

    device: int
    identity: tuple[int, int]
    root: bytes


def refuse_mounted(fd: int, shown: str) -> None:
    """Refuse a file that is mounted by itself, here or in a container.

    Args:
        fd: descriptor of the file.
        shown: its path for a sentence.

    Raises:
        RefusedError: ``hard_linked``.
    """
    if (where := mounted_at(fd)) is not None:
        raise RefusedError(
            "hard_linked", f"{shown} is mounted as a file {where}, which would keep using the old content; unmount it"
        )


def mounted_at(fd: int) -> str | None:
    """Where a file is mounted by itself, as far as this process may see the mounts of others.

    Args:
        fd: descriptor of the file.

    Returns:
        A phrase such as ``at /srv/disk.img of process 4711 (nginx)``, or ``None``.
    """
    sought = _sought(fd)
    for pid in _views():
        try:
            with open(f"/proc/{pid}/mountinfo", "rb") as file:
                lines = file.read().splitlines()
        except OSError:
            continue  # it has ended
        for mount in _of_this_file(pid, lines, sought):
            return f"at {display(mount.point)}" + ("" if pid == "self" else f" of process {pid} ({_command(pid)})")
    return None


def _sought(fd: int) -> _Sought:
    status, path = os.fstat(fd), os.readlink(b"/proc/self/fd/%d" % fd)
    mount = Mounts.of_this_machine().of_descriptor(fd)
    if mount is None:
        return _Sought(status.st_dev, (status.st_dev, status.st_ino), path)
    return _Sought(mount.device, (status.st_dev, status.st_ino), b"/" + mount.inside(path))


def _views() -> Iterator[str]:
    """A process for each set of mounts, this one first: who has another root sees other mounts of a namespace."""
    seen = set()
    for pid in ("self", *filter(str.isdigit, os.listdir("/proc"))):
        try:
            view = os.readlink(f"/proc/{pid}/ns/mnt"), os.readlink(f"/proc/{pid}/root")
        except OSError:
            continue  # ended, or another user's
        if view not in seen:
            seen.add(view)
            yield pid


def _of_this_file(pid: str, lines: list[bytes], sought: _Sought) -> Iterator[Mount]:
    """The mounts of the file; nothing is looked at that could make one wait."""
    device = b" %d:%d " % (os.major(sought.device), os.minor(sought.device))
    whole = device + b"/ "  # the filesystem itself, whose root is no file
    mounts = _parse(line for line in lines if device in line and whole not in line)
    if not mounts:
        return
    # The file's own filesystem has just been looked at, and answers.
    waits = [mount for mount in _parse(line for line in lines if not is_quiet(line)) if mount.device != sought.device]
    waiting = tuple(mount.point.rstrip(b"/") + b"/" for mount in waits if mount.may_wait)
    for mount in mounts:
        if mount.device == sought.device and _is_the_file(pid, mount, sought, waiting):
            yield mount


def _parse(lines: Iterable[bytes]) -> list[Mount]:
    return parse(b"\n".join(lines))


def _is_the_file(pid: str, mount: Mount, sought: _Sought, waiting: tuple[bytes, ...]) -> bool:
    if mount.root == sought.root:
        return True
    # The name that was mounted may be another one than the file has now.
    path, can_look = b"/proc/%s/root%s" % (pid.encode(), mount.point), not (mount.point + b"/").startswith(waiting)
    if can_look and _identity(path) == sought.identity:
        return True
    if os.path.basename(mount.root.removesuffix(_GONE)) != os.path.basename(sought.root):
        return False
    return not (can_look and _is_on_top(path, mount))


def _identity(path: bytes) -> tuple[int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_on_top(path: bytes, mount: Mount) -> bool:
    """Whether what is seen there is this mount, and not another one that was laid over it."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return opened("self", fd)[0] == mount.id
        finally:
            os.close(fd)
    except OSError:
        return False


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return display(file.read().rstrip(b"\n"))
    except OSError:
        return "it has just ended"
