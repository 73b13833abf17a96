"""What LVM says of its groups and volumes (vgs(8), lvs(8)): they are only read, and nothing is activated.

Without ``--readonly``, with which LVM does not ask the kernel, and so tells no share of a thin pool that is used.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from storage_admin.agent.host import devices, far_disks
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError, RefusedError

_REPORT = ("--reportformat", "json", "--units", "b", "--nosuffix", "-o")
#: Of a group, its room, and what says that another host may change it (:func:`not_alone`); a line for each disk.
GROUPS = (
    "vg_name,vg_uuid,vg_size,vg_free,vg_shared,vg_clustered,vg_lock_type,vg_systemid,vg_tags,vg_exported,vg_partial,"
    "pv_name"
)
#: Tags of groups that are storage domains of oVirt (vdsm's lvm.py and blockSD.py).
_OVIRT = ("RHAT_", "MDT_")
#: Of a volume, none of its segments: with one of these there would be a line for each segment.
_VOLUMES = (
    "lv_name,vg_name,lv_layout,lv_role,lv_parent,lv_size,data_percent,metadata_percent,lv_metadata_size,origin,"
    "origin_size,pool_lv,lv_device_open,lv_health_status,lv_uuid,lv_tags"
)
#: A volume that a job works on for the moment (swap/volumes.py), and the tag of one that has another name: the job,
#: whether it was active (``m``: the job makes it) and whether events of udev activate it, and its own name.
_AT_WORK = re.compile(r"\.sa-([0-9a-zA-Z]{1,64})\.work")
TAG = re.compile(r"sa-([0-9a-zA-Z]{1,64})\.([aim][yn])\.(.+)")
#: From so many percent on dmeventd extends a thin pool, and by so many (lvmthin(7)).
_EXTENSION = ("activation/thin_pool_autoextend_threshold", "activation/thin_pool_autoextend_percent")
#: What LVM's tools let a name be (lvm(8)); what else stands in metadata was written by somebody who means no good.
NAME = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9+_.][a-zA-Z0-9+_.-]{0,126}\Z", re.ASCII)
#: What LVM keeps for itself (lvm(8)): none of its own volumes has such a name.
_RESERVED = re.compile(
    r"snapshot|pvmove|.*_(cdata|cmeta|w?corig|cvol|imeta|iorig|mimage|mlog|pmspare|rimage|rmeta|tdata|tmeta|vdata|vorigin)"
)
#: Layouts of which all parts are known by their sizes: not those of caches and VDO.
_WHOLE = frozenset({"linear", "striped", "raid", "mirror"})
#: A thin pool as the device mapper tells of it (the kernel's Documentation/admin-guide/device-mapper/
#: thin-provisioning.rst): LVM doubles each ``-`` of a name and calls the pool itself ``GROUP-NAME-tpool``.
_THIN_POOL = re.compile(r"((?:[^-]|--)+)-((?:[^-]|--)+?)(?:-tpool)?: \d+ (\d+) thin-pool (.+)")
_FULLNESS = re.compile(r"\d+ (\d+)/(\d+) (\d+)/(\d+) (\S+) (\w+)(.*)")
#: Bytes of a block of its metadata.
_METADATA_BLOCK = 4096


def read(io: AgentIO, _etc_pve: str) -> dict[str, Any]:
    """Ask LVM once for all groups and once for all volumes.

    Returns:
        ``groups``: ``name``, ``uuid``, ``size``, ``free``,
        ``why`` (why nothing is told of its volumes), ``not_alone`` (as the function says). ``pools`` (thin pools):
        ``group``, ``name``, ``size``, ``used``,
        ``metadata_size``, ``metadata_percent``, ``mode`` (empty while inactive), ``needs_check``. ``volumes``:
        ``group``, ``name``, ``id``, ``pool`` (the thin pool or empty), ``size`` (that a guest sees), ``allocated``
        (what it takes of its group, or of its thin pool), ``origin``, ``open``, ``health``, ``dm_path``, ``dev``,
        ``inode`` (of its device, while it is active), ``journal`` (whether a job has marked it). Sizes are in bytes;
        what LVM does not tell is null. Of a thin pool that dmeventd extends by itself also ``extend_at`` and
        ``extend_by``, in percent.

    Raises:
        HostError, RefusedError, StoppedError: as of :func:`tools.run`.
        ValueError, LookupError, TypeError, AttributeError: it answers otherwise than expected.
    """
    groups = ask("vgs", "vg", GROUPS, io)
    told = parsed(groups, ask("lvs", "lv", _VOLUMES, io, "-a"))
    states = {(one["group"], one["name"]): one for one in thin_pools(io)} if told["pools"] else {}
    for pool in told["pools"]:
        state = states.get((pool["group"], pool["name"]), {})
        pool |= {"mode": state.get("mode", ""), "needs_check": state.get("needs_check", False)}
    _add_extension(told["pools"], io)
    return told


def not_alone(lines: Sequence[Mapping[str, str]]) -> str:
    """Why a group is not for this machine alone to change, in words; empty where nothing says so.

    Args:
        lines: all that ``vgs`` tells of it, with the columns :data:`GROUPS`.
    """
    group = lines[0]
    locked = group["vg_shared"] or group["vg_clustered"] or group["vg_lock_type"] not in ("", "none")
    reasons = {
        "it has a lock manager": locked,
        "it belongs to a storage domain of oVirt": any(tag.startswith(_OVIRT) for tag in group["vg_tags"].split(",")),
        "it is exported": group["vg_exported"],
        "a disk of it is missing": group["vg_partial"],
        "it belongs to the system that its id names": group["vg_systemid"],
    }
    return far_disks.not_alone(reasons, [line["pv_name"] for line in lines if line["pv_name"]])


def can_be_named(name: str) -> bool:
    """Whether LVM takes a name for a new volume."""
    return NAME.match(name) is not None and _RESERVED.match(name) is None


def _add_extension(pools: Sequence[dict[str, Any]], io: AgentIO) -> None:
    """Says of thin pools that dmeventd watches when it extends them, where LVM's configuration has it do so at all."""
    if not pools:
        return
    done = tools.run(["lvmconfig", "--type", "full", *_EXTENSION], io)
    told = dict(re.findall(r"(\w+)=(\d+)", done.stdout.decode("utf-8", "replace")))
    at, by = (int(told.get(name.rpartition("/")[2], 100)) for name in _EXTENSION)
    if at >= 100:
        return
    lines = ask("lvs", "lv", "vg_name,lv_name,seg_monitor", io, "-S", "segtype=thin-pool")
    watched = {(line["vg_name"], line["lv_name"]) for line in lines if line["seg_monitor"] == "monitored"}
    for pool in pools:
        if (pool["group"], pool["name"]) in watched:
            pool |= {"extend_at": at, "extend_by": by}


def thin_pools(io: AgentIO) -> list[dict[str, Any]]:
    """How full the active thin pools are: one question to the kernel, for which no lock of LVM is taken.

    Nothing is written for it either: without ``--noflush`` each pool would write its metadata first. What it says
    counts even where it ends as failed: it does so where any device goes away between its list and its question.

    Returns:
        For each: ``group``, ``name``; ``mode``: ``rw``, ``ro``, ``out_of_data_space`` or ``Fail``; ``needs_check``;
        ``size``, ``used``, ``metadata_size``, ``metadata_used``, in bytes, null of one that has failed; ``held``: the
        block that a snapshot of its metadata begins with, empty without one. None at all where there is no device
        mapper.
    """
    try:
        done = tools.run_to_end(["dmsetup", "status", "--noflush", "--target", "thin-pool"], io, 5.0)
    except (RefusedError, HostError):
        return []
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return [told for line in lines if (told := thin_pool(line)) is not None]


def thin_pool(line: str) -> dict[str, Any] | None:
    """One line of ``dmsetup status`` as :func:`thin_pools` tells it; ``None`` for what is no thin pool of LVM."""
    found = _THIN_POOL.fullmatch(line)
    group, name = (part.replace("--", "-") for part in found.group(1, 2)) if found else ("", "")
    if found is None or not NAME.match(group) or not NAME.match(name):
        return None
    told: dict[str, Any] = {"group": group, "name": name, "mode": found[4].split()[0], "needs_check": False}
    told["held"] = ""
    sizes = _FULLNESS.fullmatch(found[4])
    if sizes is None:
        return told | dict.fromkeys(("size", "used", "metadata_size", "metadata_used"))
    metadata_used, metadata, used, blocks = map(int, sizes.group(1, 2, 3, 4))
    size = int(found[3]) * 512
    return told | {
        "mode": sizes[6],
        "needs_check": "needs_check" in sizes[7].split(),
        "held": "" if sizes[5] == "-" else sizes[5],
        "size": size,
        "used": size * used // blocks if blocks else 0,
        "metadata_size": metadata * _METADATA_BLOCK,
        "metadata_used": metadata_used * _METADATA_BLOCK,
    }


def ask(tool: str, kind: str, columns: str, io: AgentIO, *more: str, to_end: bool = False) -> list[dict[str, str]]:
    """The lines of a report of LVM.

    Args:
        tool: ``vgs`` or ``lvs``.
        kind: how the report calls its lines: ``vg`` or ``lv``.
        columns: with commas between them.
        more: further options.
        to_end: whether the controller cannot stop it, as in the middle of a change.

    Raises:
        RefusedError: ``tool_missing``.
        HostError: it failed.
        StoppedError: the controller stopped the work.
    """
    argv = [tool, *more, *_REPORT, columns]
    done = tools.run_to_end(argv, io) if to_end else tools.run(argv, io, limits=tools.LIST)
    done.or_fail(f"{tool} ended with")
    return [line for report in json.loads(done.stdout)["report"] for line in report.get(kind, [])]


def parsed(groups: Sequence[Mapping[str, str]], volumes: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Lines of the two reports as :func:`read` tells them."""
    named: dict[tuple[str, str], list[Mapping[str, str]]] = defaultdict(list)
    for line in groups:
        if NAME.match(line["vg_name"]):
            named[line["vg_name"], line["vg_uuid"]].append(line)
    count = Counter(name for name, _ in named)
    told = {name: _group(of, count[name]) for (name, _), of in named.items()}
    lines = [line for line in volumes if not told.get(line["vg_name"], {"why": "no name"})["why"]]
    parts: dict[tuple[str, str], list[Mapping[str, str]]] = defaultdict(list)
    for line in lines:
        if line["lv_parent"]:
            parts[line["vg_name"], _bare(line["lv_parent"])].append(line)
    known = [line for line in lines if NAME.match(line["lv_name"])]  # what is hidden has its name in brackets
    public = [line for line in known if "public" in line["lv_role"].split(",")]
    return {
        "groups": list(told.values()),
        "pools": [_pool(line) for line in known if {"thin", "pool"} <= set(line["lv_layout"].split(","))],
        "volumes": [_volume(line, parts) for line in public],
    }


def _group(lines: Sequence[Mapping[str, str]], count: int) -> dict[str, Any]:
    line = lines[0]
    why = "The host has several volume groups of this name." if count > 1 else ""
    sizes = {"size": int(line["vg_size"]), "free": int(line["vg_free"])}
    return {"name": line["vg_name"], "uuid": line["vg_uuid"], "why": why, "not_alone": not_alone(lines), **sizes}


def _pool(line: Mapping[str, str]) -> dict[str, Any]:
    percent = line["metadata_percent"]
    return {
        "group": line["vg_name"], "name": line["lv_name"], "size": int(line["lv_size"]),
        "used": share(line["lv_size"], line["data_percent"]), "metadata_size": int(line["lv_metadata_size"]),
        "metadata_percent": float(percent) if percent else None,
    }  # fmt: skip


def _volume(line: Mapping[str, str], parts: Mapping[tuple[str, str], Sequence[Mapping[str, str]]]) -> dict[str, Any]:
    group, name = line["vg_name"], _own_name(line)
    pool = _bare(line["pool_lv"]) if "thin" in line["lv_layout"].split(",") else ""
    allocated = share(line["lv_size"], line["data_percent"]) if pool else _taken(line, parts)
    # The size of a snapshot with blocks of its own is what it takes; a guest sees that of its origin.
    size = line["origin_size"] if "thicksnapshot" in line["lv_role"].split(",") else line["lv_size"]
    dev, inode, _ = devices.node(f"/dev/{group}/{name}")
    return {
        "group": group, "name": name, "id": line["lv_uuid"], "pool": pool,
        "size": int(size or line["lv_size"]), "allocated": allocated,
        "origin": line["origin"], "open": line["lv_device_open"] == "open", "health": line["lv_health_status"],
        "dm_path": f"/dev/mapper/{dm_name(group, name)}", "dev": dev, "inode": inode,
        "journal": mark(line) is not None,
    }  # fmt: skip


def mark(line: Mapping[str, str]) -> re.Match[str] | None:
    """What a job has written on a volume; nothing where there are several, of which nobody knows which one holds."""
    found = [tag for tag in map(TAG.fullmatch, line.get("lv_tags", "").split(",")) if tag]
    return found[0] if len(found) == 1 else None


def _own_name(line: Mapping[str, str]) -> str:
    """What a volume is called, also while a job gives it another name."""
    name, work = line["lv_name"], _AT_WORK.fullmatch(line["lv_name"])
    tags = filter(None, map(TAG.fullmatch, line.get("lv_tags", "").split(",")))
    return next((tag[3] for tag in tags if work and tag[1] == work[1] and NAME.match(tag[3])), name)


def dm_name(group: str, name: str) -> str:
    """What the device mapper calls a volume."""
    return f"{group.replace('-', '--')}-{name.replace('-', '--')}"


def _taken(line: Mapping[str, str], parts: Mapping[tuple[str, str], Sequence[Mapping[str, str]]]) -> int | None:
    """What a volume takes of its group: the parts of a mirror or RAID are volumes themselves."""
    layout = set(line["lv_layout"].split(","))
    if not layout & _WHOLE or "cache" in layout:
        return None
    below = parts.get((line["vg_name"], _bare(line["lv_name"])), ())
    if not below:
        return int(line["lv_size"]) if layout & {"linear", "striped"} else None
    sizes = [_taken(one, parts) for one in below]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _bare(name: str) -> str:
    return name.strip("[]")


def share(size: str, percent: str) -> int | None:
    """So many percent of a size, as LVM rounds them to hundredths; ``None`` where it tells none."""
    if not percent:
        return None
    whole, _, hundredths = percent.partition(".")
    return int(size) * int(whole + hundredths.ljust(2, "0")[:2]) // 10_000
