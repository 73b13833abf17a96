"""What ZFS says of its pools, filesystems and volumes (zpool-list(8), zfs-list(8)): they are only read.

As plain text, which every version has; JSON came with 2.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from storage_admin.agent.host import devices, far_disks
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError, RefusedError

#: The journal of a volume that a job has renamed or makes (swap/zfs_volumes.py). What is copied, or inherited from
#: another dataset, names another id than the dataset's own, and counts for nothing. The third part says what it was:
#: the mode of a zvol's device, or whether a filesystem is mounted by itself, and was mounted; with ``=`` where that
#: stood on the dataset itself; ``new`` of one that the job makes.
PROPERTY = "storage-admin:aside"
JOURNAL = re.compile(r"([0-9a-zA-Z]{1,64})\.(\d+)\.(=?[a-z]+(?:,[mn])?)\.(.+)")
#: One that a job works on for the moment.
_AT_WORK = re.compile(r"(.+)/\.sa-([0-9a-zA-Z]{1,64})\.work")
POOLS = ("name", "guid", "size", "allocated", "dedupratio", "health", "ashift", "readonly", "multihost")
DATASETS = (
    "name", "type", "used", "available", "usedbydataset", "usedbysnapshots", "usedbyrefreservation", "volsize",
    "refquota", "quota", "reservation", "origin", "mountpoint", "volblocksize", "guid", PROPERTY,
)  # fmt: skip
#: What ZFS lets a name be (zfs_namecheck.c); what else stands in a pool was written by somebody who means no good.
_NAME = re.compile(r"[a-zA-Z0-9_.:-][a-zA-Z0-9_.: -]*(/[a-zA-Z0-9_.:-][a-zA-Z0-9_.: -]*)*\Z", re.ASCII)
_LONGEST_NAME = 255
#: Containers' filesystems of Proxmox VE, and those of templates.
_SUBVOLUME = re.compile(r"(.*/)?(subvol|basevol)-\d+-[^/]+\Z", re.ASCII)
_RAIDZ = re.compile(r"raidz([123])-\d+")
#: A pool of another health tells nothing of what is in it.
READABLE = frozenset({"ONLINE", "DEGRADED"})


def read(io: AgentIO, _etc_pve: str) -> dict[str, Any]:
    """Ask ZFS once for all pools and once for all that is in them.

    Returns:
        ``pools``: ``name``, ``guid``, ``size`` and
        ``allocated`` (of its disks, parity included), ``health``, ``not_alone`` (as the function says),
        ``dedup`` (whether any block is there once for
        several), ``raidz`` (null, or of a pool all of whose vdevs are alike raidz: ``disks`` and ``parity`` of one, and
        ``sector``, bytes of the smallest write), ``why`` (why nothing is told of what is in it). ``datasets``,
        filesystems and volumes: ``name``; ``used`` with all below it, and ``available``; ``data``, ``snapshots``,
        ``reserved``: what it takes itself, its snapshots alone, and what is kept for it; ``bounded`` (a quota or
        reservation sets it apart from its pool); ``mountpoint`` (or empty); ``id``; ``origin`` (the dataset that it is
        a clone of, or empty); ``journal`` (whether a job has marked it); ``volume``: null, or of a volume and of a
        container's filesystem ``size`` (that a guest sees, or null), ``has_snapshots``, ``block`` (whether it is a
        device), ``block_size`` (of a device, in which it is written), ``dev``, ``inode`` (of its device), ``open`` (why
        it is in use, or empty). Sizes are in bytes; what ZFS does not tell is null.

    Raises:
        HostError, RefusedError, StoppedError: as of :func:`tools.run`.
        ValueError, LookupError: it answers otherwise than expected.
    """
    pools = ask(["zpool", "list"], POOLS, io)
    lines = _lines(["zpool", "list", "-HpvP", "-o", "name"], io) if pools else []
    told = parsed(pools, ask(["zfs", "list", "-t", "filesystem,volume,snapshot"], DATASETS, io) if pools else [])
    for one in told["pools"]:
        one["raidz"] = raidz(lines, one["name"], one.pop("ashift"))
        one["not_alone"] = not_alone(one, _disks(lines, one["name"]))
    volumes = [one["volume"] for one in told["datasets"] if one["volume"] and one["volume"]["block"]]
    numbers = {one["number"] for one in volumes if one["number"] is not None}
    users = devices.users(numbers) if numbers else {}
    for one in volumes:
        one["open"] = users.get(one["number"], "")
    return told


def room(names: Sequence[str], io: AgentIO) -> dict[str, dict[str, int]]:
    """How much room there is in datasets, by one question; those that ZFS does not tell of are left out.

    Returns:
        By name ``capacity_bytes`` (used and available) and ``available_bytes``.

    Raises:
        StoppedError: the controller stopped the work.
    """
    asked = [name for name in names if is_name(name) and not name.startswith("-")]
    try:
        lines = ask(["zfs", "list", "-d", "0"], ("name", "used", "available"), io, *asked) if asked else []
        return {
            line["name"]: {
                "capacity_bytes": int(line["used"]) + int(line["available"]), "available_bytes": int(line["available"]),
            }
            for line in lines
        }  # fmt: skip
    except (HostError, RefusedError, ValueError):
        return {}


def ask(
    command: Sequence[str], columns: Sequence[str], io: AgentIO, *names: str, to_end: bool = False
) -> list[dict[str, str]]:
    """The lines of a list of ZFS, by their columns.

    Args:
        names: what follows the options.
        to_end: whether the controller cannot stop it, as in the middle of a change.

    Raises:
        RefusedError: ``tool_missing``.
        HostError: it failed, or answers otherwise than expected.
        StoppedError: the controller stopped the work.
    """
    argv = [*command, "-Hp", "-o", ",".join(columns), *names]
    rows = [line.split("\t") for line in _lines(argv, io, to_end=to_end)]
    if any(len(row) != len(columns) for row in rows):
        raise HostError(f"{command[0]} tells other columns than it was asked for")
    return [dict(zip(columns, row)) for row in rows]


def _lines(argv: Sequence[str], io: AgentIO, *, to_end: bool = False) -> list[str]:
    done = tools.run_to_end(argv, io) if to_end else tools.run(argv, io, limits=tools.LIST)
    done.or_fail(f"{argv[0]} ended with")
    # A name that is no UTF-8 is none that ZFS gives; the rest of the line is read all the same.
    lines = done.stdout.decode("utf-8", "backslashreplace").split("\n")
    if lines.pop():
        raise HostError(f"the last line of {argv[0]} is cut off")
    return lines


def raidz(lines: Sequence[str], pool: str, ashift: int | None) -> dict[str, int] | None:
    """How the vdevs of a pool are made up, where all of them are alike raidz; ``None`` of any other.

    Args:
        lines: of ``zpool list -HpvP``, in which vdevs and their disks follow their pool, the disks by their paths.
        ashift: as the pool has it; 0 where each vdev may have another.
    """
    found: list[list[int]] = []  # of each vdev its parity and its disks
    for name in _parts(lines, pool):
        if (vdev := _RAIDZ.fullmatch(name)) is not None:
            found.append([int(vdev[1]), 0])
        elif found and name.startswith("/"):
            found[-1][1] += 1
        else:
            return None
    if not ashift or not found or found.count(found[0]) != len(found) or found[0][1] <= found[0][0]:
        return None
    return {"disks": found[0][1], "parity": found[0][0], "sector": 1 << ashift}


def parsed(pools: Sequence[dict[str, str]], datasets: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Lines of the two lists as :func:`read` tells them.

    Raises:
        ValueError: a number is none.
    """
    told = {line["name"]: _pool(line) for line in pools if is_name(line["name"])}
    snapshots = {line["name"].partition("@")[0] for line in datasets if line["type"] == "snapshot"}
    found = []
    for line in datasets:
        pool = told.get(line["name"].partition("/")[0])
        if line["type"] in {"filesystem", "volume"} and is_name(line["name"]) and pool and not pool["why"]:
            found.append(_dataset({**line, "name": _own_name(line)}, line["name"] in snapshots))
    return {"pools": list(told.values()), "datasets": found}


def disks(pool: str, io: AgentIO) -> list[str]:
    """The paths of what a pool lies on, without its logs, caches and spares: by these alone nobody else has the pool.

    Raises:
        RefusedError, HostError: as of :func:`ask`.
    """
    return _disks(_lines(["zpool", "list", "-HpvP", "-o", "name", pool], io, to_end=True), pool)


def _disks(lines: Sequence[str], pool: str) -> list[str]:
    return [name for name in _parts(lines, pool) if name.startswith("/")]


def _parts(lines: Sequence[str], pool: str) -> Iterator[str]:
    """The names of a pool's vdevs and their disks. Those of a cache, of logs and of spares hold no volumes."""
    is_in = False
    for line in lines:
        if not line.startswith("\t"):
            is_in = line == pool or line.startswith(f"{pool}\t")
        elif is_in:
            yield line.strip("\t").partition("\t")[0]


def not_alone(pool: Mapping[str, str], disks: Sequence[str]) -> str:
    """Why a pool is not for this machine alone to change, in words; empty where nothing says so.

    Args:
        pool: its properties ``multihost``, ``readonly`` and ``health``.
        disks: paths of what it lies on.
    """
    reasons = {
        "it has the property multihost": pool["multihost"] != "off",
        "it is imported read-only": pool["readonly"] != "off",
        f"its health is {pool['health'][:20]}": pool["health"] not in READABLE,
    }
    return far_disks.not_alone(reasons, disks)


def _own_name(line: dict[str, str]) -> str:
    """What a volume is called, also while a job gives it another name."""
    work, journal = _AT_WORK.fullmatch(line["name"]), mark(line)
    return f"{work[1]}/{journal[4]}" if work and journal and journal[1] == work[2] else line["name"]


def mark(line: Mapping[str, str]) -> re.Match[str] | None:
    """What a job has written on a volume or filesystem; nothing where it has that from one that it was made of."""
    journal = JOURNAL.fullmatch(line[PROPERTY])
    if journal is None or journal[2] == line["guid"]:
        return journal
    # What a job makes comes with its journal, and has its id only then.
    return journal if journal[2] == "0" and line["name"].endswith(f"/.sa-{journal[1]}.new") else None


def can_be_named(path: str) -> bool:
    """Whether ZFS takes a name, with all that it lies in, for a new volume, and guests can name its device."""
    last = path.rpartition("/")[2]
    return is_name(path) and " " not in last and last not in {".", ".."} and not last.startswith(("-", ".sa-"))


def is_name(name: str) -> bool:
    """Whether ZFS could give that name to a pool or dataset."""
    return len(name) <= _LONGEST_NAME and _NAME.match(name) is not None


def _pool(line: dict[str, str]) -> dict[str, Any]:
    health = line["health"]
    return {
        "name": line["name"], "guid": line["guid"], "size": _number(line["size"]),
        "allocated": _number(line["allocated"]), "health": health[:20],
        "readonly": line["readonly"], "multihost": line["multihost"],
        "ashift": _number(line["ashift"]), "dedup": line["dedupratio"] not in {"1.00", "1.00x"},
        "why": "" if health in READABLE else f"The ZFS pool has the health {health[:20]}.",
    }  # fmt: skip


def _dataset(line: dict[str, str], has_snapshots: bool) -> dict[str, Any]:
    is_volume, mountpoint = line["type"] == "volume", line["mountpoint"]
    told: dict[str, Any] = {
        "name": line["name"], "used": int(line["used"]), "available": int(line["available"]),
        "data": int(line["usedbydataset"]), "snapshots": int(line["usedbysnapshots"]),
        "reserved": int(line["usedbyrefreservation"]),
        "bounded": bool(_number(line["quota"]) or _number(line["reservation"])),
        "mountpoint": mountpoint if mountpoint.startswith("/") else "", "id": line["guid"],
        "origin": "" if line["origin"] == "-" else line["origin"].partition("@")[0], "volume": None,
        "journal": mark(line) is not None,
    }  # fmt: skip
    if is_volume:
        dev, inode, number = devices.node(device(line["name"]))
        told["volume"] = {
            "size": int(line["volsize"]),
            "dev": dev,
            "inode": inode,
            "number": number,
            "block_size": int(line["volblocksize"]),
        }
    elif _SUBVOLUME.match(line["name"]):
        told["volume"] = {"size": _number(line["refquota"]) or None, "dev": None, "inode": None, "number": None}
    if told["volume"]:
        told["volume"] |= {"has_snapshots": has_snapshots, "block": is_volume, "open": ""}
    return told


def device(name: str) -> str:
    """The path of a volume's device (zvol_id.c): udev's names have no blanks."""
    return f"/dev/zvol/{name.replace(' ', '+')}"


def _number(text: str) -> int | None:
    return None if text in {"-", "none"} else int(text)
