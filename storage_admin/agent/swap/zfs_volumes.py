"""Protocol V on volumes of ZFS (docs/volumes.md): the journal is a user property of the dataset.

A volume is a zvol, or a container's filesystem of Proxmox VE. Each command is done or not. Who has one open anywhere,
in whatever namespace, the kernel tells by statistics that a dataset has only while its device is there or it is mounted
(dataset_kstats.c, since ZFS 0.8).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from storage_admin.agent.folders.pools import held
from storage_admin.agent.host import devices, space, zfs
from storage_admin.agent.host.mounts import mounted
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, HostError, RefusedError, display
from storage_admin.agent.swap import volumes
from storage_admin.agent.swap.volumes import SECONDS, UNIT, Journal, Place, Volume, Wanted, change, left_to_recovery

is_atomic = True
KSTATS = "/proc/spl/kstat/zfs"
_COLUMNS = (
    "name", "type", "guid", "objsetid", "usedbydataset", "usedbyrefreservation", "sharenfs", "sharesmb",
    zfs.PROPERTY,
)  # fmt: skip
#: Seconds for the kernel to take a device away, or for udev to make one, and for ZFS to give back what was destroyed.
_AWAY, _FREED = 10.0, 60.0
#: Seconds after which a device that somebody had open, as udev does that looks at it, is taken away once more.
_AGAIN = 1.0
#: The largest block that a zvol can have, in bytes: its size is a multiple of its own one.
_BLOCK = 128 << 10
#: sys/fs/zfs.h: of which dataset a device is.
_BLKZNAME, _NAME_BYTES = 0x8100127D, 256


@dataclass(frozen=True)
class Dataset(Volume):
    """A volume as ZFS tells it now.

    Args:
        is_block: it is a zvol.
        number: of its objects in the pool, by which the kernel tells whether it is open.
        reserved: bytes that are kept for it beside what it takes.
        is_shared: on the network, by ZFS itself.
    """

    is_block: bool
    number: int
    reserved: int
    is_shared: bool

    @property
    def pool(self) -> str:
        """Its ZFS pool."""
        return self.group.partition("/")[0]

    @property
    def property(self) -> str:
        """What says how a zvol's device appears, or whether a filesystem is mounted by itself."""
        return "volmode" if self.is_block else "canmount"


def lock_name(group: str) -> str:
    return f"zfs-{group.partition('/')[0]}"


def check(place: Place) -> None:
    if not zfs.is_name(f"{place.group}/{place.name}") or "/" in place.name or place.group.startswith("-"):
        raise RefusedError(INVALID, "that is no volume of ZFS")


def groups(places: Sequence[Place], io: AgentIO) -> set[str]:  # noqa: ARG001 (one question tells all)
    """The pools that are imported, and whose disks answer."""
    lines = zfs.ask(["zpool", "list"], ("guid", "name", "health"), io, to_end=True)
    return {line[column] for line in lines if line["health"] in zfs.READABLE for column in ("guid", "name")}


def there(places: Sequence[Place], io: AgentIO) -> list[Dataset]:  # noqa: ARG001 (one question tells all)
    """All filesystems and zvols that lie in a dataset."""
    lines = zfs.ask(["zfs", "list", "-t", "filesystem,volume"], _COLUMNS, io, to_end=True)
    return [_dataset(line) for line in lines if "/" in line["name"] and zfs.is_name(line["name"])]


def _dataset(line: dict[str, str]) -> Dataset:
    group, _, name = line["name"].rpartition("/")
    told, is_block = zfs.mark(line), line["type"] == "volume"
    journal = Journal(told[0], told[1], told[3], told[4], makes=told[3] == "new") if told else None
    return Dataset(
        group, name, line["guid"], int(line["usedbydataset"]), journal, False, is_block, int(line["objsetid"]),
        int(line["usedbyrefreservation"]),
        any(line[one] not in ("off", "-") for one in ("sharenfs", "sharesmb")),
    )  # fmt: skip


def refuse_shared(place: Place, io: AgentIO) -> None:
    """Let only pools be changed that are this machine's alone.

    Raises:
        RefusedError: ``shared_pool``; ``stale_plan``.
        HostError: ZFS does not answer.
    """
    pool = place.group.partition("/")[0]
    told = _told("zpool", "guid,health,readonly,multihost", pool, io)
    if told["guid"] != place.group_id:
        raise RefusedError("stale_plan", f"another ZFS pool has the name {pool} by now; scan the host and try again")
    volumes.refuse_unless_alone(f"the ZFS pool {pool}", zfs.not_alone(told, zfs.disks(pool, io)))


def _told(tool: str, properties: str, name: str, io: AgentIO) -> dict[str, str]:
    lines = zfs.ask([tool, "get"], ("property", "value"), io, properties, name, to_end=True)
    return {line["property"]: line["value"] for line in lines}


def refuse_used(one: Dataset, io: AgentIO) -> None:
    """Let a volume go that nothing is made of, nothing lies in, and no network sees.

    Who has it open for the kernel alone to know, :func:`hide` finds.
    """
    below = [name for name in _names(one.path, io) if name != one.path]
    if snapshots := [name for name in below if "@" in name]:
        raise RefusedError("has_overlays", f"{snapshots[0]} is a snapshot of the volume; delete its snapshots first")
    if below:
        raise RefusedError("unsupported_pool", f"the dataset {below[0]} lies in the volume {one.path}")
    if one.is_shared:
        raise RefusedError("image_in_use", f"the volume {one.path} is shared on the network (sharenfs, sharesmb)")
    if users := _users(one):
        raise RefusedError("image_in_use", f"{one.path}: {users} Stop what uses it")
    # Of a bind mount nothing would be left to mount it again by.
    if not one.is_block and len(points := _mounted(one)) > 1:
        raise RefusedError("image_in_use", f"the volume {one.path} is mounted at {' and '.join(points)}")


def _users(one: Dataset) -> str:
    """Who has its device open, in a sentence."""
    number = devices.node(zfs.device(one.path))[2] if one.is_block else None
    return "" if number is None else devices.users([number]).get(number, "")


def _names(path: str, io: AgentIO) -> list[str]:
    """A dataset, its snapshots, and what lies right in it."""
    command = ["zfs", "list", "-d", "1", "-t", "filesystem,volume,snapshot"]
    return [line["name"] for line in zfs.ask(command, ("name",), io, path, to_end=True)]


def _mounted(one: Dataset) -> list[str]:
    """Where it is mounted, as this process sees it."""
    source = one.path.encode()
    return [display(mount.point) for mount in mounted() if (mount.filesystem, mount.source) == ("zfs", source)]


def write_journal(one: Dataset, job: str, io: AgentIO, lock: int) -> str:
    """In a property of its own."""
    before = _mode(one, io)
    if not one.is_block:
        before += ",m" if _mounted(one) else ",n"
    made = f"{job}.{one.id}.{before}.{one.name}"
    change(["zfs", "set", f"{zfs.PROPERTY}={made}", one.path], io, lock)
    return made


def _mode(one: Dataset, io: AgentIO) -> str:
    """How it is used, as a journal has it: behind ``=`` where the dataset itself says so."""
    (told,) = zfs.ask(["zfs", "get"], ("value", "source"), io, one.property, one.path, to_end=True)
    return ("=" if told["source"] == "local" else "") + told["value"]


def hide(one: Dataset, io: AgentIO, lock: int) -> None:
    """Take its device away, or unmount it, which the kernel does only where nobody is there; neither comes back.

    A filesystem that another namespace has mounted is found afterwards.
    """
    command = ["zfs", "set", f"{one.property}={'none' if one.is_block else 'off'}", one.path]
    deadline = time.monotonic() + _AWAY
    again = 0.0
    while not again or _is_open(one):
        if (now := time.monotonic()) > deadline:
            raise RefusedError("image_in_use", f"the volume {one.path} is open on this host; stop what uses it")
        if now < again:
            time.sleep(0.1)
            continue
        done, again = tools.run_to_end(command, io, SECONDS, (lock,)), now + _AGAIN
        if done.exit_code:
            raise RefusedError("image_in_use", f"the volume {one.path} cannot be taken from its users: {done.words()}")


def _is_open(one: Dataset) -> bool:
    """Whether its device is there, or it is mounted, for anybody on this host."""
    if not os.path.isdir(f"{KSTATS}/{one.pool}"):
        raise HostError(f"the kernel does not tell which datasets of {one.pool} are in use")
    return os.path.exists(f"{KSTATS}/{one.pool}/objset-0x{one.number:x}")


def is_taken(place: Place, name: str, io: AgentIO) -> bool:
    return f"{place.group}/{name}" in _names(place.group, io)


def rename(one: Dataset, name: str, io: AgentIO, lock: int) -> None:
    change(["zfs", "rename", one.path, f"{one.group}/{name}"], io, lock)


def tidy(one: Dataset, name: str, io: AgentIO, lock: int) -> None:
    """A rename is done or not."""


def give_back(one: Dataset, journal: Journal, io: AgentIO, lock: int) -> None:
    """Its device is there, or it is mounted, as before, of a new one as of others there; then the property goes."""
    mode, _, mounted = journal.before.partition(",")
    # Where nothing was changed, nothing is done: to change canmount, ZFS 2.3 unmounts, which fails where somebody is.
    if _mode(one, io) != mode:
        is_own = mode.startswith("=")
        if is_own or (one.is_block and not journal.makes):  # of a device, to inherit alone makes none
            change(["zfs", "set", f"{one.property}={mode.lstrip('=')}", one.path], io, lock)
        if not is_own:
            # ``-S``, as canmount is not inherited: without a value of its own it has the default one.
            change(["zfs", "inherit", "-S", one.property, one.path], io, lock)
    if mounted == "m" and not _mounted(one):
        change(["zfs", "mount", one.path], io, lock)
    change(["zfs", "inherit", zfs.PROPERTY, one.path], io, lock)


def remove(one: Dataset, journal: Journal, io: AgentIO, lock: int) -> int | None:
    """In one command, which the kernel refuses while anybody uses it or anything is made of it.

    What was kept for the volume and not written is free at once, and counts in no sum of what is used. What has taken
    snapshots of all datasets meanwhile, has some of an incomplete volume: they go with it.
    """
    if journal.makes:
        change(["zfs", "destroy", "-r", one.path], io, lock)
        return None
    before = _used(one.pool, io) - one.reserved
    change(["zfs", "destroy", one.path], io, lock)
    deadline = time.monotonic() + _FREED
    while (left := _freeing(one.pool, io, lock)) and time.monotonic() < deadline:
        time.sleep(0.5)
    # What is not given back yet is still in use. Of the rest, some may be what others have destroyed.
    return min(before - _used(one.pool, io), one.taken - left)


def _used(pool: str, io: AgentIO) -> int:
    (line,) = zfs.ask(["zfs", "list", "-d", "0"], ("used",), io, pool, to_end=True)
    return int(line["used"])


def _freeing(pool: str, io: AgentIO, lock: int) -> int:
    """What is destroyed, and not given back yet."""
    change(["zpool", "sync", pool], io, lock)
    return int(_told("zpool", "freeing", pool, io)["freeing"])


def check_new(wanted: Wanted) -> None:
    if wanted.pool or not zfs.can_be_named(f"{wanted.place.group}/{wanted.place.name}"):
        raise RefusedError(INVALID, "ZFS takes no new volume of that name, or guests could not name it")


def is_sparse(wanted: Wanted) -> bool:  # noqa: ARG001 (all are)
    """Nothing is reserved for it."""
    return True


def unit(wanted: Wanted, io: AgentIO) -> int:  # noqa: ARG001 (its blocks are smaller, or not much larger)
    return UNIT


def refuse_full(wanted: Wanted, needed: int, io: AgentIO) -> None:
    """Let nothing be written that would leave less than the reserve in the dataset, by its quotas and its pool."""
    group = wanted.place.group
    told = _told("zfs", "used,available", group, io)
    free = int(told["available"]) - wanted.reserve.of(int(told["used"]) + int(told["available"]))
    if free < needed:
        raise RefusedError(
            "not_enough_space", f"{group} has {max(free, 0)} bytes free above its reserve, {needed} are needed"
        )


def filled(names: Collection[str], reserve: space.Reserve, io: AgentIO) -> list[Wanted]:
    """Datasets in which a zvol lies that nothing is reserved for."""
    paths = {path for name in names if name.startswith("zd") and (path := _dataset_of(f"/dev/{name}"))}
    return [
        Wanted(Place("zfs", path.rpartition("/")[0], "", "", ""), "", reserve)
        for path in paths
        if not int(_told("zfs", "refreservation", path, io)["refreservation"])
    ]


def make(wanted: Wanted, size: int, needed: int, job: str, io: AgentIO, lock: int) -> Dataset:
    """A sparse zvol. Its device has no partitions: the host is not to look into what a guest has in them."""
    group, path = wanted.place.group, f"{wanted.place.group}/{volumes.new_name(job)}"
    _refuse_locked(group, io)
    if _told("zfs", "volmode", group, io)["volmode"] == "none":
        raise RefusedError("unsupported_pool", f"volumes in {group} have no devices; change that first (volmode)")
    refuse_full(wanted, needed, io)
    own, whole = wanted.place.name, -(-size // _BLOCK) * _BLOCK
    journal = ["-o", f"{zfs.PROPERTY}={job}.0.new.{own}"]
    change(["zfs", "create", "-s", "-V", str(whole), "-o", "volmode=dev", *journal, path], io, lock)
    with left_to_recovery():
        guid = _told("zfs", "guid", path, io)["guid"]
        change(["zfs", "set", f"{zfs.PROPERTY}={job}.{guid}.new.{own}", path], io, lock)
        return next(one for one in there([], io) if one.id == guid)


def _refuse_locked(path: str, io: AgentIO) -> None:
    """Let nothing be read or written that is encrypted with a key which is not loaded."""
    if _told("zfs", "keystatus", path, io)["keystatus"] == "unavailable":
        raise RefusedError("unsupported_pool", f"the key of {path} is not loaded; load it first (zfs load-key)")


def appear(one: Dataset, io: AgentIO, lock: int) -> None:
    """Its device is there, without those of partitions."""
    if not one.is_block:
        raise RefusedError("unsupported_pool", f"{one.path} is a filesystem, and no guest's disk")
    _refuse_locked(one.path, io)
    refuse_used(one, io)
    if _is_open(one):
        raise RefusedError("image_in_use", f"the volume {one.path} was opened at this moment")
    change(["zfs", "set", "volmode=dev", one.path], io, lock)


def device(one: Dataset) -> bytes:
    """Once udev has made its link.

    Raises:
        HostError: it has made none, or one that leads to another dataset.
    """
    path, deadline = zfs.device(one.path), time.monotonic() + _AWAY
    while _dataset_of(path) != one.path:
        if time.monotonic() > deadline:
            raise HostError(f"udev has not made {path}, the device of the volume {one.path}")
        time.sleep(0.1)
    return path.encode()


def _dataset_of(path: str) -> str:
    """The volume that a device is, as the kernel calls it; empty for what is none."""
    with contextlib.suppress(OSError), held(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
        return fcntl.ioctl(fd, _BLKZNAME, bytes(_NAME_BYTES)).partition(b"\0")[0].decode("utf-8", "replace")
    return ""


def taken(one: Dataset, io: AgentIO) -> int:
    """Once all that was written is on its disks."""
    done = tools.run_to_end(["zpool", "sync", one.pool], io, SECONDS)
    if done.exit_code:
        raise HostError(f"zpool ended with {done.words()}")
    return int(_told("zfs", "usedbydataset", one.path, io)["usedbydataset"])
