"""What LVM, ZFS and Ceph each call their places and volumes: from the agent's events to one shape.

A *place* is what a pool of the dashboard stands for: a volume group, a thin pool, a ZFS pool or a dataset in one,
a pool of Ceph or a namespace in one.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from storage_admin.agent.folders.pools import is_ours
from storage_admin.agent.protocol import unb64
from storage_admin.hosts.models import StoragePool

Kind = StoragePool.Kind
Source = StoragePool.Source
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Volume:
    """A volume. Sizes are in bytes, ``None`` where the backend does not measure them.

    Args:
        path: what guests call it; ``alias`` another such name, or empty.
        size: that a guest sees.
        allocated: what it takes of its place; ``exclusive``: what deleting it would free.
        snapshots: what its snapshots take beside that; ``reserved``: what is kept for it, and not written yet.
        base: path of the volume that it is a snapshot or clone of, or empty.
        dev, inode: of its device's file, where there is one.
        open: why it is in use, or empty.
        unreadable: why no guest can read it, or empty.
        block_size: in which it is written, where a place has no one size.
        ids: what the agent knows it by, where it can be set aside.
        kept: why it is needed though no guest names it, in a sentence; empty where nothing says so.
        has_snapshots: without them, it gets no other name (of ZFS).
    """

    path: str
    size: int | None
    allocated: int | None
    exclusive: int | None = None
    snapshots: int | None = None
    reserved: int | None = None
    format: str = "raw"
    base: str = ""
    alias: str = ""
    dev: int | None = None
    inode: int | None = None
    open: str = ""
    unreadable: str = ""
    block_size: int | None = None
    ids: dict[str, str] = field(default_factory=dict)
    kept: str = ""
    has_snapshots: bool = False


@dataclass
class Place:
    """A place, by the backend's own name of it (``vg0``, ``vg0/pool0``, ``tank/data``).

    Args:
        why: why nothing is told of its volumes, or empty.
        key: of the storage, by an id of the backend's own: hosts that see one group see one storage.
        fs_key: of what its space is shared with.
        facts: what the backend says beside its space (:attr:`StoragePool.volume_facts`).
        is_pool: it is a pool even where it has no volumes.
        asides: volumes that are set aside in it, which are none of ``volumes``.
        journals: volumes that a job has marked: those, and what it works on, makes, or was cut off at.
    """

    name: str
    kind: Kind
    key: str
    fs_key: str
    why: str = ""
    capacity: int | None = None
    available: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    is_pool: bool = False
    asides: int = 0
    journals: int = 0
    volumes: list[Volume] = field(default_factory=list)


@dataclass(frozen=True)
class Backend:
    """How one of them is called, and read.

    Args:
        title: in sentences.
        kinds: of its pools.
        source: of pools that nobody else has.
        name_of: the name of the place that a pool stands for.
        path_of: the path of a pool of its own, by the place's name.
        is_shared: any host that names a place may read it, so that of hosts of one cluster one lists its volumes.
        places: what an event tells, by name; the second argument are the names of places that others have as pools.
    """

    name: str
    title: str
    kinds: tuple[Kind, ...]
    source: Source
    name_of: Callable[[StoragePool, Event], str]
    path_of: Callable[[str], str]
    places: Callable[[Event, Collection[str]], dict[str, Place]]
    is_shared: bool = False


def lvm_name(row: StoragePool, _: Event | None = None) -> str:
    """Pools of Proxmox VE have ``lvmthin vg0/pool0`` as their path."""
    return row.path.partition(" ")[2] if row.source == Source.PROXMOX else row.path.removeprefix("/dev/")


def group_id(row: StoragePool) -> str:
    """Of the volume group or ZFS pool that a pool lies in; empty for others, and where no scan has told it."""
    backend, _, key = row.shared_key.partition(" ")
    return key.partition("/" if backend == "lvm" else " ")[0] if backend in {"lvm", "zfs"} else ""


def fullness(told: Event) -> dict[str, Any]:
    """What a thin pool's row keeps of how the kernel tells of it (the agent's ``lvm.thin_pools``)."""
    facts = {name: told[name] for name in ("mode", "needs_check")}
    if told["metadata_size"]:
        percent = 100 * told["metadata_used"] / told["metadata_size"]
        facts |= {"metadata_bytes": told["metadata_size"], "metadata_percent": round(percent, 2)}
    return facts


def _lvm_places(event: Event, _: Collection[str]) -> dict[str, Place]:
    thin_bytes = {one["name"]: 0 for one in event["groups"]}
    for one in event["pools"]:
        thin_bytes[one["group"]] += one["size"] + one["metadata_size"]
    found, divided = dict[str, Place](), {one["group"] for one in (*event["pools"], *event["volumes"])}
    for one in event["groups"]:
        key, name = f"lvm {one['uuid']}", one["name"]
        facts = {"used_bytes": one["size"] - one["free"], "others_bytes": thin_bytes[name]}
        facts["not_alone"] = one["not_alone"]
        is_empty = name not in divided  # a disk can be moved there
        found[name] = Place(name, Kind.LVM, key, key, one["why"], one["size"], one["free"], facts, is_empty)
    for one in event["pools"]:
        name, used, size = f"{one['group']}/{one['name']}", one["used"], one["size"]
        facts = {"metadata_bytes": one["metadata_size"], "metadata_percent": one["metadata_percent"]}
        facts |= {name: one[name] for name in ("mode", "needs_check", "extend_at", "extend_by") if name in one}
        facts |= {"group_free": found[one["group"]].available, "not_alone": found[one["group"]].facts["not_alone"]}
        key = f"{found[one['group']].key}/{one['name']}"
        available = None if used is None else size - used
        found[name] = Place(name, Kind.LVMTHIN, key, key, "", size, available, facts, is_pool=True)
    groups = {one["name"]: one["uuid"] for one in event["groups"]}
    beside = {(one["group"], one["name"]) for one in event["volumes"]}
    for one in event["volumes"]:
        place = found.get(f"{one['group']}/{one['pool']}" if one["pool"] else one["group"])
        if place is not None:
            place.journals += one["journal"]
        if place is not None and is_ours(one["name"]):
            place.asides += one["name"].endswith(".aside")  # one that a job makes is none yet
        elif place is not None:
            ids = _ids("lvm", one["group"], groups[one["group"]], one["name"], one["id"])
            place.volumes.append(_lvm_volume(one, (one["group"], one["origin"]) in beside, ids))
    return found


def _ids(*told: str) -> dict[str, str]:
    return dict(zip(("backend", "group", "group_id", "name", "id"), told, strict=True))


_IN_CHAIN = (
    "Proxmox VE calls it a snapshot in the backing chain of a volume. What reads it is in headers, not in names."
)


def _lvm_volume(one: Event, has_base: bool, ids: dict[str, str]) -> Volume:
    return Volume(
        f"/dev/{one['group']}/{one['name']}", one["size"], one["allocated"],
        exclusive=None if one["pool"] else one["allocated"],
        format="qcow2" if one["name"].endswith(".qcow2") else "raw",
        base=f"/dev/{one['group']}/{one['origin']}" if has_base else "", alias=one["dm_path"],
        dev=one["dev"], inode=one["inode"], open="The volume is open on the host." if one["open"] else "",
        unreadable="A physical volume that it lies on is missing." if one["health"] == "partial" else "",
        ids=ids, kept=_IN_CHAIN if one["name"].startswith("snap_") and one["name"].endswith(".qcow2") else "",
    )  # fmt: skip


_ZVOLS = "/dev/zvol/"
_SNAPSHOTS = "It has snapshots. If they are not needed, delete them first."


def _zfs_name(row: StoragePool, event: Event) -> str:
    """Pools of Proxmox VE have the mount point of the dataset as their path, which may be another name."""
    if row.source != Source.PROXMOX:
        return row.path.removeprefix(_ZVOLS)
    mounted = {one["mountpoint"]: one["name"] for one in event.get("datasets", [])}
    return mounted.get(row.path) or row.path.lstrip("/")


def zfs_room(row: StoragePool) -> str:
    """The dataset whose space a pool's space is: one with bounds of its own around it, or the whole ZFS pool."""
    bound, name = row.fs_key.partition("/")[2], row.shared_key.rpartition(" ")[2]
    return bound or name.partition("/")[0]


def _zfs_places(event: Event, others: Collection[str]) -> dict[str, Place]:
    datasets = {one["name"]: one for one in event["datasets"]}
    found = dict[str, Place]()
    for pool in event["pools"]:
        key, root = f"zfs {pool['guid']}", datasets.get(pool["name"])
        if root is None:
            why = pool["why"] or f"ZFS tells nothing of the datasets in {pool['name']}."
            below = {name for name in others if name.startswith(f"{pool['name']}/")}
            found |= {name: Place(name, Kind.ZFS, f"{key} {name}", key, why) for name in (pool["name"], *below)}
            continue
        there = [name for name in datasets if name.partition("/")[0] == pool["name"]]
        names = [name for name in there if name in others]
        for name in (pool["name"], *names):
            bound = next((one for one in _ancestors(name)[:-1] if datasets.get(one, {}).get("bounded")), "")
            whole = datasets[bound] if bound else root
            place = Place(name, Kind.ZFS, f"{key} {name}", f"{key}/{bound}" if bound else key)
            place.is_pool = len(there) == 1  # a disk can be moved there
            place.available, place.capacity = whole["available"], whole["used"] + whole["available"]
            place.facts = {
                "used_bytes": datasets[name]["used"], "others_bytes": 0, "snapshot_bytes": 0, "reservation_bytes": 0,
                "raw_bytes": pool["size"], "raw_allocated_bytes": pool["allocated"], "health": pool["health"],
                "raidz": pool["raidz"], "not_alone": pool["not_alone"], "pool_available": root["available"],
            }  # fmt: skip
            found[name] = place
    pools = {pool["name"]: pool for pool in event["pools"]}
    for one in event["datasets"]:
        _add(one, datasets, found, pools[one["name"].partition("/")[0]])
    return found


def _ancestors(name: str) -> list[str]:
    """A dataset and all that it lies in, the deepest first."""
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _add(one: Event, datasets: Mapping[str, Event], places: Mapping[str, Place], pool: Event) -> None:
    """Adds a dataset to the sums of each place that it is in, and as a volume to the deepest."""
    group, _, last = one["name"].rpartition("/")
    volume: Any = None if is_ours(last) else one["volume"]
    around = [places[name] for name in _ancestors(one["name"]) if name in places]
    around[0].journals += one["journal"]
    around[0].asides += is_ours(last) and last.endswith(".aside")  # one that a job makes is none yet
    for number, place in enumerate(around):
        is_listed = volume is not None and number == 0 and place.name != one["name"]
        place.facts["others_bytes"] += 0 if is_listed else one["data"]
        place.facts["snapshot_bytes"] += one["snapshots"]
        place.facts["reservation_bytes"] += one["reserved"]
        if is_listed:
            origin = datasets.get(one["origin"])
            is_alone = not volume["has_snapshots"] and not pool["dedup"]
            found = Volume(
                _zfs_path(one), volume["size"], one["data"], one["data"] if is_alone else None, one["snapshots"],
                one["reserved"], "raw" if volume["block"] else "subvol",
                _zfs_path(origin) if origin is not None and origin["volume"] is not None else "",
                dev=volume["dev"], inode=volume["inode"], open=volume["open"], block_size=volume.get("block_size"),
                ids=_ids("zfs", group, pool["guid"], last, one["id"]), kept=_kept(one, place, datasets),
                has_snapshots=volume["has_snapshots"],
            )  # fmt: skip
            place.volumes.append(found)


def _kept(one: Event, place: Place, datasets: Mapping[str, Event]) -> str:
    """Why a volume of ZFS is needed that no guest names, in a sentence.

    A snapshot may be a replication's, a backup's, or one that somebody keeps.
    """
    if one["volume"]["has_snapshots"]:
        return _SNAPSHOTS
    if (
        one["name"].rpartition("/")[0] != place.name
        or _zfs_path(one).rpartition("/")[2] != one["name"].rpartition("/")[2]
    ):
        return "It is not where Proxmox VE looks for the volumes of this storage."
    return "Other datasets lie in it." if any(name.startswith(f"{one['name']}/") for name in datasets) else ""


def _zfs_path(one: Event) -> str:
    if one["volume"]["block"]:
        return _ZVOLS + str(one["name"]).replace(" ", "+")
    return str(one["mountpoint"] or f"/{one['name']}")


def _rbd_name(row: StoragePool, _: Event) -> str:
    """All have ``rbd vms/tenant`` as their path."""
    return row.path.partition(" ")[2]


def rbd_room(row: StoragePool) -> str:
    """The pool of Ceph whose space a pool's space is, with the id of its cluster."""
    return row.fs_key.removeprefix("ceph ")


def _rbd_places(event: Event, _: Collection[str]) -> dict[str, Place]:
    found = dict[str, Place]()
    for pool in event["pools"]:
        name, stored, available = pool["name"], pool["stored"], pool["available"]
        place = Place(name, Kind.RBD, f"rbd {pool['fsid']} {name}", f"ceph {pool['fsid']}/{pool['pool']}", pool["why"])
        if stored is not None and available is not None:
            place.capacity, place.available = stored + available, available
        # What is stored in one namespace nobody tells.
        place.facts = {
            "used_bytes": stored if name == pool["pool"] else None, "snapshot_bytes": 0,
            "raw_bytes": pool["raw"], "raw_allocated_bytes": pool["allocated"],
        }  # fmt: skip
        place.is_pool = True
        found[name] = place
    fsids = {pool["name"]: pool["fsid"] for pool in event["pools"]}
    paths = {_rbd_path(one["pool"], one["name_b64"]) for one in event["volumes"]}
    for one in event["volumes"]:
        place, name = found[one["pool"]], unb64(one["name_b64"]).decode("utf-8", "surrogateescape")
        if is_ours(name):
            place.asides += 1
            place.journals += 1
            continue
        facts, base = place.facts, _rbd_path("", one["parent_b64"]) if one["parent_b64"] else ""
        known = facts["snapshot_bytes"] is not None and one["snapshots"] is not None
        facts["snapshot_bytes"] = facts["snapshot_bytes"] + one["snapshots"] if known else None
        volume = Volume(
            _rbd_path(one["pool"], one["name_b64"]), one["size"], one["used"],
            exclusive=None if one["has_snapshots"] else one["used"], snapshots=one["snapshots"],
            base=base if base in paths else "",
            open=f"The image has watchers: {', '.join(one['watchers'])}." if one["watchers"] else "",
            unreadable="Ceph lists the image and cannot open it." if one["size"] is None else "",
            ids=_ids("rbd", one["pool"], fsids[one["pool"]], name, one["id"]) if one["id"] else {}, kept=_rbd_kept(one),
        )  # fmt: skip
        place.volumes.append(volume)
    return found


def _rbd_kept(one: Event) -> str:
    """Why an image of Ceph is needed that no guest names, in a sentence."""
    if one["has_snapshots"]:
        return _SNAPSHOTS
    if one["others"]:
        return f"Ceph has other uses of it ({', '.join(one['others'])[:100]})."
    return "" if one["id"] else "Ceph lists the image and cannot open it."


def _rbd_path(pool: str, name_b64: str) -> str:
    """As QEMU has it."""
    name = unb64(name_b64).decode("utf-8", "surrogateescape")
    return f"rbd:{pool}/{name}" if pool else f"rbd:{name}"


BACKENDS = {
    one.name: one
    for one in (
        Backend("lvm", "LVM", (Kind.LVM, Kind.LVMTHIN), Source.LVM, lvm_name, "/dev/{}".format, _lvm_places),
        Backend("zfs", "ZFS", (Kind.ZFS,), Source.ZFS, _zfs_name, f"{_ZVOLS}{{}}".format, _zfs_places),
        Backend("rbd", "Ceph RBD", (Kind.RBD,), Source.RBD, _rbd_name, "rbd {}".format, _rbd_places, is_shared=True),
    )
}
