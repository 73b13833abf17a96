"""The tree that an image is part of, and what would become free."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from django.db.models import Prefetch, Q

from images.models import Image, ImageUse
from storage_admin.accounts.models import SYSTEM, Actor
from storage_admin.batches import batched
from storage_admin.hosts.selectors import hosts_for

#: Ids in one query: databases bound the number of parameters.
BATCH = 500
#: What occupies nothing, and needs nothing any more.
_GONE = (Image.State.MISSING, Image.State.DELETED)


@dataclass(frozen=True)
class GuestRef:
    """A guest that uses an image as one of its disks (``target``, such as ``vda``)."""

    id: int
    name: str
    state: str
    target: str


@dataclass(frozen=True)
class Node:
    """One image of a tree. Sizes are in bytes, ``None`` where it is not known.

    Args:
        freed_if_deleted: what deleting this file alone would free: its allocated size, less what other files share as
            far as that was measured, where nothing needs it; 0 where something does or where another hard link remains;
            ``None`` where it is not known who needs it.
        needed_by: ids of the overlays that stand right on it, then names of the guests whose disk it is.
    """

    id: int
    name: str
    path: str
    format: str
    virtual_size: int | None
    allocated_size: int | None
    chain_depth: int
    state: str
    in_use: bool | None
    guests: tuple[GuestRef, ...]
    needed_by: tuple[int | str, ...]
    freed_if_deleted: int | None


@dataclass(frozen=True)
class Edge:
    """``overlay`` has ``base`` as its backing file; both are ids of images."""

    overlay: int
    base: int


@dataclass(frozen=True)
class Chain:
    """A whole tree, bases first.

    Args:
        allocated_size: bytes that its files occupy together, each inode once; ``None`` where one is not known.
        virtual_size: the virtual sizes of all its images together, each inode once, as a pool's sum counts them;
            ``None`` where one of them is not known.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    allocated_size: int | None
    virtual_size: int | None


def chain_of(image: Image, actor: Actor = SYSTEM) -> Chain:
    """The tree around an image: every image of its root, and whatever stands below or above one of them.

    All of it is on one host. Guests of another one, which use an image on a storage that hosts share, keep it from
    being free, and are named to those for whom they exist.
    """
    seen = None if actor.hosts is None else set(hosts_for(actor).values_list("pk", flat=True))
    members = sorted(_members(image), key=lambda member: (member.chain_depth, member.name, member.pk))
    overlays: dict[int, list[int]] = {}
    for member in members:
        if member.backing_id is not None and member.state not in _GONE:
            overlays.setdefault(member.backing_id, []).append(member.pk)
    nodes = tuple(_node(member, overlays.get(member.pk, []), seen) for member in members)
    present = [member for member in members if member.state not in _GONE]
    sizes = {(member.host_id, member.dev, member.inode): member.allocated_size for member in present}
    virtual = {(member.host_id, member.dev, member.inode): member.virtual_size for member in present}
    return Chain(
        nodes=nodes,
        edges=tuple(
            Edge(overlay=member.pk, base=member.backing_id) for member in members if member.backing_id is not None
        ),
        allocated_size=whole(sizes.values()),
        virtual_size=whole(virtual.values()),
    )


def whole(sizes: Collection[int | None]) -> int | None:
    """The sum of sizes; ``None`` where one of them is not known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _members(image: Image) -> Iterable[Image]:
    found: dict[int, Image] = {}
    fresh = list(_rows(Q(pk=image.pk) if image.root_id is None else Q(pk=image.pk) | Q(root_id=image.root_id)))
    while fresh:
        found |= {member.pk: member for member in fresh}
        below = {member.backing_id for member in fresh if member.backing_id is not None} - found.keys()
        fresh = [member for member in _neighbours(below, {member.pk for member in fresh}) if member.pk not in found]
    return found.values()


def _neighbours(bases: set[int], stood_on: set[int]) -> Iterator[Image]:
    for ids in batched(sorted(bases), BATCH):
        yield from _rows(Q(pk__in=ids))
    for ids in batched(sorted(stood_on), BATCH):
        yield from _rows(Q(backing_id__in=ids))


def _rows(which: Q) -> Iterable[Image]:
    uses = ImageUse.objects.select_related("disk__guest").order_by("disk__guest__name", "id")
    rows = (
        Image.objects.filter(which)
        .select_related("pool", "host")
        .prefetch_related(Prefetch("uses", uses, to_attr="read_uses"))
    )
    return rows.defer("path_bytes", "backing_path_bytes", "header", "snapshots", "host__capabilities")


def _node(image: Image, overlays: list[int], hosts: set[int] | None) -> Node:
    uses = image.disks
    disks = [disk for disk in uses if hosts is None or disk.guest.host_id in hosts]
    guests = tuple(GuestRef(disk.guest_id, disk.guest.name, disk.guest.state, disk.target) for disk in disks)
    return Node(
        id=image.pk,
        name=image.name,
        path=image.path,
        format=image.format,
        virtual_size=image.virtual_size,
        allocated_size=image.allocated_size,
        chain_depth=image.chain_depth,
        state=image.state,
        in_use=image.in_use,
        guests=guests,
        needed_by=(*overlays, *dict.fromkeys(guest.name for guest in guests)),
        freed_if_deleted=_freed(image, needed=bool(overlays or uses)),
    )


def _freed(image: Image, *, needed: bool) -> int | None:
    if needed or image.in_use or image.nlink > 1 or image.state in _GONE:
        return 0
    if image.in_use is None or image.host.owners_unknown or image.pool.owners_unknown:
        return None
    if image.pool.network and not image.pool.all_hosts_registered:
        return None  # a host that is not registered may have overlays or guests of it
    return image.own_bytes
