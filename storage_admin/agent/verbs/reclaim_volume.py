"""Give back what a volume of a thin pool holds as zeros (docs/volumes.md).

Nothing that is read changes: where it has nothing, it reads as zeros. What could do harm is a write between the moment
when a chunk is read as zeros and the moment when it goes. So all of it is read first, while it has its name and guests
may start; then it is renamed, so that no guest finds it, and only what was zeros is read again and given back, on a
device of the job's own. The volume has its name again however that ends.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent.host import priority, private_device, thin
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure import volume_zeros
from storage_admin.agent.measure.volume_zeros import Range
from storage_admin.agent.protocol import OCCUPIED, Arguments, HostError, RefusedError, Request
from storage_admin.agent.swap import lvm_volumes, thin_volumes, volumes
from storage_admin.agent.swap.thin_volumes import ThinVolume
from storage_admin.agent.swap.volumes import Place, left_to_recovery
from storage_admin.agent.verbs.aside_volume import WHERE
from storage_admin.agent.verbs.reclaim import LOOK_INTERVAL, Pace

#: Seconds between two times that it is told what was freed.
TELLS = 5.0


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Give back the chunks of a thin volume that hold zeros.

    Args:
        request: ``args``: ``group``, ``group_id``, ``name`` and ``id`` of the volume, as LVM told them for the plan;
            ``bandwidth_bytes_sec`` (or null), ``idle_io``: of the first reading.
        io: the controller.

    Returns:
        As :func:`reclaim.dig`, with ``method``: of the volume's own space in its pool; ``freed_bytes`` is what the pool
        has less in use, so not what snapshots of the volume still have.

    Raises:
        RefusedError: ``stale_plan``, ``image_in_use``, ``has_overlays``, ``shared_pool``, ``unsupported_pool``,
            ``busy``, ``not_enough_space``, ``tool_missing``.
        HostError, StoppedError: the volume reads as before, and has its own name; as ``interrupted``, as where that was
            taken meanwhile, a recovery sees to that.
    """
    started = time.monotonic()
    args = Arguments(request.args, WHERE | {"bandwidth_bytes_sec", "idle_io"})
    place, idle = Place.parse(args), args.get("idle_io", bool, True)
    lvm_volumes.check(place)
    work = _Work(request, io, place, Pace(args.size("bandwidth_bytes_sec")))
    try:
        with priority.idle(idle):
            zeros, before = work.look()
        after = freed = None
        if zeros:
            io.progress("swapping", 0, None, "waiting for the go-ahead")
            io.wait_for_go(request.generation)
            before, after, freed = work.give_back(zeros)
    except OSError as error:
        raise HostError(f"{place.group}/{place.name} could not be read: {error.strerror}") from error
    return {
        "method": "in_place", "before_bytes": before, "after_bytes": before if after is None else after,
        "held_bytes": 0, "freed_bytes": freed or 0, "swapped": False, "changed": bool(freed), "undo": None,
        "seconds": round(time.monotonic() - started, 3),
    }  # fmt: skip


def analyze(request: Request, io: AgentIO) -> dict[str, Any]:
    """Estimate what a thin volume would give back, by chunks of it that are drawn by chance.

    Args:
        request: ``args``: as of :func:`run`, without the last two.
        io: the controller.

    Returns:
        As ``analyze`` says of an image.

    Raises:
        RefusedError, HostError, StoppedError: as :func:`run`; nothing has changed.
    """
    started = time.monotonic()
    place = Place.parse(Arguments(request.args, WHERE))
    lvm_volumes.check(place)
    one = thin_volumes.find(place, io)
    mapped = one.mapped(io)
    try:
        with one.device(request.job) as fd, priority.idle(True):
            found = volume_zeros.sample(fd, mapped, one.chunk, io)
    except OSError as error:
        raise HostError(f"{place.group}/{place.name} could not be read: {error.strerror}") from error
    return {"mode": "sample", **found, "seconds": round(time.monotonic() - started, 3)}


@dataclass
class _Work:
    request: Request
    io: AgentIO
    place: Place
    pace: Pace
    _read: int = field(default=0, init=False)
    _total: int = field(default=0, init=False)
    _stage: str = field(default="reading", init=False)

    def look(self) -> tuple[list[Range], int]:
        """The stretches of zeros that the volume has, and the bytes that it has in all. It keeps its name."""
        self.io.progress("checking", 0, None, "checking the volume and its pool")
        lvm_volumes.refuse_shared(self.place, self.io)
        one = self._seen()
        mapped = self._mapped(one)
        self._begin(sum(end - begin for begin, end in mapped) * one.chunk)
        with one.device(self.request.job) as fd:
            found = volume_zeros.find(fd, mapped, one.chunk, self._step)
        return found, self._total

    def _seen(self) -> ThinVolume:
        one = thin_volumes.find(self.place, self.io)
        if one.volume.journal:
            text = f"{one.volume.path} carries the tag {one.volume.journal.text} of a job; recover the host first"
            raise RefusedError("busy", text)
        lvm_volumes.refuse_used(one.volume, self.io)
        thin_volumes.refuse_unfit(one, self.io)
        return one

    def _mapped(self, one: ThinVolume) -> list[Range]:
        """What it has of its pool, once nobody else looks through the pool's metadata."""
        deadline = time.monotonic() + volumes.PATIENCE
        while True:
            try:
                return one.mapped(self.io)
            except RefusedError as error:
                if error.code != "busy" or time.monotonic() > deadline:
                    raise
            self.io.check()
            time.sleep(1.0)

    def give_back(self, zeros: list[Range]) -> tuple[int, int, int]:
        """Let go of these where they are zeros still.

        Returns:
            Bytes that the volume has before and after, and what its pool has less in use.
        """
        self._begin(sum(end - begin for begin, end in zeros), "discarding")
        with volumes.alone(lvm_volumes, self.place.group, self.io.check) as lock:
            one, name = self._seen(), volumes.work_name(self.request.job)
            tag = lvm_volumes.write_journal(one.volume, self.request.job, self.io, lock)
            try:
                lvm_volumes.hide(one.volume, self.io, lock)
                volumes.give_name(lvm_volumes, self.place, one.volume, name, self.io, lock)
                now = volumes.find(lvm_volumes, self.place, name, self.io)
                if now.active:
                    raise RefusedError("image_in_use", f"the volume {one.volume.path} was activated at this moment")
                return self._discard(one, zeros)
            finally:
                with left_to_recovery():
                    volumes.put_back(lvm_volumes, self.place, tag, self.io, lock)

    def _discard(self, one: ThinVolume, zeros: list[Range]) -> tuple[int, int, int]:
        device = private_device.NAME + self.request.job
        with one.device(self.request.job, to_write=True) as fd:
            before, used = thin.mapped_bytes(device, self.io), lvm_volumes.used_with(one.volume, self.io)
            self.io.emit(OCCUPIED, before_bytes=before)
            told = time.monotonic()

            def tell() -> tuple[int, int, int]:
                os.fsync(fd)  # the pool counts what was let go of once its metadata are written
                after, now = thin.mapped_bytes(device, self.io), lvm_volumes.used_with(one.volume, self.io)
                # Other volumes of the pool may have taken or let go of some meanwhile.
                freed = 0 if used is None or now is None else min(max(used - now, 0), before - after)
                self.io.emit(OCCUPIED, before_bytes=before, after_bytes=after, freed_bytes=freed)
                return before, after, freed

            def step(read: int) -> None:
                nonlocal told
                self._step(read)
                if time.monotonic() - told > TELLS:  # so that it is known also of an agent that is killed
                    tell()
                    told = time.monotonic()

            try:
                volume_zeros.give_back(fd, zeros, one.chunk, step)
            except BaseException:
                tell()
                raise
            return tell()

    def _begin(self, total: int, stage: str = "reading") -> None:
        self._read, self._total, self._stage = 0, total, stage

    def _step(self, read: int) -> None:
        """Go on after so many bytes: tells how far it is, and keeps to the limit."""
        self.io.check()
        self._read += read
        self.io.progress(self._stage, self._read, self._total)
        self.pace.took(read)
        while (left := self.pace.left()) > 0:
            time.sleep(min(left, LOOK_INTERVAL))
            self.io.check()
