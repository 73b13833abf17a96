"""Protocol V on volumes of LVM (docs/volumes.md): the journal is a tag of the volume.

LVM replaces the metadata of a group as a whole, so each command is done or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.host import lvm, space, thin
from storage_admin.agent.host.devices import BLOCKS
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.agent.swap import volumes
from storage_admin.agent.swap.volumes import SECONDS, UNIT, Journal, Place, Volume, Wanted, change, left_to_recovery

is_atomic = True
_COLUMNS = (
    "vg_name,lv_name,lv_uuid,vg_uuid,lv_tags,lv_role,lv_attr,lv_active,lv_device_open,lv_size,pool_lv,data_percent"
)


@dataclass(frozen=True)
class LogicalVolume(Volume):
    """A volume as LVM tells it now; ``pool`` is its thin pool, or empty."""

    pool: str
    active: bool
    open: bool
    roles: frozenset[str]
    attributes: str


def lock_name(group: str) -> str:
    return group


def check(place: Place) -> None:
    if place.backend != "lvm" or not lvm.NAME.match(place.group) or not lvm.NAME.match(place.name):
        raise RefusedError(INVALID, "that is no volume of LVM")


def groups(places: Sequence[Place], io: AgentIO) -> set[str]:  # noqa: ARG001 (one question tells all)
    """Of an exported group LVM lists no volumes."""
    lines = lvm.ask("vgs", "vg", "vg_uuid,vg_name,vg_exported", io, to_end=True)
    return {line[column] for line in lines if not line["vg_exported"] for column in ("vg_uuid", "vg_name")}


def there(places: Sequence[Place], io: AgentIO) -> list[LogicalVolume]:  # noqa: ARG001 (one question tells all)
    """All volumes that have a name of their own."""
    return [
        _volume(line)
        for line in lvm.ask("lvs", "lv", _COLUMNS, io, "-a", to_end=True)
        if lvm.NAME.match(line["lv_name"]) and lvm.NAME.match(line["vg_name"])
    ]


def _volume(line: dict[str, str]) -> LogicalVolume:
    tag, pool = lvm.mark(line), line["pool_lv"].strip("[]")
    taken = lvm.share(line["lv_size"], line["data_percent"]) if pool else int(line["lv_size"])
    if line["lv_attr"][:1] in {"m", "M", "r", "R"}:
        taken = 0  # each leg takes that, and metadata
    return LogicalVolume(
        line["vg_name"], line["lv_name"], line["lv_uuid"], taken or 0,
        Journal(tag[0], tag[1], tag[2], tag[3], makes=tag[2][0] == "m") if tag else None, False, pool,
        line["lv_active"] not in ("", "unknown"), line["lv_device_open"] == "open",
        frozenset(line["lv_role"].split(",")), line["lv_attr"],
    )  # fmt: skip


def refuse_shared(place: Place, io: AgentIO) -> None:
    """Let only groups be changed that are this machine's alone.

    Raises:
        RefusedError: ``shared_pool``; ``stale_plan``.
        HostError: LVM does not answer.
    """
    group = place.group
    lines = _groups(group, lvm.GROUPS, io)
    if {line["vg_uuid"] for line in lines} != {place.group_id}:
        raise RefusedError("stale_plan", f"the volume group {group} of the plan is not on this host, or not alone")
    volumes.refuse_unless_alone(f"the volume group {group}", lvm.not_alone(lines))


def refuse_used(one: LogicalVolume, io: AgentIO) -> None:  # noqa: ARG001 (the volume says it all)
    """Let a volume go that nobody has open, nothing stands on, and LVM is at no work with."""
    if one.open:
        raise RefusedError("image_in_use", f"the volume {one.path} is open on this host; stop what uses it")
    if one.roles & {"thickorigin", "multithickorigin", "externalorigin", "multiexternalorigin"}:
        raise RefusedError("has_overlays", f"snapshots stand on the volume {one.path}; delete them first")
    if "public" not in one.roles or one.attributes[:1] not in "-VomrRi":
        raise RefusedError("unsupported_pool", f"{one.path} is no volume that stands alone ({one.attributes})")
    if one.attributes[:1] == "p" or one.attributes[8:9] in "pX":
        raise RefusedError("busy", f"LVM converts or moves {one.path}, or a disk of it is missing ({one.attributes})")


def write_journal(one: LogicalVolume, job: str, io: AgentIO, lock: int) -> str:
    """A tag. From then on no event of udev activates the volume."""
    activates = autoactivation(io).get(one.id) == "enabled"
    made = f"sa-{job}.{'a' if one.active else 'i'}{'y' if activates else 'n'}.{one.name}"
    change(["lvchange", "--addtag", made, *(["--setautoactivation", "n"] if activates else []), one.path], io, lock)
    return made


def autoactivation(io: AgentIO) -> dict[str, str]:
    """By their ids, whether the host activates volumes by itself (``enabled``); none before LVM 2.03.12, which knows no
    such thing.
    """
    try:
        lines = lvm.ask("lvs", "lv", "lv_uuid,lv_autoactivation", io, to_end=True)
    except HostError:
        lvm.ask("lvs", "lv", "lv_uuid", io, to_end=True)  # or it answers nothing at all
        return {}
    return {line["lv_uuid"]: line["lv_autoactivation"] for line in lines}


def hide(one: LogicalVolume, io: AgentIO, lock: int) -> None:
    """Take its device away, which the kernel does only where nobody has it open."""
    done = tools.run_to_end(["lvchange", "-an", one.path], io, SECONDS, (lock,))
    if done.exit_code:
        raise RefusedError("image_in_use", f"the volume {one.path} cannot be deactivated: {done.words()}")


def is_taken(place: Place, name: str, io: AgentIO) -> bool:
    return any((other.group, other.name) == (place.group, name) for other in there([], io))


def rename(one: LogicalVolume, name: str, io: AgentIO, lock: int) -> None:
    change(["lvrename", one.group, one.name, name], io, lock)


def tidy(one: LogicalVolume, name: str, io: AgentIO, lock: int) -> None:
    """A rename is done or not."""


def give_back(one: LogicalVolume, journal: Journal, io: AgentIO, lock: int) -> None:
    """Active if it was, or is to be; then the tag goes, with what came with it."""
    if journal.before[0] in "am" and not one.active:
        change(["lvchange", "-ay", "-K", one.path], io, lock)
    more = ["--setautoactivation", "y"] if journal.before[1] == "y" else []
    change(["lvchange", "--deltag", journal.text, *more, one.path], io, lock)


def remove(one: LogicalVolume, journal: Journal, io: AgentIO, lock: int) -> int | None:  # noqa: ARG001 (as above)
    """In one command, which takes no snapshots along that were made right before: it takes no origin of any.

    Raises:
        RefusedError: ``has_overlays``: there is one.
    """
    before = used_with(one, io)
    change(["lvremove", "--yes", "-S", "lv_attr=~^[^oO]", one.path], io, lock)
    if any((other.group, other.id) == (one.group, one.id) for other in there([], io)):
        raise RefusedError("has_overlays", f"snapshots stand on the volume {one.path}; delete them first")
    after = used_with(one, io)
    if before is None or after is None:
        return None
    # Other volumes may have been removed, or have let go of some, meanwhile. What a mirror takes, one does not tell.
    return min(before - after, one.taken) if one.taken else before - after


def used_with(one: LogicalVolume, io: AgentIO) -> int | None:
    """What its thin pool, or the group, has of its space in use now, in bytes; ``None`` where nobody tells."""
    if not one.pool:
        lines = _groups(one.group, "vg_name,vg_size,vg_free", io)
        return int(lines[0]["vg_size"]) - int(lines[0]["vg_free"]) if len(lines) == 1 else None
    pool = thin_pool(one.group, one.pool, io)
    return pool["used"] if pool is not None else None


def thin_pool(group: str, name: str, io: AgentIO) -> dict[str, Any] | None:
    """What the kernel says of a thin pool (:func:`lvm.thin_pools`), where it is active."""
    return next((one for one in lvm.thin_pools(io) if (one["group"], one["name"]) == (group, name)), None)


def _groups(name: str, columns: str, io: AgentIO) -> list[dict[str, str]]:
    """The volume groups of that name."""
    return [line for line in lvm.ask("vgs", "vg", columns, io, to_end=True) if line["vg_name"] == name]


def check_new(wanted: Wanted) -> None:
    if (wanted.pool and not lvm.NAME.match(wanted.pool)) or not lvm.can_be_named(wanted.place.name):
        raise RefusedError(INVALID, "LVM has no thin pool, or takes no new volume, of that name")


def is_sparse(wanted: Wanted) -> bool:
    return bool(wanted.pool)


def unit(wanted: Wanted, io: AgentIO) -> int:
    """A chunk of its thin pool."""
    lines = lvm.ask("lvs", "lv", "vg_name,lv_name,chunk_size", io, to_end=True)
    names = (wanted.place.group, wanted.pool)
    return next((int(one["chunk_size"]) for one in lines if (one["vg_name"], one["lv_name"]) == names), UNIT)


def refuse_full(wanted: Wanted, needed: int, io: AgentIO) -> None:
    """Let nothing be written that a group has no room for, or that would fill a thin pool up to its reserve."""
    group, pool = wanted.place.group, wanted.pool
    if not pool:
        lines = _groups(group, "vg_name,vg_free", io)
        free = int(lines[0]["vg_free"]) if len(lines) == 1 else 0
        if free < needed:
            raise RefusedError("not_enough_space", f"{group} has {free} bytes free, {needed} are needed")
        return
    told = thin_pool(group, pool, io)
    if told is None or told["mode"] != "rw" or told["needs_check"]:
        raise RefusedError("busy", f"the thin pool {group}/{pool} is not active, or takes no writes now")
    free = told["size"] - told["used"] - wanted.reserve.of(told["size"])
    if free < needed or 5 * told["metadata_used"] > 4 * told["metadata_size"]:
        raise RefusedError(
            "not_enough_space",
            f"{group}/{pool} has {max(free, 0)} bytes free above its reserve, {needed} are needed, and of its metadata "
            f"{told['metadata_used']} of {told['metadata_size']} bytes are in use; extend the pool first",
        )


def filled(names: Collection[str], reserve: space.Reserve, io: AgentIO) -> list[Wanted]:
    """Thin pools: what stands on one, the device mapper tells."""
    mapped = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError), open(f"{BLOCKS}/{name}/dm/name", encoding="utf-8") as file:
            mapped.add(file.read().strip())
    pools = ((one["group"], one["name"]) for one in lvm.thin_pools(io)) if mapped else ()
    return [
        Wanted(Place("lvm", group, "", "", ""), pool, reserve)
        for group, pool in pools
        if lvm.dm_name(group, pool) + "-tpool" in mapped
    ]


def make(wanted: Wanted, size: int, needed: int, job: str, io: AgentIO, lock: int) -> LogicalVolume:
    """A thick volume, or a thin one, with its tag."""
    group, name, pool = wanted.place.group, volumes.new_name(job), wanted.pool
    if pool:
        _refuse_unzeroed(wanted, io)
    refuse_full(wanted, needed if pool else size, io)
    # Of a new thin volume LVM takes no such option.
    knows = not pool and bool(autoactivation(io))
    tag = f"sa-{job}.m{'y' if knows else 'n'}.{wanted.place.name}"
    where = ["--type", "thin", "-V", f"{size}b", "--thinpool", pool] if pool else ["-L", f"{size}b", "-Wn", "-Zn"]
    only = ["--setautoactivation", "n"] if knows else []
    change(["lvcreate", "--yes", *where, "-n", name, "--addtag", tag, *only, group], io, lock)
    with left_to_recovery():
        return next(one for one in there([], io) if (one.group, one.name) == (group, name))


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


def appear(one: LogicalVolume, io: AgentIO, lock: int) -> None:
    """Active, by a command that waits for udev."""
    if one.active:
        raise RefusedError("image_in_use", f"the volume {one.path} was activated at this moment")
    change(["lvchange", "-ay", "-K", one.path], io, lock)


def device(one: LogicalVolume) -> bytes:
    return f"/dev/{one.path}".encode()


def taken(one: LogicalVolume, io: AgentIO) -> int:
    """Of a thin volume by the kernel: LVM tells hundredths of a percent."""
    return thin.mapped_bytes(lvm.dm_name(one.group, one.name), io) if one.pool else one.taken
