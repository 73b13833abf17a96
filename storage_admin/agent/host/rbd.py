"""What Ceph says of the images in its pools (rbd(8)), where Proxmox VE or libvirt of this host name these pools.

It is asked as they ask it: by their configuration and keys, which root can read. Nothing is mapped or written.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from storage_admin.agent.host.facts import libvirt_pools, proxmox_definitions
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError, b64

_CONFIG = "/etc/ceph/ceph.conf"
#: Without a limit of address space: a client of Ceph has dozens of threads. One that is away is not waited for.
LIMITS = tools.Limits(address_space=None, wall_seconds=20.0, output_bytes=32 << 20)
#: Images that are asked about at once.
_AT_ONCE = 8
#: Seconds that a look between scans waits for a cluster.
_A_LOOK = 5.0
_UNKNOWN = dict.fromkeys(("stored", "available", "allocated"))
#: How it ends where a tool fails, or answers otherwise than expected.
_UNTOLD = (HostError, ValueError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True)
class Named:
    """A pool of Ceph that somebody here names, with a namespace in it or none.

    Args:
        access: how its cluster is asked: options of all its tools.
    """

    pool: str
    namespace: str
    access: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.pool}/{self.namespace}" if self.namespace else self.pool

    @property
    def options(self) -> list[str]:
        """Of ``rbd``."""
        return [*self.access, f"--pool={self.pool}", *([f"--namespace={self.namespace}"] if self.namespace else [])]


def read(io: AgentIO, etc_pve: str = "/etc/pve") -> dict[str, Any]:
    """Ask each pool that is named here for its images; each image for who has it open and what it takes.

    Returns:
        ``pools``: ``name`` (with the namespace, as ``vms/tenant``), ``pool``, ``fsid`` of the cluster, ``stored`` and
        ``available`` in the whole pool, ``allocated`` (of the disks, copies included) of ``raw`` in the whole cluster,
        ``why`` (why nothing is told of its images). ``volumes``: ``pool`` (that name), ``name_b64``, ``id``, ``size``
        (null of one that cannot be opened), ``used`` (written since its last snapshot, in whole objects), ``snapshots``
        (the same of its snapshots), ``has_snapshots``, ``others`` (what else Ceph does with it: groups, moves, clones
        of it), ``parent_b64`` (what it is a clone of, with pool and namespace; or empty), ``watchers`` (who has it
        open). Sizes are in bytes; null is what only a look at all objects could tell.

    Raises:
        StoppedError: the controller stopped the work.
    """
    told: dict[str, Any] = {"pools": [], "volumes": []}
    clusters: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for one in named(etc_pve):
        if one.access not in clusters:
            clusters[one.access] = _cluster(one.access, io)
        cluster = clusters[one.access]
        pool: dict[str, Any] = {
            "name": one.name, "pool": one.pool, "fsid": cluster["fsid"], "why": cluster["why"],
            "raw": cluster["raw"], **cluster["pools"].get(one.pool, _UNKNOWN),
        }  # fmt: skip
        try:
            told["volumes"] += [] if pool["why"] else _images(one, io)
        except _UNTOLD as error:
            pool["why"] = _why(error)
        told["pools"].append(pool)
    return _once(told)


def room(pools: Collection[str], io: AgentIO, etc_pve: str = "/etc/pve") -> dict[str, dict[str, int]]:
    """How much room there is in pools, by one question to each cluster; those that none tells of are left out.

    Args:
        pools: each as the id of its cluster and its name, as ``FSID/vms``.

    Returns:
        By these ``capacity_bytes`` (stored and available) and ``available_bytes``.

    Raises:
        StoppedError: the controller stopped the work.
    """
    found: dict[str, dict[str, int]] = {}
    for access in sorted({one.access for one in named(etc_pve)}) if pools else ():
        if len(found) == len(pools):
            break
        cluster = _cluster(access, io, _A_LOOK)
        for name, pool in cluster["pools"].items():
            if f"{cluster['fsid']}/{name}" in pools:
                capacity = pool["stored"] + pool["available"]
                room = {"capacity_bytes": capacity, "available_bytes": pool["available"]}
                found[f"{cluster['fsid']}/{name}"] = room
    return found


def named(etc_pve: str) -> list[Named]:
    """The pools that Proxmox VE or libvirt of this host name, with how each is asked."""
    return sorted({*_of_proxmox(etc_pve), *_of_libvirt()}, key=lambda one: (one.name, one.access))


def _once(told: dict[str, Any]) -> dict[str, Any]:
    """A pool may be named twice: one way to it is enough. Pools of one name in two clusters cannot be told apart."""
    ways: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for pool in sorted(told["pools"], key=lambda one: bool(one["why"])):
        ways[pool["name"]].append(pool)
    for first, *more in ways.values():
        if any(one["fsid"] != first["fsid"] and not one["why"] for one in more):
            first["why"] = "The host knows several Ceph pools of this name."
    volumes = {(one["pool"], one["name_b64"]): one for one in told["volumes"] if not ways[one["pool"]][0]["why"]}
    return {"pools": [first for first, *_ in ways.values()], "volumes": list(volumes.values())}


def _of_proxmox(etc_pve: str) -> Iterator[Named]:
    """As PVE::CephConfig (``ceph_connect_option``) finds a storage's configuration and key."""
    for kind, name, settings in proxmox_definitions(etc_pve):
        if kind != "rbd" or "disable" in settings:
            continue
        own = {end: f"{etc_pve}/priv/ceph/{name}.{end}" for end in ("conf", "keyring")}
        own = {end: path for end, path in own.items() if os.path.exists(path)}
        monitors = settings.get("monhost", "").replace(";", ",").replace(" ", ",")
        config = own.get("conf") or ("" if monitors else f"{etc_pve}/ceph.conf")
        access = _access(
            config, monitors if not own.get("conf") else "", settings.get("username", "admin"), own.get("keyring", "")
        )
        if access is not None:
            yield Named(settings.get("pool", "rbd"), settings.get("namespace", ""), access)


def _of_libvirt() -> Iterator[Named]:
    for pool in libvirt_pools():
        source, auth = pool.find("source"), pool.find("source/auth")
        if pool.get("type") != "rbd" or source is None:
            continue
        name, _, namespace = source.findtext("name", "").partition("/")
        access = _access(_CONFIG, "", "admin" if auth is None else auth.get("username", "admin"), "")
        if access is not None and name:
            yield Named(name, namespace, access)


def _access(config: str, monitors: str, user: str, keyring: str) -> tuple[str, ...] | None:
    """``None`` where nothing on this host says where the cluster is."""
    if config and not os.path.exists(config):
        return None
    options = [f"--conf={config or '/dev/null'}", f"--id={user}"]
    options += [f"--mon-host={monitors}"] if monitors else []
    return (*options, *([f"--keyring={keyring}"] if keyring else []))


def _cluster(access: tuple[str, ...], io: AgentIO, seconds: float = 20.0) -> dict[str, Any]:
    """Its id, its size, and what is in each pool; where it does not answer, why."""
    try:
        asked = [["ceph", *access, what] for what in ("fsid", "df")]
        fsid, told = _answers(asked, io, limits=replace(LIMITS, wall_seconds=seconds))
        pools = {
            pool["name"]: {
                "stored": int(pool["stats"]["stored"]), "available": int(pool["stats"]["max_avail"]),
                "allocated": int(pool["stats"]["bytes_used"]),
            }
            for pool in told["pools"]
        }  # fmt: skip
        return {"fsid": str(fsid["fsid"]), "why": "", "pools": pools, "raw": int(told["stats"]["total_bytes"])}
    except _UNTOLD as error:
        return {"fsid": "", "why": _why(error), "pools": {}, "raw": None}


def _why(error: Exception) -> str:
    if isinstance(error, HostError):
        return f"Ceph does not answer: {error.detail}."
    return f"The answer of Ceph is not understood: {error!r}."


def _images(of: Named, io: AgentIO) -> list[dict[str, Any]]:
    names = set(map(str, _json(["rbd", *of.options, "ls"], io)))
    lines = _json(["rbd", *of.options, "ls", "--long"], io)
    images = {str(one["image"]): one for one in lines if "snapshot" not in one}
    if lost := names - set(images):  # it cannot be opened, or was removed since
        lost &= set(map(str, _json(["rbd", *of.options, "ls"], io)))
    # Of a name with one of these rbd makes a pool or a snapshot: such an image is listed, and no more.
    asked = [name for name in images if not set(name) & {"/", "@"}]
    info, status = (_of_each(of, what, asked, io) for what in ("info", "status"))
    quick = [name for name in asked if "fast-diff" in info[name].get("features", ()) and not info[name]["flags"]]
    used = _used(of, quick, len(images), io)
    snapshots = {str(one["image"]) for one in lines if "snapshot" in one}
    return [
        *(
            _volume(of, one | info.get(name, {}), used.get(name, {}), status.get(name, {}), name in snapshots)
            for name, one in images.items()
        ),
        *(_volume(of, {"image": name}, {}, {}, False) for name in sorted(lost)),
    ]


def _volume(
    of: Named, line: Mapping[str, Any], used: Mapping[str, int], status: Mapping[str, Any], has_snapshots: bool
) -> dict[str, Any]:
    return {
        "pool": of.name, "name_b64": b64(_raw(str(line["image"]))),
        "size": int(line["size"]) if "size" in line else None,
        "id": str(line.get("id", "")), "used": used.get("own"), "snapshots": used.get("snapshots"),
        "has_snapshots": has_snapshots or bool(line.get("snapshot_count")),
        "others": sorted(set(map(str, line.get("op_features", ()))) - {"clone-child"}),
        "parent_b64": b64(_raw(_parent(line.get("parent")))),
        "watchers": [str(who["address"])[:100] for who in status.get("watchers", ())],
    }  # fmt: skip


def _used(of: Named, quick: Sequence[str], count: int, io: AgentIO) -> dict[str, dict[str, int]]:
    """What images with a map of what changed (fast-diff) take; of others, each object would have to be looked at."""
    if not quick:
        return {}
    commands = [["du"]] if len(quick) == count else [["du", f"--image={name}"] for name in quick]
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"own": 0, "snapshots": 0})
    for answer in _answers([["rbd", *of.options, *command] for command in commands], io):
        for one in answer["images"]:
            found[str(one["name"])]["snapshots" if "snapshot" in one else "own"] += int(one["used_size"])
    return found


def _parent(told: Mapping[str, Any] | None) -> str:
    if not told:
        return ""
    return "/".join(part for part in (told["pool"], told.get("pool_namespace", ""), told["image"]) if part)


def _of_each(of: Named, what: str, names: Sequence[str], io: AgentIO) -> dict[str, Any]:
    """What it says of each image; nothing of one that it cannot open."""
    commands = [["rbd", *of.options, what, f"--image={name}"] for name in names]
    return dict(zip(names, _answers(commands, io, must=False)))


def _json(command: Sequence[str], io: AgentIO) -> Any:
    return _answers([command], io)[0]


def _answers(
    commands: Sequence[Sequence[str]], io: AgentIO, *, must: bool = True, limits: tools.Limits = LIMITS
) -> list[Any]:
    """The answers, in their order; where one fails, an empty one unless it ``must`` not."""
    lines = [[_raw(word) for word in (*command, "--format=json")] for command in commands]
    shown = None if len(commands) < 2 else [*commands[0], f"(and {len(commands) - 1} more)"]
    done = tools.run_all(lines, io, at_once=_AT_ONCE, limits=limits, shown=shown)
    return [{} if one.exit_code and not must else answer_of(one, commands[0][0]) for one in done]


def answer_of(done: tools.Finished, tool: str) -> Any:
    """What a tool of Ceph has said in JSON; of no metadata it says nothing at all.

    Raises:
        HostError: it failed, or says what is not understood.
    """
    done.or_fail(f"{tool} ended with")
    try:
        return json.loads(done.stdout.decode("utf-8", "surrogateescape") or "{}", strict=False)
    except ValueError as error:
        raise HostError(f"the answer of {tool} is not understood: {error}") from error


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
