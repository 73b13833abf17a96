"""A volume gets another name and its own one back, or goes: protocol V (docs/volumes.md).

What LVM, ZFS and Ceph have in common; each is a :class:`Backend` in a module of its own. A volume has no folder for a
journal: what stands on the volume itself says which job set it aside, how it was found before, and its own name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from storage_admin.agent.host import locking, space
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INTERRUPTED, INVALID, Arguments, HostError, RefusedError
from storage_admin.agent.swap.journal import file_name

#: A command that changes a volume waits for others that hold its lock.
SECONDS = 120.0
#: Seconds for which another job that changes volumes of a group is waited for: by a job, and by a recovery.
PATIENCE, MOMENT = 600.0, 5.0
_LOOK_INTERVAL = 0.2
#: Bytes of the smallest chunk that a thin pool can have (lvmthin(7)).
UNIT = 64 << 10


@dataclass(frozen=True)
class Place:
    """A volume as the controller knows it: by ids of its backend, which a rename leaves as they are.

    Args:
        group: where it is: a volume group, a dataset of ZFS, a pool of Ceph (with its namespace).
        group_id: of the volume group, of the ZFS pool, of the Ceph cluster.
    """

    backend: str
    group: str
    group_id: str
    name: str
    id: str

    @classmethod
    def parse(cls, args: Arguments) -> Place:
        """The arguments ``backend``, ``group``, ``group_id``, ``name`` and ``id``.

        Raises:
            RefusedError: ``invalid``.
        """
        found = cls(*(args.take(name, str) for name in ("backend", "group", "group_id", "name", "id")))
        if not all(vars(found).values()):
            raise RefusedError(INVALID, "a volume has a backend, a group, a name and ids")
        return found


@dataclass(frozen=True)
class Wanted:
    """Where a volume is to be made.

    Args:
        place: its group, and the name that it is to have.
        pool: the thin pool of LVM; empty for any other volume.
        reserve: what has to stay free where space is taken as the volume is written.
    """

    place: Place
    pool: str
    reserve: space.Reserve

    @classmethod
    def parse(cls, args: Arguments) -> Wanted:
        """The argument ``volume``: ``backend``, ``group``, ``group_id``, ``name``, ``pool``; and ``reserve``.

        Raises:
            RefusedError: ``invalid``.
        """
        given = Arguments(args.take("volume", dict), frozenset({"backend", "group", "group_id", "name", "pool"}))
        backend, group, group_id, name = (given.take(key, str) for key in ("backend", "group", "group_id", "name"))
        return cls(Place(backend, group, group_id, name, ""), given.take("pool", str), space.Reserve.parse(args))


@dataclass(frozen=True)
class Journal:
    """What stands on a volume while it is set aside.

    Args:
        text: as the backend keeps it.
        before: how the volume was found before, in letters of the backend's own.
        makes: the job makes the volume, whose own name is the one that it will have.
    """

    text: str
    job: str
    before: str
    own_name: str
    makes: bool = False


@dataclass(frozen=True)
class Volume:
    """A volume as its backend tells it now.

    Args:
        taken: bytes that it takes; 0 where nobody tells.
        journal: of the job that has set it aside; none of another one.
        is_going: its deletion has begun, so that it is no longer whole.
    """

    group: str
    name: str
    id: str
    taken: int
    journal: Journal | None
    is_going: bool

    @property
    def path(self) -> str:
        """As commands and sentences name it."""
        return f"{self.group}/{self.name}"

    @property
    def is_at_work(self) -> bool:
        """Whether it has the name that its journal's job gave it for as long as it works on it."""
        return self.journal is not None and self.name == work_name(self.journal.job)

    @property
    def is_new(self) -> bool:
        """Whether its journal's job makes it, and it is not complete."""
        return self.journal is not None and self.journal.makes and self.name == new_name(self.journal.job)

    @property
    def is_aside(self) -> bool:
        """Whether it has the name that its journal's job gave it."""
        return self.journal is not None and self.name == aside_name(self.journal.job)


V = TypeVar("V", bound=Volume)


class Backend(Protocol[V]):
    """What differs between LVM, ZFS and Ceph. ``lock`` is a descriptor for the commands that change something."""

    #: Whether each of its commands is done or not, with nothing in between.
    is_atomic: bool

    def lock_name(self, group: str) -> str:
        """Of what one agent at a time changes the volumes, as part of a file's name."""

    def check(self, place: Place) -> None:
        """Refuse names that the backend gives to nothing (``invalid``)."""

    def refuse_shared(self, place: Place, io: AgentIO) -> None:
        """Let only volumes be changed that this host may change (``shared_pool``)."""

    def groups(self, places: Sequence[Place], io: AgentIO) -> set[str]:
        """Ids and names of the groups that tell of their volumes now: a volume of another one may come with its disks,
        unless a new one has its name.

        Raises:
            RefusedError: ``tool_missing``.
            HostError: the backend does not answer.
        """

    def there(self, places: Sequence[Place], io: AgentIO) -> list[V]:
        """The volumes of these places, by their ids, and whatever has a journal where the backend tells that.

        Raises:
            RefusedError: ``tool_missing``.
            HostError: the backend does not answer.
        """

    def refuse_used(self, one: V, io: AgentIO) -> None:
        """Let a volume go that nobody uses, and nothing is made of.

        Raises:
            RefusedError: ``image_in_use``, ``has_overlays``, ``busy``, ``unsupported_pool``.
        """

    def write_journal(self, one: V, job: str, io: AgentIO, lock: int) -> str:
        """Note on a volume that a job sets it aside; gives the text."""

    def hide(self, one: V, io: AgentIO, lock: int) -> None:
        """Take away by what it is used, which succeeds only while nobody uses it (``image_in_use``)."""

    def is_taken(self, place: Place, name: str, io: AgentIO) -> bool:
        """Whether there is a volume of that name beside it."""

    def rename(self, one: V, name: str, io: AgentIO, lock: int) -> None:
        """Give it another name in its group."""

    def tidy(self, one: V, name: str, io: AgentIO, lock: int) -> None:
        """Remove what a rename that was cut off has left of another name of the volume."""

    def give_back(self, one: V, journal: Journal, io: AgentIO, lock: int) -> None:
        """A volume that has its own name is used as before, and loses its journal; some of it may be done already."""

    def remove(self, one: V, journal: Journal, io: AgentIO, lock: int) -> int | None:
        """Delete it. Gives the bytes that its pool has less in use than before; ``None`` where nobody tells."""


class Maker(Backend[V], Protocol[V]):
    """A backend of which volumes are made as well, and copied: LVM and ZFS."""

    def check_new(self, wanted: Wanted) -> None:
        """Refuse names that a new volume cannot have (``invalid``)."""

    def is_sparse(self, wanted: Wanted) -> bool:
        """Whether it takes space as it is written, and reads as zeros where it was not."""

    def unit(self, wanted: Wanted, io: AgentIO) -> int:
        """Bytes of which a sparse volume takes all where anything is written; a multiple of 64 KiB."""

    def refuse_full(self, wanted: Wanted, needed: int, io: AgentIO) -> None:
        """Let nothing be written there that there is no room for (``not_enough_space``, ``busy``).

        Args:
            needed: bytes, beside the reserve.
        """

    def filled(self, names: Collection[str], reserve: space.Reserve, io: AgentIO) -> list[Wanted]:
        """What becomes fuller as block devices of these names (:func:`devices.below`) are written, without a name."""

    def make(self, wanted: Wanted, size: int, needed: int, job: str, io: AgentIO, lock: int) -> V:
        """A new volume under the job's own name (:func:`new_name`), with its journal, and its device.

        Args:
            size: in bytes, at least.
            needed: the most that will be written of a sparse one, in bytes, as far as it is known.

        Raises:
            RefusedError: ``not_enough_space``, ``unsupported_pool``, ``stale_plan``, ``busy``.
            HostError: none was made, or, as ``interrupted``, something is left of it.
        """

    def appear(self, one: V, io: AgentIO, lock: int) -> None:
        """Make the device of a hidden volume, which nobody has made appear meanwhile (``image_in_use``)."""

    def device(self, one: V) -> bytes:
        """The path of the device of a volume that has one, once it is there."""

    def taken(self, one: V, io: AgentIO) -> int:
        """Bytes that a volume takes by now of its group or pool."""


def refuse_unless_alone(what: str, why: str) -> None:
    """Let only what is this machine's alone be changed.

    Args:
        what: that would be changed, as sentences name it.
        why: it is not (:func:`~storage_admin.agent.host.far_disks.not_alone`).

    Raises:
        RefusedError: ``shared_pool``.
    """
    if why:
        told = f"{what} cannot be changed from this host: {why}. Change it where it is managed"
        raise RefusedError("shared_pool", told)


def aside_name(job: str) -> str:
    """What a volume is called while it is set aside."""
    return file_name(job, "aside").decode()


def work_name(job: str) -> str:
    """What a volume is called while a job changes or copies it."""
    return file_name(job, "work").decode()


def new_name(job: str) -> str:
    """What a volume is called that a job makes, until it is complete."""
    return file_name(job, "new").decode()


@contextlib.contextmanager
def alone(backend: Backend[Any], group: str, check: Callable[[], None] | None = None) -> Iterator[int]:
    """No other agent of this host changes volumes there meanwhile, nor settles what it finds.

    Args:
        check: others are waited for, for :data:`PATIENCE`, while this raises nothing; without it, for a :data:`MOMENT`.

    Yields:
        A descriptor for the commands that change something: where this process is killed, the last of them still holds
        the lock to its end.

    Raises:
        RefusedError: ``busy``.
    """
    name, deadline = backend.lock_name(group), time.monotonic() + (MOMENT if check is None else PATIENCE)
    busy = f"another job changes volumes of {name}; try again"
    with contextlib.ExitStack() as stack:
        while True:
            try:
                lock = stack.enter_context(locking.alone(space.FOLDER, f"group-{name}.lock", busy))
                break
            except RefusedError:
                if time.monotonic() > deadline:
                    raise
            if check is not None:
                check()
            time.sleep(_LOOK_INTERVAL)
        yield lock


@contextlib.contextmanager
def left_to_recovery() -> Iterator[None]:
    """Steps that do not change any more how the job ends: what fails there, a recovery does.

    Raises:
        HostError: ``interrupted``.
    """
    try:
        yield
    except (RefusedError, HostError) as error:
        raise unsettled(error) from error


def unsettled(error: RefusedError | HostError) -> HostError:
    """The same where nobody knows what was done, or something is left to do: a recovery sees to it."""
    told = error.detail if error.code == INTERRUPTED else f"{error.detail}; recover the host"
    return HostError(told, INTERRUPTED)


def find(backend: Backend[V], place: Place, name: str, io: AgentIO) -> V:
    """The volume of that place, which has to have that name.

    Raises:
        RefusedError: ``stale_plan``; ``tool_missing``.
        HostError: the backend does not answer.
    """
    found = [one for one in backend.there([place], io) if (one.group, one.id) == (place.group, place.id)]
    if len(found) != 1 or found[0].name != name:
        raise RefusedError(
            "stale_plan",
            f"{place.group}/{name} was removed, renamed or replaced since the plan; scan the host, try again",
        )
    return found[0]


def unused(backend: Backend[V], place: Place, io: AgentIO) -> V:
    """The volume of that place, which nobody uses and no other job has marked.

    Raises:
        RefusedError: as :func:`find` and :meth:`Backend.refuse_used`; ``busy``.
        HostError: the backend does not answer.
    """
    one = find(backend, place, place.name, io)
    if one.journal is not None:
        raise RefusedError("busy", f"{one.path} is marked by another job ({one.journal.text}); recover the host first")
    backend.refuse_used(one, io)
    return one


def give_name(backend: Backend[V], place: Place, one: V, name: str, io: AgentIO, lock: int) -> None:
    """Rename a volume; a name that is taken is refused (``target_exists``)."""
    if backend.is_taken(place, name, io):
        raise RefusedError("target_exists", f"there is a volume {one.group}/{name} already")
    backend.rename(one, name, io, lock)


def put_back(backend: Backend[Any], place: Place, text: str, io: AgentIO, lock: int) -> None:
    """The volume has its name again, its device where it had one, and no journal.

    So has another one that had taken its name right before the journal was written, and got that.
    """
    # A copy of the group has the same ids.
    marked = [one for one in backend.there([place], io) if one.group == place.group and one.journal is not None]
    marked = [one for one in marked if one.journal.text == text]
    for one in [one for one in marked if one.id == place.id] or marked:
        if one.is_aside or one.is_at_work:
            give_name(backend, place, one, one.journal.own_name, io, lock)
        back = find(backend, replace(place, id=one.id), one.journal.own_name, io)
        backend.give_back(back, one.journal, io, lock)


def change(argv: Sequence[str], io: AgentIO, lock: int, seconds: float = SECONDS) -> None:
    """A command that changes something, to its end; what the controller says meanwhile is heard after it.

    Raises:
        RefusedError: ``tool_missing``.
        HostError: it failed, and has changed nothing; as ``interrupted``, it was killed, perhaps after it had.
    """
    try:
        done = tools.run_to_end(argv, io, seconds, (lock,))
    except HostError as error:
        raise unsettled(error) from error
    if done.exit_code:
        failed = HostError(f"{argv[0]} ended with {done.words()}")
        raise unsettled(failed) if done.exit_code < 0 else failed
