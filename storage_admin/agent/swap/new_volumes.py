"""A logical volume that a job makes: hidden until it is complete, and then with the name that it is to have.

Its tag, which LVM writes in the same step as the volume, says whose it is and what it will be called (docs/safety.md,
section 2.7).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from storage_admin.agent.host import lvm
from storage_admin.agent.host.space import Reserve
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INTERRUPTED, INVALID, Arguments, HostError, RefusedError, Request
from storage_admin.agent.swap import lvm_volumes, thin_volumes, volumes
from storage_admin.agent.swap.lvm_volumes import LogicalVolume
from storage_admin.agent.swap.volumes import Place, change

#: Seconds between two looks at how full a thin pool is while it is written to.
LOOKS = 2.0


@dataclass(frozen=True)
class Wanted:
    """Where a volume is to be made.

    Args:
        place: its group, and the name that it is to have.
        pool: the thin pool; empty for a thick volume.
        reserve: what has to stay free in a thin pool.
    """

    place: Place
    pool: str
    reserve: Reserve

    @classmethod
    def parse(cls, args: Arguments) -> Wanted:
        """The argument ``volume``: ``group``, ``group_id``, ``name``, ``pool``; and ``reserve``.

        Raises:
            RefusedError: ``invalid``.
        """
        given = Arguments(args.take("volume", dict), frozenset({"group", "group_id", "name", "pool"}))
        group, group_id, name = (given.take(key, str) for key in ("group", "group_id", "name"))
        wanted = cls(Place("lvm", group, group_id, name, ""), given.take("pool", str), Reserve.parse(args))
        lvm_volumes.check(wanted.place)
        if (wanted.pool and not lvm.NAME.match(wanted.pool)) or not lvm.can_be_named(name):
            raise RefusedError(INVALID, "LVM has no thin pool, or takes no new volume, of that name")
        return wanted


@dataclass
class NewVolume:
    """One that a job has made, perhaps larger than was asked for: LVM gives whole extents."""

    wanted: Wanted
    request: Request
    io: AgentIO
    one: LogicalVolume
    is_published: bool = field(default=False, init=False)
    _looked: float = field(default=0.0, init=False)

    @property
    def path(self) -> bytes:
        """Of its device."""
        return f"/dev/{self.one.path}".encode()

    @property
    def zeroed(self) -> bool:
        """Whether it reads as zeros as long as nothing is written."""
        return bool(self.wanted.pool)

    def watch(self) -> None:
        """Refuse (``not_enough_space``) as soon as its thin pool has no more free than its reserve."""
        if self.wanted.pool and time.monotonic() > self._looked + LOOKS:
            self._looked = time.monotonic()
            _refuse_full(self.wanted, 0, self.io)

    def publish(self, look_again: Callable[[], None]) -> int:
        """Give it the name that it is to have; from then on the job has succeeded.

        Args:
            look_again: raises where what it was copied from has changed.

        Returns:
            Bytes that it takes of its group, or of its thin pool.
        """
        place, self.one = self.wanted.place, self._found()
        taken = self.one.taken
        if self.wanted.pool:  # LVM tells hundredths of a percent
            taken = thin_volumes.mapped_bytes(lvm.dm_name(self.one.group, self.one.name), self.io)
        self.io.wait_for_go(self.request.generation, before_bytes=0, made_bytes=taken, made_inode=self.one.id)
        with volumes.alone(lvm_volumes, place.group, self.io.check) as lock:
            look_again()
            volumes.give_name(lvm_volumes, place, self.one, place.name, self.io, lock)
            self.is_published = True
        self.one = replace(self.one, name=place.name)
        return taken

    def finish(self) -> None:
        """It is like any other volume from now on."""
        with left_to_recovery(), volumes.alone(lvm_volumes, self.wanted.place.group, patiently) as lock:
            one = self._found()
            if one.journal is not None:
                lvm_volumes.give_back(one, one.journal, self.io, lock)

    def remove(self) -> None:
        """Take it away again."""
        with left_to_recovery(), volumes.alone(lvm_volumes, self.wanted.place.group, patiently) as lock:
            lvm_volumes.hide(self.one, self.io, lock)
            change(["lvremove", "--yes", self.one.path], self.io, lock)

    def _found(self) -> LogicalVolume:
        return volumes.find(lvm_volumes, replace(self.wanted.place, id=self.one.id), self.one.name, self.io)


def patiently() -> None:
    """Nobody ends this."""


@contextlib.contextmanager
def left_to_recovery() -> Iterator[None]:
    """The last steps, which do not change any more how the job ends: what fails there, a recovery does.

    Raises:
        HostError: ``interrupted``.
    """
    try:
        yield
    except (RefusedError, HostError) as error:
        raise HostError(f"{error.detail}; recover the host", INTERRUPTED) from error


@contextlib.contextmanager
def made(wanted: Wanted, size: int, needed: int, request: Request, io: AgentIO) -> Iterator[NewVolume]:
    """A new volume, which goes again unless it was published.

    Args:
        size: in bytes, at least.
        needed: the most of a thin pool that is going to be written, in bytes, as far as it is known.

    Raises:
        RefusedError: ``target_exists``, ``shared_pool``, ``not_enough_space``, ``unsupported_pool``, ``stale_plan``,
            ``busy``, ``tool_missing``.
        HostError: LVM does not answer, or makes none.
    """
    place, name = wanted.place, volumes.new_name(request.job)
    with volumes.alone(lvm_volumes, place.group, io.check) as lock:
        lvm_volumes.refuse_shared(place, io)
        taken = {one.name for one in lvm_volumes.there([], io) if one.group == place.group}
        if place.name in taken:
            raise RefusedError("target_exists", f"there is a volume {place.group}/{place.name} already")
        if name in taken:
            raise RefusedError("busy", f"an earlier run has left {place.group}/{name}; recover the host")
        if wanted.pool:
            _refuse_unzeroed(wanted, io)
        _refuse_full(wanted, needed if wanted.pool else size, io)
        # Of a new thin volume LVM takes no such option.
        knows = not wanted.pool and bool(lvm_volumes.autoactivation(io))
        tag = f"sa-{request.job}.m{'y' if knows else 'n'}.{place.name}"
        where = (
            ["--type", "thin", "-V", f"{size}b", "--thinpool", wanted.pool]
            if wanted.pool
            else ["-L", f"{size}b", "-Wn", "-Zn"]
        )
        only = ["--setautoactivation", "n"] if knows else []
        change(["lvcreate", "--yes", *where, "-n", name, "--addtag", tag, *only, place.group], io, lock)
        [one] = [one for one in lvm_volumes.there([], io) if (one.group, one.name) == (place.group, name)]
    new = NewVolume(wanted, request, io, one)
    try:
        yield new
    finally:
        if not new.is_published:
            new.remove()


def _refuse_unzeroed(wanted: Wanted, io: AgentIO) -> None:
    """Let only a thin pool be written to that zeroes what it gives to a volume."""
    lines = lvm.ask("lvs", "lv", "vg_name,lv_name,lv_layout,zero", io, to_end=True)
    told = [line for line in lines if (line["vg_name"], line["lv_name"]) == (wanted.place.group, wanted.pool)]
    if len(told) != 1 or not {"thin", "pool"} <= set(told[0]["lv_layout"].split(",")):
        raise RefusedError("stale_plan", f"{wanted.place.group} has no thin pool {wanted.pool}; scan the host")
    if told[0]["zero"] != "zero":
        raise RefusedError(
            "unsupported_pool",
            f"the thin pool {wanted.place.group}/{wanted.pool} does not zero what it gives to a volume, so that a disk "
            "could show what others have left there; change that first (lvchange -Zy)",
        )


def _refuse_full(wanted: Wanted, needed: int, io: AgentIO) -> None:
    """Let nothing be written that a group has no room for, or that would fill a thin pool up to its reserve."""
    group, pool = wanted.place.group, wanted.pool
    if not pool:
        lines = [line for line in lvm.ask("vgs", "vg", "vg_name,vg_free", io, to_end=True) if line["vg_name"] == group]
        free = int(lines[0]["vg_free"]) if len(lines) == 1 else 0
        if free < needed:
            raise RefusedError("not_enough_space", f"{group} has {free} bytes free, {needed} are needed")
        return
    told = next((one for one in lvm.thin_pools(io) if (one["group"], one["name"]) == (group, pool)), None)
    if told is None or told["mode"] != "rw" or told["needs_check"]:
        raise RefusedError("busy", f"the thin pool {group}/{pool} is not active, or takes no writes now")
    free = told["size"] - told["used"] - wanted.reserve.of(told["size"])
    if free < needed or 5 * told["metadata_used"] > 4 * told["metadata_size"]:
        raise RefusedError(
            "not_enough_space",
            f"{group}/{pool} has {max(free, 0)} bytes free above its reserve, {needed} are needed, and of its metadata "
            f"{told['metadata_used']} of {told['metadata_size']} bytes are in use; extend the pool first",
        )
