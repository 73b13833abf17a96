"""A volume that a job makes: hidden until it is complete, and then with the name that it is to have.

Its journal, which LVM and ZFS write in the same step as the volume, says whose it is and what it will be called
(docs/volumes.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from storage_admin.agent.host import devices, space
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import RefusedError, Request
from storage_admin.agent.swap import lvm_volumes, volumes, zfs_volumes
from storage_admin.agent.swap.volumes import Maker, Volume, Wanted, left_to_recovery

MAKERS: dict[str, Maker[Any]] = {"lvm": lvm_volumes, "zfs": zfs_volumes}


@dataclass
class NewVolume:
    """One that a job has made, perhaps larger than was asked for: LVM gives whole extents, ZFS whole blocks."""

    backend: Maker[Any]
    wanted: Wanted
    request: Request
    io: AgentIO
    one: Volume
    is_published: bool = field(default=False, init=False)

    @property
    def zeroed(self) -> bool:
        """Whether it reads as zeros as long as nothing is written."""
        return self.backend.is_sparse(self.wanted)

    def watch(self) -> None:
        """Refuse (``not_enough_space``) where what it takes its space of has no more free than its reserve."""
        if self.zeroed:
            self.backend.refuse_full(self.wanted, 0, self.io)

    def publish(self, look_again: Callable[[], None]) -> int:
        """Give it the name that it is to have; from then on the job has succeeded.

        Args:
            look_again: raises where what it was copied from has changed.

        Returns:
            Bytes that it takes of its group, or of its pool.
        """
        place, self.one = self.wanted.place, self._found()
        taken = self.backend.taken(self.one, self.io)
        self.io.wait_for_go(self.request.generation, before_bytes=0, made_bytes=taken, made_inode=self.one.id)
        with volumes.alone(self.backend, place.group, self.io.check) as lock:
            look_again()
            volumes.give_name(self.backend, place, self.one, place.name, self.io, lock)
            self.is_published = True
        self.one = replace(self.one, name=place.name)
        return taken

    def finish(self) -> None:
        """It is like any other volume from now on."""
        with left_to_recovery(), volumes.alone(self.backend, self.wanted.place.group, patiently) as lock:
            one = self._found()
            if one.journal is not None:
                self.backend.give_back(one, one.journal, self.io, lock)
            self.backend.device(one)

    def remove(self) -> None:
        """Take it away again."""
        with left_to_recovery(), volumes.alone(self.backend, self.wanted.place.group, patiently) as lock:
            one = self._found()
            if one.journal is not None:
                self.backend.hide(one, self.io, lock)
                self.backend.remove(one, one.journal, self.io, lock)

    def _found(self) -> Volume:
        found: Volume = volumes.find(self.backend, replace(self.wanted.place, id=self.one.id), self.one.name, self.io)
        return found


def watch_below(number: int, reserve: space.Reserve, io: AgentIO) -> Callable[[], None]:
    """Look at what becomes fuller as a block device is written: thin pools of LVM, datasets of ZFS.

    Args:
        number: of the device, as ``st_rdev`` has it.

    Returns:
        A look at them, which refuses (``not_enough_space``, ``busy``) where one has no more free than its reserve.
    """
    names = devices.below(number)
    filled = [(one, wanted) for one in MAKERS.values() for wanted in one.filled(names, reserve, io)]

    def look() -> None:
        for backend, wanted in filled:
            backend.refuse_full(wanted, 0, io)

    return look


def patiently() -> None:
    """Nobody ends this."""


@contextlib.contextmanager
def made(
    backend: Maker[Any], wanted: Wanted, size: int, needed: int, request: Request, io: AgentIO
) -> Iterator[NewVolume]:
    """A new volume, which goes again unless it was published.

    Args:
        size, needed: as of :meth:`Maker.make`.

    Raises:
        RefusedError: ``target_exists``, ``shared_pool``, ``not_enough_space``, ``unsupported_pool``, ``stale_plan``,
            ``busy``, ``tool_missing``.
        HostError: the backend does not answer, or makes none.
    """
    place, name = wanted.place, volumes.new_name(request.job)
    with volumes.alone(backend, place.group, io.check) as lock:
        backend.refuse_shared(place, io)
        taken = {one.name for one in backend.there([], io) if one.group == place.group}
        if place.name in taken:
            raise RefusedError("target_exists", f"there is a volume {place.group}/{place.name} already")
        if name in taken:
            raise RefusedError("busy", f"an earlier run has left {place.group}/{name}; recover the host")
        one = backend.make(wanted, size, needed, request.job, io, lock)
    new = NewVolume(backend, wanted, request, io, one)
    try:
        yield new
    finally:
        if not new.is_published:
            new.remove()
