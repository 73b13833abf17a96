"""Whether two pools that NFS has a part in are one storage, whatever they are called: by what the server itself says.

A server has several addresses, one of its folders several paths, and the server itself has the folder, too. The same in
all of them are the numbers of the folder and of its files, and the times of these, to the nanosecond. What that proves,
and what it does not, is in docs/safety.md (2.3).
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet

from images.models import Image
from storage_admin.hosts.models import Host, StoragePool

#: Capacities may differ by so much: each version counts in blocks of its own size.
_ROUNDED_BYTES = 1 << 20


@dataclass(frozen=True)
class Relation:
    """What one pool is to another.

    Args:
        is_proven: they are one storage; else they may be.
        ours, theirs: the folder in ours that is their whole folder, and the other way round; one is empty.
    """

    is_proven: bool
    ours: str = ""
    theirs: str = ""


def settle(host: Host, told: Collection[int]) -> None:
    """Gives the pools of a host the keys of what they are proven to be, and notes what they may be.

    Args:
        told: ids of the pools that the agent has just told of; their keys are those that it gave them.
    """
    everywhere = list(StoragePool.objects.filter(network=True).exclude(mount={}).order_by("pk"))
    doubts: list[tuple[StoragePool, list[tuple[StoragePool, Relation]]]] = []
    for pool in (one for one in everywhere if one.host_id == host.pk and one.pk in told):
        others = [(one, found) for one in everywhere if one.pk != pool.pk and (found := relation(pool, one))]
        same = [(one, found) for one, found in others if found.is_proven]
        apart = {one.shared_key for one in everywhere if one.pk not in {pool.pk, *(other.pk for other, _ in same)}}
        outer = min(same, key=lambda pair: (-len(pair[1].theirs), bool(pair[1].ours), pair[0].pk), default=None)
        key, fs_key = pool.mount["shared_key"], pool.mount["fs_key"]
        if outer is not None and (outer[1].theirs or (not outer[1].ours and outer[0].pk < pool.pk)):
            key, fs_key = _below(outer[0].shared_key, outer[1].theirs), outer[0].fs_key
        elif key in apart:  # what is called the same is not known to be
            key, fs_key = f"#{pool.pk} {key}", f"#{pool.pk} {fs_key}"
        pool.shared_key, pool.fs_key = key, fs_key
        doubts.append((pool, [(one, found) for one, found in others if not found.is_proven]))
    for pool, unproven in doubts:
        pool.may_be = [
            {"pool": one.pk, "ours": found.ours, "theirs": found.theirs}
            for one, found in unproven
            if _by_name(pool.shared_key, one.shared_key) is None  # else both are proven to be a third one
        ]
        pool.save(update_fields=["shared_key", "fs_key", "may_be"])


def relation(pool: StoragePool, other: StoragePool) -> Relation | None:
    """What two pools are to each other, by the last scans of both; ``None`` where nothing speaks for one storage."""
    mine, theirs = pool.mount, other.mount
    if pool.is_exported and other.is_exported and pool.host_id != other.host_id:
        return None  # each is on disks of its own
    one_server = bool(set(mine["addresses"]) & set(theirs["addresses"]))
    one_folder = mine["inode"] == theirs["inode"]
    may_be_one = len({mine["fsid"], theirs["fsid"]} - {None}) < 2
    named = _by_name(mine["shared_key"], theirs["shared_key"])
    if one_server and may_be_one and named is not None and (one_folder or any(named)):
        return Relation(True, *named)
    if one_server and one_folder and mine["fsid"] is not None and mine["fsid"] == theirs["fsid"]:
        return Relation(True)
    found = _in_both(pool, other)
    if found.count:
        since = max(at.timestamp() * 1e9 if at else float("inf") for at in (pool.known_since, other.known_since))
        is_proven = may_be_one and bool((one_server and found.unchanged) or found.newest_ns > since)
        return Relation(is_proven, *found.place)
    if named is not None:
        return Relation(False, *named)
    sizes = [one.capacity_bytes or 0 for one in (pool, other)]
    alike = one_folder and abs(sizes[0] - sizes[1]) <= _ROUNDED_BYTES
    return Relation(False) if alike and not (_images(pool).exists() and _images(other).exists()) else None


@dataclass(frozen=True)
class _Files:
    """Images with the same number and name in two pools.

    Args:
        place: as :class:`Relation` has it.
        unchanged: how many have the same size and times in both as well.
        newest_ns: when the last one of these was changed, in nanoseconds since 1970; 0 for none.
    """

    place: tuple[str, str] = ("", "")
    count: int = 0
    unchanged: int = 0
    newest_ns: int = 0


def _in_both(pool: StoragePool, other: StoragePool) -> _Files:
    here, there = _listed(pool, other), _listed(other, pool)
    places: dict[tuple[str, str], list[tuple[bool, int]]] = {}
    for key in here.keys() & there.keys():
        (path, *stamp), (their_path, *their_stamp) = here[key], there[key]
        ours, theirs = _apart(path, their_path)
        if not (ours and theirs):
            places.setdefault((ours, theirs), []).append((stamp == their_stamp, stamp[-1]))
    if not places:
        return _Files()
    place = Counter({where: len(found) for where, found in places.items()}).most_common(1)[0][0]
    unchanged = [changed_ns for is_same, changed_ns in places[place] if is_same]
    return _Files(place, len(places[place]), len(unchanged), max(unchanged, default=0))


def _images(pool: StoragePool) -> QuerySet[Image]:
    return Image.every.filter(pool=pool, missing_since=None).order_by()


def _listed(pool: StoragePool, other: StoragePool) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Of the images whose numbers are in another pool, too, by number and name: path in the pool, size, and times."""
    rows = _images(pool).filter(inode__in=_images(other).values("inode"))
    columns = ("inode", "name", "path", "file_size", "mtime_ns", "ctime_ns")
    start = len(pool.path.rstrip("/")) + 1
    return {(inode, name): (path[start:], *rest) for inode, name, path, *rest in rows.values_list(*columns)}


def _apart(path: str, other: str) -> tuple[str, str]:
    """The folders that are left of two paths without the end that they have in common."""
    one, two = path.split("/"), other.split("/")
    while one and two and one[-1] == two[-1]:
        one.pop()
        two.pop()
    return "/".join(one), "/".join(two)


def _by_name(key: str, other: str) -> tuple[str, str] | None:
    """The same, by the names under which the pools were mounted; ``None`` where neither is within the other."""
    one, two = key.rstrip("/"), other.rstrip("/")
    if (one + "/").startswith(two + "/"):
        return "", one[len(two) + 1 :]
    return (two[len(one) + 1 :], "") if two.startswith(one + "/") else None


def _below(key: str, folder: str) -> str:
    return f"{key.rstrip('/')}/{folder}" if folder else key
