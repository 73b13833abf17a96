"""A logical volume gets another name and its own one back, or goes: protocol V (docs/safety.md, section 2.7).

LVM replaces the metadata of a group as a whole, so each command is done or not. A group has no folder for a journal: a
tag of the volume says which job set it aside, whether it was active, and what its own name is.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from storage_admin.agent.host import locking, lvm, space
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError
from storage_admin.agent.swap.journal import file_name

_COLUMNS = (
    "vg_name,lv_name,lv_uuid,vg_uuid,lv_tags,lv_role,lv_attr,lv_active,lv_device_open,lv_size,pool_lv,data_percent"
)
_GROUPS = "vg_name,vg_uuid,vg_shared,vg_clustered,vg_lock_type,vg_systemid,vg_tags,vg_exported,vg_partial"
_DISKS = "pv_name,vg_name,vg_uuid"
_TAG = re.compile(r"sa-([0-9a-zA-Z]{1,64})\.([ai])([yn])\.(.+)")
SYS = "/sys"
#: How oVirt marks the groups of its storage domains, which only its own master changes.
_OVIRT = ("RHAT_", "MDT_")
#: A command on the metadata of a group waits for others that hold its lock.
_SECONDS = 120.0


@dataclass(frozen=True)
class Place:
    """A volume as the controller knows it: ids of LVM, which a rename leaves as they are."""

    group: str
    group_id: str
    name: str
    id: str

    @classmethod
    def parse(cls, args: Arguments) -> Place:
        """The arguments ``group``, ``group_id``, ``name`` and ``id``.

        Raises:
            RefusedError: ``invalid``.
        """
        found = cls(*(args.take(name, str) for name in ("group", "group_id", "name", "id")))
        if not lvm.NAME.match(found.group) or not lvm.NAME.match(found.name) or not found.id or not found.group_id:
            raise RefusedError(INVALID, "that is no volume of LVM")
        return found


@dataclass(frozen=True)
class Volume:
    """A volume as LVM tells it now.

    Args:
        taken: bytes that it takes of its group or thin pool; 0 where LVM does not tell.
        job: that has set it aside, by its tag; empty of one without.
        was_active, activates, own_name: what the tag says besides: whether it was active, whether the host activates
            it by itself.
    """

    group: str
    name: str
    id: str
    taken: int
    pool: str
    active: bool
    open: bool
    roles: frozenset[str]
    attributes: str
    tag: str = ""
    job: str = ""
    was_active: bool = False
    activates: bool = False
    own_name: str = ""

    @property
    def path(self) -> str:
        """As a command names it."""
        return f"{self.group}/{self.name}"

    @property
    def is_at_work(self) -> bool:
        """Whether it has the name that its tag's job gave it for as long as it works on it."""
        return bool(self.job) and self.name == work_name(self.job)

    @property
    def is_aside(self) -> bool:
        """Whether it has the name that its tag's job gave it."""
        return bool(self.job) and self.name == aside_name(self.job)


def aside_name(job: str) -> str:
    """What a volume is called while it is set aside."""
    return file_name(job, "aside").decode()


def work_name(job: str) -> str:
    """What a volume is called while a job changes it."""
    return file_name(job, "work").decode()


@contextlib.contextmanager
def alone(group: str) -> Iterator[int]:
    """No other agent of this host changes the volumes of a group meanwhile, nor settles what it finds there.

    Yields:
        A descriptor for the commands that change it: where this process is killed, the last of them still holds the
        lock to its end.

    Raises:
        RefusedError: ``busy``.
    """
    why = f"another job changes the volume group {group}; try again"
    with locking.alone(space.FOLDER, f"group-{group}.lock", why) as lock:
        yield lock


def all_volumes(io: AgentIO, group_id: str = "") -> list[Volume]:
    """All volumes that have a name of their own, of one group or of all.

    Raises:
        RefusedError: ``tool_missing``.
        HostError: LVM does not answer.
    """
    return [
        _volume(line)
        for line in lvm.ask("lvs", "lv", _COLUMNS, io, "-a", to_end=True)
        if group_id in ("", line["vg_uuid"]) and lvm.NAME.match(line["lv_name"]) and lvm.NAME.match(line["vg_name"])
    ]


def _volume(line: dict[str, str]) -> Volume:
    tags = [found for found in map(_TAG.fullmatch, line["lv_tags"].split(",")) if found]
    one = tags[0] if len(tags) == 1 else None
    marked = (one[0], one[1], one[2] == "a", one[3] == "y", one[4]) if one else ("", "", False, False, "")
    pool = line["pool_lv"].strip("[]")
    taken = lvm.share(line["lv_size"], line["data_percent"]) if pool else int(line["lv_size"])
    return Volume(
        line["vg_name"], line["lv_name"], line["lv_uuid"], taken or 0, pool,
        line["lv_active"] not in ("", "unknown"), line["lv_device_open"] == "open",
        frozenset(line["lv_role"].split(",")), line["lv_attr"], *marked,
    )  # fmt: skip


def find(place: Place, io: AgentIO, name: str) -> Volume:
    """The volume of that id, which has to have that name, alone in its group.

    Raises:
        RefusedError: ``stale_plan``; ``tool_missing``.
        HostError: LVM does not answer.
    """
    found = [one for one in all_volumes(io, place.group_id) if one.group == place.group and one.id == place.id]
    if len(found) != 1 or found[0].name != name:
        raise RefusedError(
            "stale_plan", f"{place.group}/{name} is no longer the volume of the plan; scan the host and try again"
        )
    return found[0]


def refuse_shared(group: str, io: AgentIO) -> None:
    """Let only groups be changed that are this machine's alone.

    Raises:
        RefusedError: ``shared_pool``; ``stale_plan``.
        HostError: LVM does not answer.
    """
    lines = [line for line in lvm.ask("vgs", "vg", _GROUPS, io, to_end=True) if line["vg_name"] == group]
    if len(lines) != 1:
        raise RefusedError("stale_plan", f"there is not one volume group {group} on this host")
    line = lines[0]
    reasons = {
        "it has a lock manager": line["vg_shared"] or line["vg_clustered"] or line["vg_lock_type"] not in ("", "none"),
        "it belongs to a storage domain of oVirt": any(tag.startswith(_OVIRT) for tag in line["vg_tags"].split(",")),
        "it is exported": line["vg_exported"],
        "a disk of it is missing": line["vg_partial"],
        "it belongs to the system that its id names": line["vg_systemid"],
    }
    disks = [
        one["pv_name"] for one in lvm.ask("pvs", "pv", _DISKS, io, to_end=True) if one["vg_uuid"] == line["vg_uuid"]
    ]
    reasons |= {f"another host may see {disk} ({way})": way for disk in disks if (way := _way_to(disk))}
    for why, stands in reasons.items():
        if stands:
            raise RefusedError(
                "shared_pool",
                f"the volume group {group} cannot be changed from this host: {why}. Change it where it is managed",
            )


def _way_to(disk: str, depth: int = 0) -> str:
    """Over what a block device is reached where other machines may reach it, too; empty for one of this machine's own.

    By what the kernel says of it and of the devices below it.
    """
    name = os.path.basename(os.path.realpath(disk))
    place = os.path.realpath(os.path.join(SYS, "class/block", name))
    if not os.path.isdir(place) or depth > 8:
        return "unknown"
    if (kind := re.match(r"(rbd|nbd|drbd)\d", name)) is not None:
        return kind[1]
    if _read(f"{place}/dm/uuid").startswith("mpath-"):
        return "mpath"
    for way in ("iscsi", "fc"):  # .../host3/session1/target3:0:0/3:0:0:0/block/sdb, .../rport-...
        if re.search({"iscsi": r"/session\d+/", "fc": r"/rport-"}[way], place):
            return way
    if (controller := re.search(r"/(nvme\d+)(?:c\d+)?n\d+", place)) is not None:
        transport = _read(f"{SYS}/class/nvme/{controller[1]}/transport")
        return "" if transport == "pcie" else transport or "unknown"
    below = os.listdir(f"{place}/slaves") if os.path.isdir(f"{place}/slaves") else []
    if os.path.exists(f"{place}/partition"):
        below.append(os.path.basename(os.path.dirname(place)))
    return next(filter(None, (_way_to(f"/dev/{one}", depth + 1) for one in below)), "")


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def refuse_used(one: Volume) -> None:
    """Let a volume go that nobody has open, nothing stands on, and LVM is at no work with.

    Raises:
        RefusedError: ``image_in_use``, ``has_overlays``, ``busy``, ``unsupported_pool``.
    """
    if one.open:
        raise RefusedError("image_in_use", f"the volume {one.path} is open on this host; stop what uses it")
    if one.roles & {"thickorigin", "multithickorigin", "externalorigin", "multiexternalorigin"}:
        raise RefusedError("has_overlays", f"snapshots stand on the volume {one.path}; delete them first")
    if "public" not in one.roles or one.attributes[:1] not in "-VomrRi":
        raise RefusedError("unsupported_pool", f"{one.path} is no volume that stands alone ({one.attributes})")
    if one.attributes[:1] == "p" or one.attributes[8:9] in "pX":
        raise RefusedError("busy", f"LVM converts or moves {one.path}, or a disk of it is missing ({one.attributes})")


def tag(one: Volume, job: str, io: AgentIO, lock: int) -> str:
    """Note on a volume that a job sets it aside; gives the tag. From then on no event of udev activates it."""
    activates = _activates(one, io)
    made = f"sa-{job}.{'a' if one.active else 'i'}{'y' if activates else 'n'}.{one.name}"
    change(["lvchange", "--addtag", made, *(["--setautoactivation", "n"] if activates else []), one.path], io, lock)
    return made


def untag(one: Volume, io: AgentIO, lock: int) -> None:
    """Take that note away, with what came with it."""
    more = ["--setautoactivation", "y"] if one.activates else []
    change(["lvchange", "--deltag", one.tag, *more, one.path], io, lock)


def _activates(one: Volume, io: AgentIO) -> bool:
    """Whether the host activates it by itself, where LVM can be told not to (2.03.12 and later)."""
    try:
        lines = lvm.ask("lvs", "lv", "lv_uuid,lv_autoactivation", io, to_end=True)
    except HostError:
        return False
    return any(line["lv_uuid"] == one.id and line["lv_autoactivation"] == "enabled" for line in lines)


def deactivate(one: Volume, io: AgentIO, lock: int) -> None:
    """Take a volume's device away, which the kernel does only where nobody has it open.

    Raises:
        RefusedError: ``image_in_use``.
    """
    done = tools.run_to_end(["lvchange", "-an", one.path], io, _SECONDS, (lock,))
    if done.exit_code:
        raise RefusedError("image_in_use", f"the volume {one.path} cannot be deactivated: {done.words()}")


def give_name(one: Volume, name: str, io: AgentIO, lock: int) -> None:
    """Rename a volume; a name that is taken is refused (``target_exists``)."""
    if any(other.group == one.group and other.name == name for other in all_volumes(io)):
        raise RefusedError("target_exists", f"there is a volume {one.group}/{name} already")
    change(["lvrename", one.group, one.name, name], io, lock)


def change(argv: Sequence[str], io: AgentIO, lock: int) -> None:
    """A command that changes a group's metadata, to its end; what the controller says meanwhile is heard after it.

    Raises:
        HostError: it failed, and has changed nothing.
    """
    done = tools.run_to_end(argv, io, _SECONDS, (lock,))
    if done.exit_code:
        raise HostError(f"{argv[0]} ended with {done.words()}")


def taken_of(one: Volume, io: AgentIO) -> int | None:
    """What a thin pool, or the group, has of its space in use now, in bytes; ``None`` where nobody tells."""
    if not one.pool:
        lines = [
            line
            for line in lvm.ask("vgs", "vg", "vg_name,vg_size,vg_free", io, to_end=True)
            if line["vg_name"] == one.group
        ]
        return int(lines[0]["vg_size"]) - int(lines[0]["vg_free"]) if len(lines) == 1 else None
    found = [pool for pool in lvm.thin_pools(io) if (pool["group"], pool["name"]) == (one.group, one.pool)]
    return found[0]["used"] if found else None
