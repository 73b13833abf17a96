"""Protocol V on volumes of ZFS (docs/safety.md, section 2.7): the journal is a user property of the dataset.

A volume is a zvol, or a container's filesystem of Proxmox VE. Each command is done or not. Who has one open anywhere,
in whatever namespace, the kernel tells by statistics that a dataset has only while its device is there or it is mounted
(dataset_kstats.c, since ZFS 0.8).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from storage_admin.agent.host import devices, zfs
from storage_admin.agent.host.mounts import parse
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, HostError, RefusedError, display
from storage_admin.agent.swap import volumes
from storage_admin.agent.swap.volumes import SECONDS, Journal, Place, Volume, change

is_atomic = True
#: What is copied, or inherited from another dataset, names another id than the dataset's own, and counts for nothing.
PROPERTY = "storage-admin:aside"
KSTATS = "/proc/spl/kstat/zfs"
_COLUMNS = (
    "name", "type", "guid", "objsetid", "usedbydataset", "usedbyrefreservation", "volmode", "canmount", "sharenfs",
    "sharesmb", PROPERTY,
)  # fmt: skip
#: The second part says what it was: the mode of a zvol's device, or whether a filesystem is mounted by itself, and was
#: mounted; with ``=`` where that stood on the dataset itself.
_JOURNAL = re.compile(r"([0-9a-zA-Z]{1,64})\.(\d+)\.(=?[a-z]+(?:,[mn])?)\.(.+)")
#: Seconds for the kernel to take a device away, and for ZFS to give back what was destroyed.
_AWAY, _FREED = 10.0, 60.0


@dataclass(frozen=True)
class Dataset(Volume):
    """A volume as ZFS tells it now.

    Args:
        is_block: it is a zvol.
        number: of its objects in the pool, by which the kernel tells whether it is open.
        reserved: bytes that are kept for it beside what it takes.
        mode: how a zvol's device appears (``volmode``), or whether a filesystem is mounted by itself (``canmount``).
        is_shared: on the network, by ZFS itself.
    """

    is_block: bool
    number: int
    reserved: int
    mode: str
    is_shared: bool

    @property
    def pool(self) -> str:
        """Its ZFS pool."""
        return self.group.partition("/")[0]

    @property
    def property(self) -> str:
        """What says by which it is used."""
        return "volmode" if self.is_block else "canmount"


def lock_name(group: str) -> str:
    """Of a ZFS pool."""
    return f"zfs-{group.partition('/')[0]}"


def check(place: Place) -> None:
    """As of :class:`Backend`."""
    if not zfs.is_name(f"{place.group}/{place.name}") or "/" in place.name or place.group.startswith("-"):
        raise RefusedError(INVALID, "that is no volume of ZFS")


def there(places: Sequence[Place], io: AgentIO) -> list[Dataset]:  # noqa: ARG001 (one question tells all)
    """All filesystems and zvols that lie in a dataset."""
    lines = zfs.ask(["zfs", "list", "-t", "filesystem,volume"], _COLUMNS, io, to_end=True)
    return [_dataset(line) for line in lines if "/" in line["name"] and zfs.is_name(line["name"])]


def _dataset(line: dict[str, str]) -> Dataset:
    group, _, name = line["name"].rpartition("/")
    told, is_block = _JOURNAL.fullmatch(line[PROPERTY]), line["type"] == "volume"
    journal = Journal(line[PROPERTY], *told.group(1, 3, 4)) if told and told[2] == line["guid"] else None
    return Dataset(
        group, name, line["guid"], int(line["usedbydataset"]), journal, False, is_block, int(line["objsetid"]),
        int(line["usedbyrefreservation"]), line["volmode" if is_block else "canmount"],
        any(line[one] not in ("off", "-") for one in ("sharenfs", "sharesmb")),
    )  # fmt: skip


def refuse_shared(place: Place, io: AgentIO) -> None:
    """Let only pools be changed that are this machine's alone.

    Raises:
        RefusedError: ``shared_pool``; ``stale_plan``.
        HostError: ZFS does not answer.
    """
    pool = place.group.partition("/")[0]
    told = _pool(pool, "guid,health,readonly,multihost", io)
    if told["guid"] != place.group_id:
        raise RefusedError("stale_plan", f"another ZFS pool has the name {pool} by now; scan the host and try again")
    reasons = {
        "it has the property multihost": told["multihost"] != "off",
        "it is imported read-only": told["readonly"] != "off",
        f"its health is {told['health'][:20]}": told["health"] not in zfs.READABLE,
    }
    volumes.refuse_unless_alone(f"the ZFS pool {pool}", reasons, zfs.disks(pool, io))


def _pool(pool: str, properties: str, io: AgentIO) -> dict[str, str]:
    lines = zfs.ask(["zpool", "get"], ("property", "value"), io, properties, pool, to_end=True)
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
    dev, inode, number = devices.node(zfs.device(one.path)) if one.is_block else (None, None, None)
    if dev is None or inode is None or number is None:
        return ""
    return devices.users({number: (dev, inode)}).get(number, "")


def _names(path: str, io: AgentIO) -> list[str]:
    """A dataset, its snapshots, and what lies right in it."""
    command = ["zfs", "list", "-d", "1", "-t", "filesystem,volume,snapshot"]
    return [line["name"] for line in zfs.ask(command, ("name",), io, path, to_end=True)]


def _mounted(one: Dataset) -> list[str]:
    """Where it is mounted, as this process sees it."""
    with open("/proc/self/mountinfo", "rb") as file:
        mounts = parse(file.read())
    source = one.path.encode()
    return [display(mount.point) for mount in mounts if (mount.filesystem, mount.source) == ("zfs", source)]


def write_journal(one: Dataset, job: str, io: AgentIO, lock: int) -> str:
    """In a property of its own."""
    (told,) = zfs.ask(["zfs", "get"], ("source",), io, one.property, one.path, to_end=True)
    before = ("=" if told["source"] == "local" else "") + one.mode
    if not one.is_block:
        before += ",m" if _mounted(one) else ",n"
    made = f"{job}.{one.id}.{before}.{one.name}"
    change(["zfs", "set", f"{PROPERTY}={made}", one.path], io, lock)
    return made


def hide(one: Dataset, io: AgentIO, lock: int) -> None:
    """Take its device away, or unmount it, which the kernel does only where nobody is there; neither comes back.

    A filesystem that another namespace has mounted is found afterwards.
    """
    command = ["zfs", "set", f"{one.property}={'none' if one.is_block else 'off'}", one.path]
    done = tools.run_to_end(command, io, SECONDS, (lock,))
    if done.exit_code:
        raise RefusedError("image_in_use", f"the volume {one.path} cannot be taken from its users: {done.words()}")
    deadline = time.monotonic() + _AWAY
    while _is_open(one):
        if time.monotonic() > deadline:
            raise RefusedError("image_in_use", f"the volume {one.path} is open on this host; stop what uses it")
        time.sleep(0.1)


def _is_open(one: Dataset) -> bool:
    """Whether its device is there, or it is mounted, for anybody on this host."""
    if not os.path.isdir(f"{KSTATS}/{one.pool}"):
        raise HostError(f"the kernel does not tell which datasets of {one.pool} are in use")
    return os.path.exists(f"{KSTATS}/{one.pool}/objset-0x{one.number:x}")


def is_taken(place: Place, name: str, io: AgentIO) -> bool:
    """As of :class:`Backend`."""
    return f"{place.group}/{name}" in _names(place.group, io)


def rename(one: Dataset, name: str, io: AgentIO, lock: int) -> None:
    """As of :class:`Backend`."""
    change(["zfs", "rename", one.path, f"{one.group}/{name}"], io, lock)


def tidy(one: Dataset, name: str, io: AgentIO, lock: int) -> None:
    """A rename is done or not."""


def give_back(one: Dataset, journal: Journal, io: AgentIO, lock: int) -> None:
    """Its device is there, or it is mounted, as before; then the property goes."""
    mode, _, mounted = journal.before.partition(",")
    change(["zfs", "set", f"{one.property}={mode.lstrip('=')}", one.path], io, lock)
    if not mode.startswith("="):
        # ``-S``, as canmount is not inherited: without a value of its own it has the default one.
        change(["zfs", "inherit", "-S", one.property, one.path], io, lock)
    if mounted == "m" and not _mounted(one):
        change(["zfs", "mount", one.path], io, lock)
    change(["zfs", "inherit", PROPERTY, one.path], io, lock)


def remove(one: Dataset, journal: Journal, io: AgentIO, lock: int) -> int | None:  # noqa: ARG001 (as above)
    """In one command, which the kernel refuses while anybody uses it or anything is made of it.

    What was kept for the volume and not written is free at once, and counts in no sum of what is used.
    """
    before = _used(one.pool, io) - one.reserved
    change(["zfs", "destroy", one.path], io, lock)
    deadline = time.monotonic() + _FREED
    while (left := _freeing(one.pool, io, lock)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return before - _used(one.pool, io) - left


def _used(pool: str, io: AgentIO) -> int:
    (line,) = zfs.ask(["zfs", "list", "-d", "0"], ("used",), io, pool, to_end=True)
    return int(line["used"])


def _freeing(pool: str, io: AgentIO, lock: int) -> int:
    """What is destroyed, and not given back yet."""
    change(["zpool", "sync", pool], io, lock)
    return int(_pool(pool, "freeing", io)["freeing"])
