"""How much room a filesystem has, and what has to stay free on it for the guests that run."""

from __future__ import annotations

import os
from dataclasses import dataclass

from storage_admin.agent.host import fiemap
from storage_admin.agent.protocol import RefusedError


@dataclass(frozen=True)
class Reserve:
    """What no job may take: the larger of a share of the filesystem (percent) and a number of bytes."""

    percent: float
    minimum_bytes: int

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
    return max(allocated(fd) - fiemap.shared_bytes(fd), 0)


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
            f"the work may need {needed_bytes} bytes and {kept} have to stay free, other jobs need "
            f"{reserved_elsewhere_bytes}, but only {now.available_bytes} are available; "
            "free some space in this storage pool, or analyze the image fully for a tighter bound",
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
            f"only {now.available_bytes} bytes were left while the work went on; it was stopped so that running guests "
            "keep their room. Free some space in this storage pool and try again",
        )
