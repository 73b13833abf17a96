"""Hosts that share a storage: what one of them has in it may be needed by guests and images of another one.

A pool's ``shared_key`` is where it lies, the same on every host; what is below that is the same below each pool.
"""

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.db.models import F, Q, QuerySet, TextField
from django.db.models.functions import Cast

from images.models import Image
from storage_admin.guests.models import GuestDisk
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import display


@dataclass(frozen=True)
class Shared:
    """One of our pools and one of another host which show the same folder, or one of them a folder of the other's.

    Args:
        before, after: what a path in the other pool begins with, and what the same file's path begins with here.
    """

    pool: StoragePool
    other: StoragePool
    before: bytes
    after: bytes

    def here(self, path: bytes) -> bytes | None:
        """The path here of a file there; ``None`` where it is not in what both show."""
        return self.after + path[len(self.before) :] if path.startswith(self.before) else None


def shared(host: Host) -> list[Shared]:
    """What a host shares with others that are registered."""
    ours = list(StoragePool.objects.filter(host=host, network=True).exclude(shared_key="").exclude(path_bytes=b""))
    if not ours:
        return []
    others = StoragePool.objects.filter(network=True).exclude(shared_key="").exclude(path_bytes=b"").exclude(host=host)
    found = [_pair(pool, other) for other in others.select_related("host") for pool in ours]
    return [pair for pair in found if pair is not None]


def _pair(pool: StoragePool, other: StoragePool) -> Shared | None:
    mine, theirs = pool.shared_key.rstrip("/"), other.shared_key.rstrip("/")
    here, there = bytes(pool.path_bytes).rstrip(b"/"), bytes(other.path_bytes).rstrip(b"/")
    if mine == theirs:
        return Shared(pool, other, there + b"/", here + b"/")
    if theirs.startswith(mine + "/"):
        return Shared(pool, other, there + b"/", here + theirs[len(mine) :].encode() + b"/")
    if mine.startswith(theirs + "/"):
        return Shared(pool, other, there + mine[len(theirs) :].encode() + b"/", here + b"/")
    return None


def unknown(host: Host) -> dict[int, str]:
    """Pools of the host whose users are not known because another host shares them, and why.

    The other host is not named: it may not exist for whoever reads that.
    """
    found: dict[int, str] = {}
    for pair in shared(host):
        other = pair.other.host
        away = other.status == Host.Status.UNREACHABLE
        if other.owners_unknown or away:
            why = "it does not answer." if away else "see the Hosts page."
            found.setdefault(
                pair.pool.pk, f"Another host shares {pair.pool.name}, and who uses it there is not known: {why}"
            )
    return found


def disks(host: Host) -> Iterator[tuple[GuestDisk, bytes]]:
    """Disks of other hosts' guests in storages that this one shares, with the paths that they have here."""
    pairs = shared(host)
    for disk in GuestDisk.objects.filter(guest__host__in={pair.other.host_id for pair in pairs}).select_related(
        "guest"
    ):
        for pair in pairs:
            path = pair.here(bytes(disk.path_bytes)) if pair.other.host_id == disk.guest.host_id else None
            if path is not None:
                yield disk, path
                break


def needed_paths(host: Host) -> dict[str, str]:
    """Shown paths here of images that other hosts' images, in storages of their own, stand on."""
    pairs = shared(host)
    rows = Image.every.filter(host__in={pair.other.host_id for pair in pairs}, missing_since=None).exclude(
        backing_key=""
    )
    outside = rows.filter(~Q(backing__pool=F("pool")) | Q(backing=None))
    found: dict[str, str] = {}
    for row in outside.only("host_id", "backing_path_bytes"):
        for pair in pairs:
            path = pair.here(bytes(row.backing_path_bytes)) if pair.other.host_id == row.host_id else None
            if path is not None:
                found[display(path)] = "An image of another host uses it as its backing file."
    return found | _needed_parts(pairs)


def _needed_parts(pairs: list[Shared]) -> dict[str, str]:
    """Shown paths here of files in which images of other hosts keep their data."""
    found: dict[str, str] = {}
    rows = in_several_files(Image.every.filter(host__in={pair.other.host_id for pair in pairs}))
    for there, name, shown, header in rows.values_list("host_id", "name", "path", "header"):
        for part in named_parts(name, shown, header):
            for pair in pairs:
                path = pair.here(part.encode("utf-8", "surrogateescape")) if pair.other.host_id == there else None
                if path is not None:
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
