"""Somebody who may rename in a pool, and what shows whether he led anybody out of it."""

import ctypes
import errno
import os
import random
import struct
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_LIBC = ctypes.CDLL(None, use_errno=True)
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
#: inotify(7): opened, changed, attributes, moved from and to, made, removed. Asking for a status is none of these.
_EVENTS = 0x20 | 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200
_EVENT = struct.Struct("iIII")


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step, as ``renameat2`` does; whether both were there."""
    if not _LIBC.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    assert number == errno.ENOENT, os.strerror(number)
    return False


class Swapper:
    """Exchanges two names again and again while it is entered, at random moments.

    Args:
        chance: where the luck comes from.
        pairs: of names; each time one of them is exchanged.
        pause: the longest time between two exchanges, in seconds.
    """

    def __init__(self, chance: random.Random, pairs: list[tuple[Path, Path]], pause: float) -> None:
        self._chance, self._pairs, self._pause = chance, pairs, pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.exchanges = 0

    def _work(self) -> None:
        while not self._stop.is_set():
            self.exchanges += exchange(*self._chance.choice(self._pairs))
            time.sleep(self._chance.uniform(0, self._pause))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()


class Watch:
    """Notes every opening and every change of a folder and of the files in it, by whatever path.

    Args:
        folder: that is watched from now on.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0
        assert _LIBC.inotify_add_watch(self._fd, os.fsencode(folder), _EVENTS) >= 0

    def seen(self) -> list[str]:
        """What was noted since the last time, as what and to which file."""
        found: list[str] = []
        while True:
            try:
                raw = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return found
            at = 0
            while at < len(raw):
                _, mask, _, length = _EVENT.unpack_from(raw, at)
                name = raw[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0")
                found.append(f"{mask:#x} {name!r}")
                at += _EVENT.size + length

    def close(self) -> None:
        """End the watch."""
        os.close(self._fd)
