"""What LVM says of its groups and volumes (vgs(8), lvs(8)): they are only read, and nothing is activated.

Without ``--readonly``, with which LVM does not ask the kernel, and so tells no share of a thin pool that is used.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from storage_admin.agent.host import devices
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError

_REPORT = ("--reportformat", "json", "--units", "b", "--nosuffix", "-o")
_GROUPS = "vg_name,vg_uuid,vg_size,vg_free"
#: Of a volume, none of its segments: with one of these there would be a line for each segment.
_VOLUMES = (
    "lv_name,vg_name,lv_layout,lv_role,lv_parent,lv_size,data_percent,metadata_percent,lv_metadata_size,origin,"
    "origin_size,pool_lv,lv_device_open,lv_health_status"
)
#: For ten thousand volumes and the parts of each.
_LIMITS = tools.Limits(output_bytes=32 << 20)
#: What LVM's tools let a name be (lvm(8)); what else stands in metadata was written by somebody who means no good.
_NAME = re.compile(r"(?!\.{1,2}\Z)[a-zA-Z0-9+_.][a-zA-Z0-9+_.-]{0,126}\Z", re.ASCII)
#: Layouts of which all parts are known by their sizes: not those of caches and VDO.
_WHOLE = frozenset({"linear", "striped", "raid", "mirror"})


def read(io: AgentIO, _etc_pve: str) -> dict[str, Any]:
    """Ask LVM once for all groups and once for all volumes.

    Returns:
        ``groups``: ``name``, ``uuid``, ``size``, ``free``,
        ``why`` (why nothing is told of its volumes). ``pools`` (thin pools): ``group``, ``name``, ``size``, ``used``,
        ``metadata_size``, ``metadata_percent``. ``volumes``: ``group``, ``name``, ``pool`` (the thin pool or empty),
        ``size`` (that a guest sees), ``allocated`` (what it takes of its group, or of its thin pool), ``origin``,
        ``open``, ``health``, ``dm_path``, ``dev``, ``inode`` (of its device, while it is active). Sizes are in bytes;
        what LVM does not tell is null.

    Raises:
        HostError, RefusedError, StoppedError: as of :func:`tools.run`.
        ValueError, LookupError, TypeError, AttributeError: it answers otherwise than expected.
    """
    groups = _ask("vgs", "vg", _GROUPS, io)
    return parsed(groups, _ask("lvs", "lv", _VOLUMES, io, "-a"))


def _ask(tool: str, kind: str, columns: str, io: AgentIO, *more: str) -> list[dict[str, str]]:
    done = tools.run([tool, *more, *_REPORT, columns], io, limits=_LIMITS)
    if done.exit_code:
        raise HostError(f"{tool} ended with {done.words()}")
    return [line for report in json.loads(done.stdout)["report"] for line in report.get(kind, [])]


def parsed(groups: Sequence[Mapping[str, str]], volumes: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Lines of the two reports as :func:`read` tells them."""
    named = [line for line in groups if _NAME.match(line["vg_name"])]
    count = Counter(line["vg_name"] for line in named)
    told = {line["vg_name"]: _group(line, count[line["vg_name"]]) for line in named}
    lines = [line for line in volumes if not told.get(line["vg_name"], {"why": "no name"})["why"]]
    parts: dict[tuple[str, str], list[Mapping[str, str]]] = defaultdict(list)
    for line in lines:
        if line["lv_parent"]:
            parts[line["vg_name"], _bare(line["lv_parent"])].append(line)
    known = [line for line in lines if _NAME.match(line["lv_name"])]  # what is hidden has its name in brackets
    public = [line for line in known if "public" in line["lv_role"].split(",")]
    return {
        "groups": list(told.values()),
        "pools": [_pool(line) for line in known if {"thin", "pool"} <= set(line["lv_layout"].split(","))],
        "volumes": [_volume(line, parts) for line in public],
    }


def _group(line: Mapping[str, str], count: int) -> dict[str, Any]:
    why = "The host has several volume groups of this name." if count > 1 else ""
    sizes = {"size": int(line["vg_size"]), "free": int(line["vg_free"])}
    return {"name": line["vg_name"], "uuid": line["vg_uuid"], "why": why, **sizes}


def _pool(line: Mapping[str, str]) -> dict[str, Any]:
    percent = line["metadata_percent"]
    return {
        "group": line["vg_name"], "name": line["lv_name"], "size": int(line["lv_size"]),
        "used": _share(line["lv_size"], line["data_percent"]), "metadata_size": int(line["lv_metadata_size"]),
        "metadata_percent": float(percent) if percent else None,
    }  # fmt: skip


def _volume(line: Mapping[str, str], parts: Mapping[tuple[str, str], Sequence[Mapping[str, str]]]) -> dict[str, Any]:
    group, name = line["vg_name"], line["lv_name"]
    pool = _bare(line["pool_lv"]) if "thin" in line["lv_layout"].split(",") else ""
    allocated = _share(line["lv_size"], line["data_percent"]) if pool else _taken(line, parts)
    # The size of a snapshot with blocks of its own is what it takes; a guest sees that of its origin.
    size = line["origin_size"] if "thicksnapshot" in line["lv_role"].split(",") else line["lv_size"]
    dev, inode, _ = devices.node(f"/dev/{group}/{name}")
    return {
        "group": group, "name": name, "pool": pool, "size": int(size or line["lv_size"]), "allocated": allocated,
        "origin": line["origin"], "open": line["lv_device_open"] == "open", "health": line["lv_health_status"],
        "dm_path": f"/dev/mapper/{group.replace('-', '--')}-{name.replace('-', '--')}", "dev": dev, "inode": inode,
    }  # fmt: skip


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


def _share(size: str, percent: str) -> int | None:
    """So many percent of a size, as LVM rounds them to hundredths; ``None`` where it tells none."""
    if not percent:
        return None
    whole, _, hundredths = percent.partition(".")
    return int(size) * int(whole + hundredths.ljust(2, "0")[:2]) // 10_000
