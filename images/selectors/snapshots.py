"""Snapshots of guests, whoever keeps them: their manager, or an image itself; each with its age and what it holds."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db.models import Q, QuerySet

from images.models import Image, ImageUse
from storage_admin.guests.models import Guest
from storage_admin.hosts.live_facts import since_1970
from storage_admin.hosts.names import path_key

INTERNAL, EXTERNAL, STORAGE = "internal", "external", "storage"
KINDS = (INTERNAL, EXTERNAL, STORAGE)
#: Whoever lists it.
LISTED_BY = ("libvirt", "proxmox", "image")


@dataclass(frozen=True)
class Kept:
    """A snapshot of a guest.

    Args:
        created: ``None`` where nobody tells.
        kind: ``internal`` to its qcow2 images, ``external`` with files of its own, or kept by the ``storage``.
        by: who lists it: ``libvirt``, ``proxmox``, or ``image``: its header alone.
        held_bytes: what it holds alone, as its images were last analyzed; ``None`` while unknown. Of one with files of
            its own, what is newer hides so much of it; of one in a thin pool, the exclusive size of its volumes.
        held_at: when the first of these images was analyzed, or measured.
        files_bytes: what its own files occupy; ``None`` where it has none, or they are unknown.
    """

    guest: Guest
    name: str
    created: datetime | None
    kind: str
    by: str
    held_bytes: int | None = None
    held_at: datetime | None = None
    files_bytes: int | None = None


@dataclass(frozen=True)
class _Part:
    """What one image tells of a snapshot: one in its header, or one that it stands on."""

    created: datetime | None
    held_bytes: int | None
    at: datetime | None


def snapshots_of(guests: QuerySet[Guest]) -> list[Kept]:
    """The snapshots of guests, the oldest first and undated ones last.

    Args:
        guests: as of :func:`guests_for`.
    """
    inside = ImageUse.objects.filter(disk__device="disk").exclude(image__snapshots=[]).values("disk__guest")
    found = list(guests.filter(~Q(snapshots=[]) | Q(pk__in=inside)))
    images = _images(found)
    last = datetime.max.replace(tzinfo=UTC)
    kept = [one for row in found for one in _kept(row, images)]
    return sorted(kept, key=lambda one: (one.created or last, one.guest.name, one.name))


@dataclass(frozen=True)
class _Images:
    by_id: dict[int, Image]
    by_place: dict[tuple[int, str], Image]
    above: dict[int, list[Image]]


def _images(guests: list[Guest]) -> _Images:
    """What the guests' disks are, the files of their snapshots, and what stands on those: three queries."""
    needed = (
        "host", "path_key", "path", "snapshots", "estimate", "analyzed_at", "allocated_size", "backing", "alone_bytes",
        "alone_at",
    )  # fmt: skip
    rows = Image.objects.only(*needed)
    by_id = {row.pk: row for row in rows.filter(uses__disk__guest__in=[guest.pk for guest in guests])}
    places = {
        (guest.host_id, _key(path))
        for guest in guests
        for one in guest.snapshots
        for path in (*_files(one), *_volumes(guest, by_id, one["name"]))
    }
    by_place = {(row.host_id, row.path_key): row for row in rows.filter(path_key__in=[key for _, key in places])}
    above = defaultdict[int, list[Image]](list)
    states = {*by_id, *(row.backing_id for row in by_place.values())}
    for row in rows.filter(backing__in=states - {None}):
        above[row.backing_id or 0].append(row)
    return _Images(by_id, by_place, above)


def _files(snapshot: dict[str, Any]) -> list[str]:
    files: list[str] = snapshot.get("files") or []
    return files


def _volumes(guest: Guest, by_id: dict[int, Image], name: str) -> list[str]:
    """Where Proxmox VE has what it keeps of a snapshot in thin pools: a volume for each disk, and one of its memory."""
    if guest.kind == Guest.Kind.DOMAIN:
        return []
    uses = [getattr(disk, "use", None) for disk in guest.disks.all() if not disk.only_in]
    disks = [by_id[use.image_id] for use in uses if use is not None and use.image_id in by_id]
    thin = [image.path.rpartition("/")[::2] for image in disks if image.alone_at is not None]
    kept = [f"{folder}/snap_{volume}_{name}" for folder, volume in thin]
    return [*kept, *dict.fromkeys(f"{folder}/vm-{guest.uid}-state-{name}" for folder, _ in thin)]


def _key(path: str) -> str:
    return path_key(path.encode(errors="surrogateescape"))


def _kept(guest: Guest, images: _Images) -> Iterator[Kept]:
    by = "libvirt" if guest.kind == Guest.Kind.DOMAIN else "proxmox"
    own, apart = defaultdict[str, list[_Part]](list), defaultdict[str, list[Image]](list)
    for disk in guest.disks.all():
        use = getattr(disk, "use", None)
        image = images.by_id.get(use.image_id) if use is not None else None
        if image is None:
            continue
        if disk.only_in and by == "proxmox":
            apart[disk.only_in].append(image)
        elif not disk.only_in and disk.device == "disk":
            for name, found in _inside(image):
                own[name].append(found)
    for one in guest.snapshots:
        name, created = one["name"], one["created"]
        files = [images.by_place.get((guest.host_id, _key(path))) for path in _files(one)]
        files += [image for image in apart.get(name, []) if image not in files]
        inside = own.pop(name, [])
        internal = inside or by == "libvirt" or any(disk.volume.endswith(".qcow2") for disk in guest.disks.all())
        kind = EXTERNAL if one["external"] or files else INTERNAL if internal else STORAGE
        states = [None if image is None else image.backing_id if by == "libvirt" else image.pk for image in files]
        tops = [None if state is None else _only(images.above[state]) for state in states]
        volumes = [images.by_place.get((guest.host_id, _key(path))) for path in _volumes(guest, images.by_id, name)]
        thin = [_Part(None, volume.alone_bytes, volume.alone_at) for volume in volumes if volume is not None]
        yield Kept(
            guest, name, since_1970(created), kind, by,
            *_held([*inside, *thin, *(_below(top, since_1970(created)) for top in tops)]),
            _sum([None if image is None else image.allocated_size for image in files]),
        )  # fmt: skip
    for name, inside in own.items():
        created = min((part.created for part in inside if part.created is not None), default=None)
        yield Kept(guest, name, created, INTERNAL, "image", *_held(inside))


def _only(images: list[Image]) -> Image | None:
    return images[0] if len(images) == 1 else None


def _below(top: Image | None, created: datetime | None) -> _Part:
    """What the image right below another one holds that is hidden by that, if that was measured since."""
    if top is None or top.analyzed_at is None or (created is not None and top.analyzed_at < created):
        return _Part(None, None, None)
    basis = (top.estimate or {}).get("basis") or {}
    return _Part(None, basis.get("hidden_bytes"), top.analyzed_at)


def _held(inside: list[_Part]) -> tuple[int | None, datetime | None]:
    held = _sum([part.held_bytes for part in inside])
    return held, None if held is None else min((part.at for part in inside if part.at is not None), default=None)


def _sum(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _inside(image: Image) -> Iterator[tuple[str, _Part]]:
    """The snapshots in an image's header, by their names, with what they hold if that was looked at since."""
    for snapshot, held in zip(image.snapshots, held_by_each(image), strict=True):
        yield (
            snapshot.get("name") or snapshot.get("id") or "",
            _Part(since_1970(snapshot.get("created")), held, image.analyzed_at),
        )


def held_by_each(image: Image) -> list[int | None]:
    """What each snapshot in an image's header alone holds, in bytes, as it was last analyzed.

    Returns:
        ``None`` for what is unknown; and for all where the estimate was not read, as for lists.
    """
    if "estimate" in image.get_deferred_fields():
        return [None] * len(image.snapshots)
    basis = (image.estimate or {}).get("basis") or {}
    looked = basis.get("snapshots") or []
    if [one["created"] for one in looked] != [one.get("created") for one in image.snapshots]:
        return [None] * len(image.snapshots)
    return [one["held_bytes"] for one in looked]
