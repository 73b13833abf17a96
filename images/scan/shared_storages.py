"""Storages that several hosts have: whose rows their images are, and what other hosts may need in them.

A storage that several nodes of a cluster share has one set of images, not one per node. Each node has a pool of it,
with the space that the node tells of. Its images are rows of one of these pools, the *lister*: one whose agent has
walked the folder, else the first of those that the API told everything of. It changes where the lister's node falls
silent; the rows go along, with their history.

What any registered host has in a storage may be needed by guests and images of another one. A pool's ``shared_key`` is
where it lies, the same on every host; what is below that is the same below each pool.
"""

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.db.models import F, Q, QuerySet, TextField
from django.db.models.functions import Cast

from images.models import Image
from storage_admin.guests.models import GuestDisk
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import display, path_key, raw

#: Said of the others' pools. Not where: that node may not exist for whoever reads it.
ELSEWHERE = "The nodes of the cluster share this storage. Its images are listed at another node."


def siblings(pool: StoragePool) -> list[StoragePool]:
    """The pools of the same storage on other nodes of the cluster, those that an agent walks among them."""
    host = pool.host
    if not pool.network or pool.is_exported or not host.cluster:
        return []
    same = Q(path_key=pool.path_key)
    if pool.path_bytes:
        same |= Q(path=pool.path, path_bytes=b"")
    elif pool.path.startswith("/"):
        same |= Q(path_key=path_key(raw(pool.path)))
    others = StoragePool.objects.filter(
        same, host__kind=Host.Kind.PROXMOX, host__cluster=host.cluster, source=StoragePool.Source.PROXMOX
    )
    found = others.exclude(host=host).select_related("host").order_by("pk")
    return [one for one in found if not one.is_exported]  # which each node has on disks of its own


def lister_of(pool: StoragePool, *, is_whole: bool) -> StoragePool:
    """The pool whose images those of the storage are.

    Args:
        is_whole: whether this pool's own node has just told of all its volumes.
    """
    others = siblings(pool)
    if not others:
        return pool
    holders = set(Image.every.filter(pool__in=[pool, *others]).order_by().values_list("pool_id", flat=True).distinct())

    def rank(one: StoragePool) -> tuple[bool, bool, bool, int]:
        walked = bool(one.path_bytes) and one.last_scanned is not None
        answers = one.host.status != Host.Status.UNREACHABLE and one.state == "ok" and one.last_scanned is not None
        return (not walked, not (is_whole if one.pk == pool.pk else answers), one.pk not in holders, one.pk)

    return min([pool, *others], key=rank)


def listed_in(pool: StoragePool) -> int:
    """Id of the pool whose rows the images of a pool are: its own, or that of another node which shares it."""
    if pool.source != StoragePool.Source.PROXMOX or not pool.network or _has_rows(pool):
        return pool.pk
    return next((one.pk for one in siblings(pool) if _has_rows(one)), pool.pk)


def leave_to(pool: StoragePool, lister: StoragePool) -> None:
    """Another pool has the rows: those here are the same images once more, and go."""
    with transaction.atomic():
        keys = Image.every.filter(pool=lister).values("path_key")
        Image.every.filter(pool=pool, path_key__in=keys).delete()
        rest = Image.every.filter(pool=pool)
        if lister.path_bytes:
            rest.delete()  # an agent has walked the folder: it is not there
        else:
            rest.update(pool=lister, host=lister.host_id)
        values = {"shared_key": lister.shared_key, "fs_key": lister.fs_key, "state_detail": ELSEWHERE}
        StoragePool.objects.filter(pk=pool.pk).update(**values)


def walked_from_now_on(host: Host, name: str, path: str) -> bool:
    """A storage that only the API told of becomes a folder that an agent walks: its images keep their rows.

    Returns:
        Whether there was one that no agent walked yet.
    """
    told = StoragePool.objects.filter(host=host, name=name, path=path, path_bytes=b"")
    row = told.filter(source=StoragePool.Source.PROXMOX).first()
    if row is None:
        return False
    key = path_key(raw(path))
    with transaction.atomic():
        walked = StoragePool.objects.filter(host=host, path_key=key).first()
        if walked is None:
            # What is told of its space stays until the agent has looked.
            told.filter(pk=row.pk).update(path_bytes=raw(path), path_key=key, shared_key="", fs_key="", state="new")
        else:
            Image.every.filter(pool=row).update(pool=walked)
            row.samples.update(pool=walked)
            row.delete()
    return True


def take_over(pool: StoragePool, scan: int) -> None:
    """The rows that other nodes' pools have are this one's from now on.

    Args:
        scan: id of the job, whose end works out their links anew.
    """
    others = [other for other in siblings(pool) if not other.path_bytes]
    if not others or not Image.every.filter(pool__in=others).exists():
        return
    with transaction.atomic():
        theirs = Image.every.filter(pool__in=others)
        theirs.filter(path_key__in=Image.every.filter(pool=pool).values("path_key")).delete()
        first: dict[str, int] = {}
        for pk, key in theirs.order_by("pk").values_list("pk", "path_key"):
            first.setdefault(key, pk)
        theirs.exclude(pk__in=list(first.values())).delete()
        theirs.update(pool=pool, host=pool.host_id, changed_scan=scan)


def settle(host: Host) -> None:
    """Two nodes that were scanned at the same time may both have listed a storage: the first keeps it."""
    for pool in StoragePool.objects.filter(host=host, network=True, source=StoragePool.Source.PROXMOX):
        others = siblings(pool)
        if pool.path_bytes:
            if pool.last_scanned is not None and pool.state == "ok":
                for one in others:
                    if not one.path_bytes:
                        leave_to(one, pool)  # its space is the same once more, too
            continue
        holding = [one for one in others if one.last_scanned is not None and _has_rows(one)]
        # Those of the scan that is about to end are not listed yet.
        if holding and Image.every.filter(pool=pool).exists():
            walked = [one for one in holding if one.path_bytes]
            keeper = walked[0] if walked else min([pool, *holding], key=lambda one: one.pk)
            for one in [pool, *holding]:
                if one.pk != keeper.pk and not one.path_bytes:
                    leave_to(one, keeper)


def _has_rows(pool: StoragePool) -> bool:
    return Image.objects.filter(pool=pool).exists()


@dataclass(frozen=True)
class Shared:
    """One of our pools and one of another host which show the same folder, or one of them a folder of the other's.

    Args:
        before, after: what a path in the other pool begins with, and what the same file's path begins with here.
        is_proven: else they may be one storage (:mod:`images.scan.same_storages`), which is as good as one for whatever
            protects an image.
    """

    pool: StoragePool
    other: StoragePool
    before: bytes
    after: bytes
    is_proven: bool = True

    def here(self, path: bytes) -> bytes | None:
        """The path here of a file there; ``None`` where it is not in what both show."""
        return self.after + path[len(self.before) :] if path.startswith(self.before) else None


def shared(host: Host) -> list[Shared]:
    """What a host shares with others that are registered, or has mounted twice itself; what is proven comes first."""
    ours = list(StoragePool.objects.filter(host=host, network=True).exclude(shared_key="").exclude(path_bytes=b""))
    if not ours:
        return []
    others = StoragePool.objects.filter(network=True).exclude(shared_key="").exclude(path_bytes=b"")
    found = [_pair(pool, other) for other in others.select_related("host") for pool in ours]
    return sorted((pair for pair in found if pair is not None), key=lambda pair: not pair.is_proven)


def _pair(pool: StoragePool, other: StoragePool) -> Shared | None:
    if pool.host_id == other.host_id and not is_another_mount(pool, other):
        return None
    mine, theirs = pool.shared_key.rstrip("/"), other.shared_key.rstrip("/")
    here, there = bytes(pool.path_bytes).rstrip(b"/"), bytes(other.path_bytes).rstrip(b"/")
    if mine == theirs:
        return Shared(pool, other, there + b"/", here + b"/")
    if theirs.startswith(mine + "/"):
        return Shared(pool, other, there + b"/", here + theirs[len(mine) :].encode() + b"/")
    if mine.startswith(theirs + "/"):
        return Shared(pool, other, there + mine[len(theirs) :].encode() + b"/", here + b"/")
    for one, another, our, their in ((pool, other, "ours", "theirs"), (other, pool, "theirs", "ours")):
        for told in one.may_be:
            if told["pool"] == another.pk:
                return Shared(pool, other, _inside(there, told[their]), _inside(here, told[our]), is_proven=False)
    return None


def _inside(path: bytes, folder: str) -> bytes:
    return path + b"/" + (raw(folder) + b"/" if folder else b"")


def is_another_mount(pool: StoragePool, other: StoragePool) -> bool:
    """Whether two pools of one host have numbers of their own for the same files, as each way of mounting gives."""
    return bool(pool.mount and other.mount) and pool.mount["dev"] != other.mount["dev"]


def doubtful(pools: Iterable[StoragePool]) -> set[int]:
    """Ids of the pools that may be the same storage as one that comes before them: who counts both may count twice."""
    before: set[int] = set()
    may_be: set[int] = set()
    found: set[int] = set()
    for pool in pools:
        named = {told["pool"] for told in pool.may_be}
        if pool.pk in may_be or named & before:
            found.add(pool.pk)
        else:
            before.add(pool.pk)
            may_be |= named
    return found


def elsewhere(image: Image) -> Iterator[tuple[Shared, bytes]]:
    """Each other pool that shows an image, and the path that it has there."""
    if image.pool.network:
        path = bytes(image.path_bytes)
        for pair in shared(image.host):
            if pair.pool.pk == image.pool_id and path.startswith(pair.after):
                yield pair, pair.before + path[len(pair.after) :]


def rows_elsewhere(image: Image) -> list[int]:
    """Ids of the rows that its file has in other pools."""
    there = Q()
    for pair, path in elsewhere(image):
        there |= Q(pool=pair.other, path_key=path_key(path))
    return list(Image.every.filter(there, inode=image.inode).values_list("pk", flat=True)) if there else []


def unknown(host: Host) -> dict[int, str]:
    """Pools of the host whose users are not known because another host shares them, and why.

    The other host is not named: it may not exist for whoever reads that.
    """
    found: dict[int, str] = {}
    for pair in shared(host):
        other = pair.other.host
        if other.pk == host.pk:
            continue
        away = other.status == Host.Status.UNREACHABLE
        if other.owners_unknown or away:
            why = "it does not answer." if away else "see its entry on the Hosts page."
            found.setdefault(
                pair.pool.pk, f"Another host shares {pair.pool.name}, and it is not known who uses it there: {why}"
            )
    return found


def disks(host: Host) -> Iterator[tuple[GuestDisk, bytes]]:
    """Disks of other hosts' guests in storages that this one shares, with the paths that they have here."""
    pairs = shared(host)
    rows = GuestDisk.objects.filter(guest__host__in={pair.other.host_id for pair in pairs})
    for disk in rows.select_related("guest"):
        path = next(_here(pairs, disk.guest.host_id, bytes(disk.path_bytes)), None)
        if path is not None:
            yield disk, path


def _here(pairs: Iterable[Shared], host_id: int, path: bytes) -> Iterator[bytes]:
    """The paths here of a file of another host, one for each pool of ours that shows it."""
    places = (pair.here(path) for pair in pairs if pair.other.host_id == host_id)
    return (place for place in places if place is not None)


def needed_paths(host: Host) -> dict[str, str]:
    """Shown paths here of images that other hosts' images, in storages of their own, stand on."""
    pairs = shared(host)
    rows = Image.every.filter(host__in={pair.other.host_id for pair in pairs}, missing_since=None).exclude(
        backing_key=""
    )
    outside = rows.filter(~Q(backing__pool=F("pool")) | Q(backing=None))
    found: dict[str, str] = {}
    for row in outside.only("host_id", "backing_path_bytes"):
        for path in _here(pairs, row.host_id, bytes(row.backing_path_bytes)):
            found[display(path)] = "An image of another host uses it as its backing file."
    return found | _needed_parts(pairs)


def _needed_parts(pairs: list[Shared]) -> dict[str, str]:
    """Shown paths here of files in which images of other hosts keep their data."""
    found: dict[str, str] = {}
    rows = in_several_files(Image.every.filter(host__in={pair.other.host_id for pair in pairs}))
    for there, name, shown, header in rows.values_list("host_id", "name", "path", "header"):
        for part in named_parts(name, shown, header):
            for path in _here(pairs, there, raw(part)):
                found[display(path)] = "An image of another host keeps its data in it."
    return found


def in_several_files(images: QuerySet[Image]) -> QuerySet[Image]:
    """Those of them that are there and have their data in other files."""
    images = images.filter(missing_since=None).annotate(text=Cast("header", TextField()))
    return images.filter(Q(text__contains='"data_file"') | Q(text__contains='"extents"')).order_by()


def named_parts(name: str, path: str, header: dict[str, Any]) -> list[str]:
    """The shown paths of the other files that an image's header names.

    Args:
        name: the image's own; a descriptor that names itself names no other file.
        path: the image's, as shown.
    """
    named = [header.get("data_file"), *header.get("extents", [])]
    return [_beside(path, part) for part in named if isinstance(part, str) and part and part != name]


def _beside(path: str, name: str) -> str:
    """The path of what a header names, as shown; a name in a folder of its own is made plain."""
    if name.startswith("/"):
        return posixpath.normpath(name)
    parts = path.split("/")[:-1]
    for part in name.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in {"", "."}:
            parts.append(part)
    return "/".join(parts)
