"""An image as jobs want it: its row, its locks, its facts as the agent gets them, and its neighbours.

Those are what a plan asks about beyond its row: what it stands on, what stands on it, who uses them, and which jobs
need space beside it. That is fetched for many images at once, in a number of queries that depends neither on their
count nor on the depth of their chains, and kept on the image's row object: the plans of one page share it. A job's own
work begins with a fresh row, and so with fresh surroundings.

Snapshots of Proxmox VE that are files of their own: whose they are, and what is not done with them. Proxmox VE finds a
snapshot by walking its disk's chain (:mod:`storage_admin.agent.rewrite.volume_chains`). So the chain stays as it is:
nothing is flattened or converted out of it, and of the files below the disk none is replaced.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from django.db.models import Prefetch, QuerySet
from django.db.models.expressions import RawSQL
from django.utils.translation import gettext as _

from images.models import Image, ImageUse
from images.orphans import host_facts
from images.orphans.evidence import Needs
from images.rewrite.space import Admitted
from images.scan import shared_storages
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.rewrite import volume_chains
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import display, path_key
from storage_admin.jobs.kinds import Lock
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Refusal

_TABLE = Image._meta.db_table
# UNION, not UNION ALL: a row that was found already is not followed again, so that a cycle ends.
_BELOW = f"""
    WITH RECURSIVE below(id, backing_id) AS (
        SELECT id, backing_id FROM {_TABLE} WHERE id IN ({{ids}})
        UNION SELECT base.id, base.backing_id FROM {_TABLE} base JOIN below ON base.id = below.backing_id)
    SELECT id FROM below
"""  # noqa: S608 (our own table's name)
_ABOVE = f"""
    WITH RECURSIVE above(id) AS (
        SELECT id FROM {_TABLE} WHERE id IN ({{ids}})
        UNION SELECT overlay.id FROM {_TABLE} overlay JOIN above ON overlay.backing_id = above.id)
    SELECT id FROM above
"""  # noqa: S608 (our own table's name)
#: What is asked of an overlay: who it is, and which file.
_ENOUGH = ("name", "backing_id", "host_id", "pool_id", "path_bytes", "dev", "inode")
#: Where an image's row object keeps its surroundings.
_KEPT = "_surroundings"


#: Jobs of a host that say how fast the next ones will be.
LAST_JOBS = 200


class Done(NamedTuple):
    """A job that is done: where, the bytes that there were and that came of it, and its seconds."""

    pool: int | None
    worked: int
    seconds: float


class _Fetched:
    """What surrounds some images, each part fetched for all of them when it is first asked for."""

    def __init__(self, images: Sequence[Image], admitted: Admitted) -> None:
        self.admitted = admitted
        self._needs: dict[int, Needs] = {}
        self._done: dict[int, dict[str, list[Done]]] = {}
        self._ids = sorted({image.pk for image in images})
        self._bases = sorted({image.backing_id for image in images if image.backing_id is not None})

    def done(self, kind: str, host: int) -> list[Done]:
        """The last jobs of a kind on a host that did what they were to do, read once for all kinds and its images."""
        if host not in self._done:
            rows = Job.objects.filter(host=host, state=Job.State.SUCCEEDED, freed_bytes__isnull=False)
            columns = ("kind", "space_pool_id", "before_bytes", "after_bytes", "result__seconds")
            found = self._done[host] = defaultdict(list)
            for one, pool, before, after, took in rows.order_by("-id").values_list(*columns)[:LAST_JOBS]:
                if took:
                    found[one].append(Done(pool, (before or 0) + (after or 0), float(took)))
        return self._done[host][kind]

    def needs(self, host: Host) -> Needs:
        """Who needs which image of a host, read once for all images of it."""
        if host.pk not in self._needs:
            self._needs[host.pk] = host_facts.needs(host)
        return self._needs[host.pk]

    @cached_property
    def bases(self) -> dict[int, Image]:
        """All that the images stand on, by id, with hosts, pools and guests."""
        if not self._bases:
            return {}
        rows = Image.objects.filter(pk__in=_walk(_BELOW, self._bases)).select_related("host", "pool")
        return {row.pk: row for row in rows.prefetch_related(Prefetch("uses", _uses(), to_attr="read_uses"))}

    @cached_property
    def overlays(self) -> dict[int | None, list[Image]]:
        """All that stands on the images, by the id of what it stands on right away, without the large columns."""
        rows = Image.objects.filter(pk__in=_walk(_ABOVE, self._ids)).only(*_ENOUGH).order_by("name", "pk")
        found: dict[int | None, list[Image]] = defaultdict(list)
        for row in rows:
            found[row.backing_id].append(row)
        return found

    @cached_property
    def disks(self) -> dict[int, list[GuestDisk]]:
        """The guests' disks that are the images or stand on them, by the id of what they are."""
        found: dict[int, list[GuestDisk]] = defaultdict(list)
        for use in _uses().filter(image__in=_walk(_ABOVE, self._ids)):
            found[use.image_id].append(use.disk)
        return found

    @cached_property
    def with_undo_copy(self) -> set[int]:
        """Ids of the images of which an undo copy of an earlier job waits."""
        jobs = Job.objects.filter(target_kind="image", target_id__in=self._ids, undo_state=Job.UndoState.AVAILABLE)
        return set(jobs.values_list("target_id", flat=True))


class Surroundings:
    """What surrounds one image.

    Args:
        image: the row.
        fetched: what was, or will be, fetched for it and others.
    """

    def __init__(self, image: Image, fetched: _Fetched) -> None:
        self._image, self._fetched = image, fetched

    @property
    def admitted(self) -> Admitted:
        """What jobs need on its filesystem, and on others."""
        return self._fetched.admitted

    def done(self, kind: str) -> list[Done]:
        """The last jobs of a kind on its host."""
        return self._fetched.done(kind, self._image.host_id)

    @property
    def has_undo_copy(self) -> bool:
        """Whether an undo copy of an earlier job waits."""
        return self._image.pk in self._fetched.with_undo_copy

    @cached_property
    def below(self) -> list[Image]:
        """The images that it stands on, its immediate base first.

        Raises:
            RefusedError: ``chain_cycle``; ``chain_broken``, where one of them is not listed any more.
        """
        found: list[Image] = []
        seen, step = {self._image.pk}, self._image.backing_id
        while step is not None:
            if step in seen:
                raise RefusedError(
                    "chain_cycle",
                    _("The backing chain of {image} loops back on itself.").format(image=self._image.name),
                )
            seen.add(step)
            base = self._fetched.bases.get(step)
            if base is None:
                raise RefusedError(
                    "chain_broken",
                    _("The backing file of {image} no longer exists. Scan the host.").format(image=self._image.name),
                )
            found.append(base)
            step = base.backing_id
        return found

    @cached_property
    def above(self) -> list[Image]:
        """Every image that needs it, however far above, the nearest first; without the large columns."""
        found: list[Image] = []
        seen, layer = {self._image.pk}, [self._image.pk]
        while layer:
            overlays = [row for base in layer for row in self._fetched.overlays.get(base, ()) if row.pk not in seen]
            overlays.sort(key=lambda row: (row.name, row.pk))
            found += overlays
            layer = [row.pk for row in overlays]
            seen.update(layer)
        return found

    @cached_property
    def disks(self) -> list[GuestDisk]:
        """The guests' disks that are the image, or one that stands on it."""
        return [disk for one in (self._image, *self.above) for disk in self._fetched.disks.get(one.pk, ())]

    @property
    def own_disks(self) -> list[GuestDisk]:
        """The guests' disks that are the image itself."""
        return list(self._fetched.disks.get(self._image.pk, ()))

    def of_base(self, base: Image) -> "Surroundings":
        """What surrounds an image below it, as far as that is fetched for both: not its overlays and disks."""
        return Surroundings(base, self._fetched)

    @property
    def needed_by(self) -> list[str]:
        """Who needs it beside the overlays and guests that are linked to it, in sentences."""
        image, needs = self._image, self._fetched.needs(self._image.host)
        described = needs.described.get(image.name)
        return [*needs.of(image.pk, image.path, f"{image.dev}:{image.inode}"), *([described] if described else [])]

    @property
    def needs_unknown(self) -> str:
        """Why it is not known what else stands on it, in a sentence; empty where it is."""
        needs = self._fetched.needs(self._image.host)
        return " ".join(filter(None, [needs.unseen, needs.blind.but(self._image.pk)]))

    @property
    def guests(self) -> list[Guest]:
        """The guests that need the image, by name."""
        found = {disk.guest_id: disk.guest for disk in self.disks}
        return sorted(found.values(), key=lambda guest: (guest.name, guest.pk))


def of(image: Image) -> Surroundings:
    """An image's surroundings: those that were fetched for it, else those of its own, kept on the row object."""
    if _KEPT not in vars(image):
        share([image])
    kept: Surroundings = vars(image)[_KEPT]
    return kept


def share(images: Sequence[Image], admitted: Admitted | None = None) -> None:
    """Has the surroundings of these images fetched together.

    Args:
        admitted: what jobs need, to go on with; without it, as the database knows it.
    """
    fetched = _Fetched(images, admitted or Admitted())
    for image in images:
        vars(image)[_KEPT] = Surroundings(image, fetched)


def fresh(image: Image) -> Surroundings:
    """An image's surroundings as the database knows them now."""
    return Surroundings(image, _Fetched([image], Admitted()))


def _walk(sql: str, ids: Iterable[int]) -> RawSQL:
    params = list(ids)
    return RawSQL(sql.format(ids=", ".join(["%s"] * len(params))), params)  # noqa: S611 (ids are parameters)


def _uses() -> QuerySet[ImageUse]:
    return ImageUse.objects.select_related("disk__guest").order_by("disk__guest__name", "id")


def find(image_id: int) -> Image:
    """The image with its host and pool.

    Raises:
        NotFoundError: there is none.
    """
    image = Image.objects.select_related("host", "pool").filter(pk=image_id).first()
    if image is None:
        raise NotFoundError(_("Image {image} does not exist.").format(image=image_id))
    return image


def base_of(host_id: int, options: dict[str, Any]) -> Image | None:
    """The image of a host that the option ``base`` names by id or path, with host and pool; ``None`` if it names none.

    Raises:
        InvalidError: there is none such.
    """
    named = options["base"]
    if named in {None, ""}:
        return None
    rows = Image.objects.select_related("host", "pool").filter(host=host_id)
    found = rows.filter(pk=named) if isinstance(named, int) else rows.filter(path_key=path_key(os.fsencode(named)))
    if (image := found.first()) is None:
        told = _("This host has no image {image}.").format(image=named)
        raise InvalidError(f"base: {told}", {"base": told})
    return image


def ancestors(image: Image) -> list[Image]:
    """The images below this one as the database knows them now, its immediate base first.

    Raises:
        RefusedError: ``chain_cycle``; ``chain_broken``, where one of them is not listed any more.
    """
    return fresh(image).below


def chain_of(image: Image | None) -> list[Image]:
    """An image, and what it stands on now, from above; raises as :func:`ancestors`."""
    return [] if image is None else [image, *ancestors(image)]


def descendants(image: Image) -> list[Image]:
    """Every image that needs this one now, however far above; without the large columns."""
    return fresh(image).above


def locks_on(image: Image, *, exclusive: bool) -> list[Lock]:
    """What is locked of an image: the file itself, by whatever path it is reached, and its row, whatever file that is
    by the time the job runs; also the rows that it has on other hosts.
    """
    rows = [image.pk, *shared_storages.rows_elsewhere(image)]
    keys = [f"inode:{image.host_id}:{image.dev}:{image.inode}", *(f"image:{row}" for row in rows)]
    return [Lock(key, exclusive=exclusive) for key in keys]


def locks_on_chain(image: Image, *, exclusive: bool) -> list[Lock]:
    """The same of an image, and of all that it stands on, which others may read as well."""
    return [lock for one in chain_of(image) for lock in locks_on(one, exclusive=exclusive and one is image)]


def facts(image: Image) -> dict[str, Any]:
    """The image as the plan saw it; the agent refuses when it finds another one."""
    return image.place | {
        "format": image.declared_format,
        "dev": int(image.dev),
        "inode": int(image.inode),
        "file_size": image.file_size,
        "mtime_ns": image.mtime_ns,
        "ctime_ns": image.ctime_ns,
    }


def silent_storage(image_id: int) -> str:
    """The pool of an image, or of one below it, if it does not answer: as in "waits for …"; else empty."""
    image = Image.every.select_related("pool").filter(pk=image_id).first()
    try:
        pools = [image.pool, *(base.pool for base in ancestors(image))] if image is not None else []
    except RefusedError:  # the job's own request says so
        return ""
    away = next((pool for pool in pools if pool.state == StoragePool.SILENT), None)
    return f"the storage pool {away.name} to answer"[:200] if away is not None else ""


@dataclass(frozen=True)
class SnapshotPart:
    """What an image is in such a chain.

    Args:
        snapshot: that it is, or, of the disk itself, that it stands on.
        number: of the VM.
        is_disk: it is the disk itself, which the VM writes to.
    """

    snapshot: str
    number: str
    is_disk: bool

    @property
    def sentence(self) -> str:
        """For a page."""
        what = _("snapshot {snapshot} of VM {number}").format(snapshot=self.snapshot, number=self.number)
        return _("Disk on the {what}").format(what=what) if self.is_disk else _("The {what}").format(what=what)


def snapshot_part(image: Image) -> SnapshotPart | None:
    """What an image is in a chain of snapshots, by its name and its base's; ``None`` for what is in none."""
    path = bytes(image.path_bytes)
    number = volume_chains.guest_number(path)
    readings = volume_chains.readings(path)
    if readings:
        sections = {disk.only_in for disk in of(image).own_disks}
        names = [display(snapshot) for snapshot, __ in readings]
        return SnapshotPart(next((name for name in names if name in sections), names[0]), number, is_disk=False)
    below = bytes(image.backing_path_bytes) if image.backing_file else b""
    snapshot = volume_chains.snapshot_below(path, below) if below else b""
    return SnapshotPart(display(snapshot), number, is_disk=True) if snapshot else None


def against_rewriting(image: Image) -> list[Refusal]:
    """What stands against putting another file in the image's place, be it one with the same content and base."""
    part = snapshot_part(image)
    return [] if part is None or part.is_disk else against_standing_alone(image)


def against_standing_alone(image: Image) -> list[Refusal]:
    """What stands against taking an image from what it stands on."""
    if (part := snapshot_part(image)) is None:
        return []
    return [Refusal(volume_chains.CODE, volume_chains.why_not(image.name, part.snapshot, part.number))]
