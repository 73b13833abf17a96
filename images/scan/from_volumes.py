"""What the agent read of LVM, ZFS and Ceph, as the events of a scan: volumes, with what each takes.

Nothing rewrites them.

Where libvirt or Proxmox VE has a pool for the same place (a group, a thin pool, a dataset, a pool of Ceph), that pool's
row gets what the backend says, instead of what they told. What nodes share is listed once: of Ceph by one of them, else
by the API.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from django.db import transaction

from images.models import Claim, Image
from images.orphans.host_facts import Claimed
from images.scan import shared_storages
from images.scan.events import Event, as_last_seen, image_event, is_new, pool_event
from images.scan.rows import stand_in
from images.scan.volume_places import BACKENDS, Backend, Place, Volume
from images.selectors.pools import NEVER_PERCENT
from storage_admin.agent.protocol import b64
from storage_admin.hosts import services
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key, raw

#: Backends by the kinds of pools of which the agent may know better than who told of them.
KINDS = {str(kind): name for name, backend in BACKENDS.items() for kind in backend.kinds}

_AS_LAST_SEEN = "Its volumes are shown as of the last successful scan."
_OWNERS_UNKNOWN = (
    "The volumes of this pool are not files, and a guest may use a volume under another name. So a volume may be in "
    "use even if no guest names it."
)
_OTHER_HOSTS = (
    "The pool is on a network. Hosts that are not registered here may use its images. If there are none, an admin can "
    "confirm that on the page of the pool."
)
_LONGEST_WHY = 200


class Told:
    """What one backend of a host told, beside the host's pools of its kinds.

    Args:
        event: of the agent, ``volumes``.
        declared: the formats that guests declare, by the paths of their disks.
    """

    def __init__(self, host: Host, event: Event, declared: Mapping[str, str]) -> None:
        self.backend: Backend = BACKENDS[event["backend"]]
        self._host, self._event, self._declared = host, event, declared
        #: Of volumes that are needed though no guest names them.
        self.claims: list[Claimed] = []
        self._places = {} if event["why"] else self.backend.places(event, {self._name(row) for row in self._others()})

    def sync(self) -> dict[int, StoragePool]:
        """Makes pools of places that have volumes, where nobody else has; forgets those of ours that others have now.

        Returns:
            The host's pools of the backend by their ids.
        """
        others = {self._name(row) for row in self._others()}
        for place in self._places.values():
            if place.name not in others and not place.why and (place.volumes or place.is_pool):
                path = self.backend.path_of(place.name)
                values = {
                    "name": place.name[:200], "path": path, "path_bytes": path.encode(), "source": self.backend.source,
                    "kind": place.kind,
                }  # fmt: skip
                more = {"warn_percent": NEVER_PERCENT} if place.kind == StoragePool.Kind.LVM else {}
                StoragePool.objects.get_or_create(
                    host=self._host, path_key=path_key(f"{self.backend.name} {place.name}".encode()),
                    defaults=values | more,
                )  # fmt: skip
        for row in self._rows():
            if (
                row.source == self.backend.source
                and self._name(row) in others
                and not Image.every.filter(pool=row).exists()
            ):
                with transaction.atomic():
                    Host.objects.select_for_update().get(pk=self._host.pk)  # no job is submitted meanwhile
                    if not services.in_the_way_of_removal(row):
                        row.delete()
        return {row.pk: row for row in self._rows()}

    def opened(self) -> list[tuple[str, str, str]]:
        """Device, inode and why of each volume that is in use."""
        volumes = [one for place in self._places.values() for one in place.volumes if one.open]
        return [(*_inode(one), one.open[:_LONGEST_WHY]) for one in volumes]

    def events(self, held: Iterable[Event]) -> Iterator[Event]:
        """The ``image`` and ``pool`` events of all pools of the backend.

        Args:
            held: what libvirt and Proxmox VE told of these pools.
        """
        by_name: dict[str, list[StoragePool]] = defaultdict(list)
        for row in self._rows():
            by_name[self._name(row)].append(row)
        taken: set[int] = set()
        for name, rows in by_name.items():
            # Its own row comes last: it has been there before whoever else has the pool was asked.
            first, *rest = sorted(rows, key=lambda row: (row.source == self.backend.source, row.pk))
            place = self._places.get(name)
            why = self._event["why"] or (place.why if place is not None else "")
            theirs = first.source != self.backend.source
            if place is None or place.why:
                self._keep_claims(rows)
            if any(map(self._is_left_to_others, rows)) or (place is None and not why and theirs):
                continue
            if why:
                ours = [row for row in rows if row.volume_facts is not None]
                taken |= {row.pk for row in ours}
                yield from (as_last_seen(row, f"{why} {_AS_LAST_SEEN}") for row in ours)
                continue
            taken |= {row.pk for row in rows}
            if place is None:
                gone = f"{self.backend.title} on {self._host.name} no longer lists it. {_AS_LAST_SEEN}"
                yield as_last_seen(first, gone) | {"state": "missing"}
            else:
                yield from self._pool(first, place)
                for row in rest:  # each volume is listed once
                    detail = f"Its volumes are listed in {first.name}."
                    yield self._pool_event(row, replace(place, volumes=[], journals=0), _known(row)) | {
                        "detail": detail
                    }
        yield from (one for one in held if one.get("pool", one.get("id")) not in taken)

    def _keep_claims(self, rows: Iterable[StoragePool]) -> None:
        """Volumes as last seen are needed for what they were."""
        there = {f"{dev}:{number}" for dev, number in Image.every.filter(pool__in=rows).values_list("dev", "inode")}
        known = Claim.objects.filter(host=self._host, kind=Claim.Kind.FILE)
        self.claims += [Claimed(one.kind, one.key, one.why) for one in known if one.key in there]

    def _rows(self) -> list[StoragePool]:
        return list(StoragePool.objects.filter(host=self._host, kind__in=self.backend.kinds).order_by("pk"))

    def _others(self) -> list[StoragePool]:
        return [row for row in self._rows() if row.source != self.backend.source]

    def _is_left_to_others(self, row: StoragePool) -> bool:
        """Whether nodes share it, and another one lists its volumes, or nobody but the API is asked."""
        if not row.network:
            return False
        return not self.backend.is_shared or shared_storages.lister_of(row, is_whole=True).pk != row.pk

    def _name(self, row: StoragePool) -> str:
        return self.backend.name_of(row, self._event)

    def _pool(self, row: StoragePool, place: Place) -> Iterator[Event]:
        _forget_measures(row, place)
        known, is_known = _known(row), not _owners_unknown(row, place)
        for volume in (_as_guests_name_it(row, one) for one in place.volumes):
            image = self._image(row, volume)
            if volume.kept and is_known:
                self.claims.append(Claimed(Claim.Kind.FILE, ":".join(_inode(volume)), volume.kept))
            if is_new(image, known):
                yield image
        yield self._pool_event(row, place, known)

    def _pool_event(self, row: StoragePool, place: Place, vanished: Iterable[bytes]) -> Event:
        return pool_event(
            row, kind=str(place.kind), filesystem=self.backend.title, capacity_bytes=place.capacity,
            available_bytes=place.available, images=len(place.volumes), leftovers=place.journals, asides=place.asides,
            vanished_b64=b64(b"".join(sorted(vanished))), owners_unknown=_owners_unknown(row, place),
            fs_key=place.fs_key, shared_key=place.key, volume_facts=place.facts, network=row.network,
        )  # fmt: skip

    def _image(self, row: StoragePool, volume: Volume) -> Event:
        names = (volume.path, volume.alias)
        form = next((form for name in names if (form := self._declared.get(name))), volume.format)[:20]
        base = b64(raw(volume.base)) if volume.base else ""
        snapshots = {"snapshots": "y"} if volume.has_snapshots else {}
        dev, inode = _inode(volume)
        return image_event(
            row, volume.path, [row.pk, vars(volume) | {"open": ""}, form], dev=dev, inode=inode,
            allocated_size=volume.allocated, exclusive_bytes=volume.exclusive, snapshot_bytes=volume.snapshots,
            reservation_bytes=volume.reserved, virtual_size=volume.size, cluster_size=volume.block_size, format=form,
            state="unreadable" if volume.unreadable else "ok", detail=volume.unreadable,
            **({"volume": volume.ids | {"alias": volume.alias} | snapshots} if volume.ids else {}),
            **({"backing_b64": base, "backing_path_b64": base} if base else {}),
        )  # fmt: skip


def _forget_measures(row: StoragePool, place: Place) -> None:
    """What was measured of a volume is nothing of another one that was made under its name."""
    ids = {one.path: one.ids.get("id") for one in place.volumes}
    measured = Image.every.filter(pool=row, alone_at__isnull=False, aside_since=None)
    found = measured.values_list("pk", "path", "header__volume__id")
    gone = [pk for pk, path, number in found if ids.get(path, number) != number]
    Image.every.filter(pk__in=gone).update(alone_bytes=None, alone_at=None)


def _known(row: StoragePool) -> set[bytes]:
    there = Image.every.filter(pool=row, missing_since=None, aside_since=None)
    return set(map(bytes, there.values_list("fingerprint", flat=True)))


def _owners_unknown(row: StoragePool, place: Place) -> str:
    """Proxmox VE names its guests' volumes: of one with such a name, it tells whether a guest has it."""
    if row.source != StoragePool.Source.PROXMOX:
        return _OWNERS_UNKNOWN
    return _OTHER_HOSTS if place.kind == StoragePool.Kind.RBD and not row.all_hosts_registered else ""


def _as_guests_name_it(row: StoragePool, volume: Volume) -> Volume:
    """A container's filesystem is called by where its storage says that it is mounted, wherever it really is."""
    named = f"{row.path}/{volume.ids.get('name')}"
    is_elsewhere = row.source == StoragePool.Source.PROXMOX and volume.format == "subvol" and named != volume.path
    return replace(volume, alias=named) if is_elsewhere else volume


def _inode(volume: Volume) -> tuple[str, str]:
    """By its device a guest is found that names the volume otherwise; of one without, by the other name."""
    if volume.inode is None:
        return "", stand_in(raw(volume.alias or volume.path))
    return str(volume.dev), str(volume.inode)
