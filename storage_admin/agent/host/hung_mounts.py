"""Filesystems whose server may be away: whoever looks at a file of theirs waits until it is back, perhaps for ever.

A scan looks at none of them that gives no sign of life, and nobody who asks which process has a file open looks at
what lies there. Else one storage that is away would stop all work on a host.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence

from storage_admin.agent.host.mounts import Mounts, mount_id, parse

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
    """

    def __init__(self, devices: Collection[int]) -> None:
        self._devices = devices
        self._here = _namespace("self")
        self._known = {self._here: _waiting("self")}

    def may_wait(self, pid: str, descriptor: str) -> bool:
        """Whether looking at a process's open file could take for ever: of its mount alone, and never of the file."""
        if not self._known[self._here]:
            return False
        namespace = _namespace(pid)
        if namespace not in self._known:
            self._known[namespace] = _waiting(pid)
        try:
            device = self._known[namespace].get(mount_id(pid, descriptor))
        except OSError:
            return False  # closed meanwhile, or not ours to look into: as looking at it will tell
        return device is not None and device not in self._devices


def _namespace(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""  # ended, or another user's


def _waiting(pid: str) -> dict[int, int]:
    """Devices of the mounts that may make one wait, by the mounts' ids."""
    try:
        with open(f"/proc/{pid}/mountinfo", "rb") as file:
            return {mount.id: mount.device for mount in parse(file.read()) if mount.may_wait}
    except OSError:
        return {}
