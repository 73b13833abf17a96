"""What a running guest's disk stands on: as its hypervisor has it now, and as the last scan saw it."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from django.utils.translation import gettext

from images.models import Image
from images.rewrite import neighbours, refusals
from images.rewrite.needed_as_it_is import looked_through, refuse_elsewhere
from images.scan import look, shared_storages
from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.guests.models import Guest
from storage_admin.hosts import asking
from storage_admin.hosts.libvirt import running
from storage_admin.hosts.live_facts import DiskNow, GuestNow
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.jobs.plan_and_progress import Refusal


@dataclass(frozen=True)
class Layers:
    """A disk's chain, from above.

    Args:
        chain: the paths.
        rows: the images that these are, by place; not of those that no scan has seen.
        format: of the topmost one, as declared.
        allocated: what that occupies now, in bytes; ``None`` where nobody tells.
        refusals: what stands against changing the chain.
    """

    guest_id: int
    disk: str
    chain: list[str]
    rows: dict[int, Image]
    format: str
    allocated: int | None
    refusals: tuple[Refusal, ...]

    @property
    def names(self) -> list[str]:
        """What is said of each."""
        return [path.rpartition("/")[2] or path for path in self.chain]

    @property
    def images(self) -> list[Image]:
        """Those that a scan has seen, from above."""
        return [self.rows[place] for place in sorted(self.rows)]

    def images_at(self, places: Iterable[int]) -> list[Image]:
        """Those of these places that a scan has seen."""
        return [self.rows[place] for place in places if place in self.rows]

    def found(self, places: Iterable[int]) -> Iterator[tuple[int, Image]]:
        """The same with their places."""
        return ((place, self.rows[place]) for place in places if place in self.rows)


def occupied(guest: Guest, now: GuestNow) -> dict[str, int | None]:
    """What the images of a guest's disks occupy now, by target: as libvirt tells, else as its host's agent does."""
    found = {disk.target: disk.allocated_bytes for disk in now.disks}
    unknown = [disk for disk in now.disks if disk.allocated_bytes is None and disk.chain and disk.chain[0]]
    for disk, file in zip(unknown, files(guest, [disk.chain[0] for disk in unknown]), strict=True):
        found[disk.target] = None if file is None else file["bytes"]
    return found


def chain_of(guest: Guest, disk: DiskNow) -> tuple[str, ...]:
    """The images of a disk from above; where its definition names the first alone, as the last scan saw the others."""
    if len(disk.chain) != 1:
        return disk.chain
    image = Image.objects.filter(host=guest.host_id, path_key=path_key(os.fsencode(disk.chain[0]))).first()
    try:
        return disk.chain if image is None else (disk.chain[0], *(base.path for base in neighbours.ancestors(image)))
    except RefusedError:
        return disk.chain


def whole_chains(guest: Guest, now: GuestNow) -> dict[str, int]:
    """What each image of all disks' chains occupies now, by path, as its host's agent tells; nothing where one is
    unknown.
    """
    paths = list(dict.fromkeys(path for disk in now.disks for path in chain_of(guest, disk)))
    told = files(guest, paths)
    return {} if None in told else {path: file["bytes"] for path, file in zip(paths, told, strict=True) if file}


def change_of(guest: Guest, before: dict[str, int]) -> dict[str, int]:
    """What became of that, as of :func:`change`; nothing where it is unknown; files that are gone occupy nothing."""
    if not before:
        return {}
    try:
        tops = [disk.chain[0] for disk in running.look(guest.host, guest.uid).disks if disk.chain]
    except (RefusedError, HostError):
        return {}  # what it writes to now is unknown
    told = files(guest, list(dict.fromkeys([*before, *tops])))
    return change(sum(before.values()), sum(file["bytes"] for file in told if file is not None)) if any(told) else {}


def change(before: int, after: int) -> dict[str, int]:
    """Bytes before and after, as a job's result has them."""
    return {"before_bytes": before, "after_bytes": after, "freed_bytes": before - after}


def files(guest: Guest, paths: Sequence[str]) -> list[dict[str, int] | None]:
    """What a host's agent tells of files: ``bytes`` that each occupies, and by what it is known again (the others).

    Returns:
        In their order; ``None`` for what is no file, and where there is no agent, or it does not answer in time.
    """
    if paths and not refusals.without_agent(guest.host):
        with contextlib.suppress(RefusedError, HostError):
            return files_told(guest, paths)
    return [None] * len(paths)


def files_told(guest: Guest, paths: Sequence[str]) -> list[dict[str, int] | None]:
    """The same; raises RefusedError or HostError where there is no agent, or it does not answer in time."""
    asked = {"paths_b64": [b64(os.fsencode(path)) for path in paths]}
    answer = asking.ask(guest.host, "occupied", asked, seconds=running.LOOK_TIMEOUT)
    return [None if one is None else dict(one) for one in answer["files"]]


def images_of(guest: Guest) -> dict[str, Image]:
    """The images of a guest's disks, by target; none of a VM's unused ones, which it cannot write to."""
    images = Image.objects.filter(uses__disk__guest=guest).select_related("pool")
    by_id = {image.pk: image for image in images}
    disks = guest.disks.filter(only_in="", device="disk").exclude(target__startswith="unused").select_related("use")
    return {disk.target: by_id[disk.use.image_id] for disk in disks if hasattr(disk, "use")}


def seen(guest: Guest) -> dict[str, int | None]:
    """What a guest's images occupy, as their host's agent tells now; nothing where it does not answer."""
    if guest.host_id not in look.at(images_of(guest).values()):
        return {}
    return {target: image.allocated_size for target, image in images_of(guest).items()}


def drop(guest: Guest, path: str, pool: StoragePool | None, since: int = 0, *, needed: bool = False) -> int:
    """Has a host's agent delete the file of an image that nothing needs; the bytes that became free.

    Args:
        since: seconds since the epoch: an older one is left.
        needed: look through the host's pools first for images that stand on it.

    Raises:
        RefusedError: it is used or needed, has another name, or is older, or its pool is gone.
        HostError: the host does not answer.
    """
    if pool is None:
        raise RefusedError("outside_pool", gettext("its pool is gone"))
    args: dict[str, object] = {
        **pool.place_of(os.fsencode(path)), "since": since, "pools": looked_through(guest.host) if needed else [],
    }  # fmt: skip
    freed: int = asking.ask(guest.host, "drop", args)["freed_bytes"]
    return freed


def refuse_needed(guest: Guest, layers: Layers, top: int, base: int) -> None:
    """Has a host's agent look once more who needs the images between two places, also what was made since the scan.

    Raises:
        RefusedError, HostError: as :func:`refuse_needed_by_others`.
    """
    places = [place for place in range(max(top - 1, 0), base + 1) if place in layers.rows]
    refuse_needed_by_others(guest, layers.images_at(places), sum(place < top for place in places))


def refuse_needed_by_others(guest: Guest, images: Sequence[Image], first: int = 0) -> None:
    """The same of images.

    Args:
        images: from above, which may need each other.
        first: place of the first that nobody else may need.

    Raises:
        RefusedError: ``has_overlays``, ``guests_unknown``: somebody does, or may, also on other hosts that share their
            storage; or one is gone.
        HostError: the host does not answer.
    """
    if refusals.without_agent(guest.host):
        return
    refuse_elsewhere(images, first)
    chain = [image.place for image in images]
    asking.ask(guest.host, "needed", {"images": chain, "first": first, "pools": looked_through(guest.host)})


def room_gone(guest: Guest, pool: StoragePool | None) -> str:
    """Why QEMU must not go on writing to a pool, as its host's agent tells how full it is now; empty for nothing."""
    if pool is None or pool.kind not in refusals.FOLDERS or refusals.without_agent(guest.host):
        return ""
    told = None
    with contextlib.suppress(RefusedError, HostError):
        asked = {"folders_b64": [b64(bytes(pool.path_bytes))]}
        [told] = asking.ask(guest.host, "space", asked, seconds=running.LOOK_TIMEOUT)["folders"]
    available, capacity = (told or {}).get("available_bytes"), (told or {}).get("capacity_bytes")
    if available is None or not capacity or available >= (reserve := refusals.reserve_of(capacity)):
        return ""
    return gettext(
        "{pool} has {available:,} bytes free, and {reserve:,} must stay free: others have taken the room meanwhile."
    ).format(pool=pool.name, available=available, reserve=reserve)


def pool_of(guest: Guest) -> StoragePool | None:
    """The pool that all images of a guest are in; ``None`` where they are in several. Of a storage whose images another
    node lists it is that of the guest's own node: the other may not exist for whoever reads of it.
    """
    images = Image.objects.filter(uses__disk__guest=guest).select_related("pool")
    pools = {image.pool_id: image.pool for image in images}
    found = next(iter(pools.values())) if len(pools) == 1 else None
    if found is None or found.host_id == guest.host_id:
        return found
    return next((one for one in shared_storages.siblings(found) if one.host_id == guest.host_id), None)


def not_known(disk: str) -> str:
    """Why nothing is changed where the rows of some images of a disk are missing."""
    return gettext(
        "Not all images of {disk} are known: scan the host, or register their folders. On a host without an agent, run "
        "virsh pool-refresh first."
    ).format(disk=disk)


def in_the_clear(images: Iterable[Image], into: str) -> list[Refusal]:
    """Whether data of encrypted images would be written to a file that is not encrypted."""
    sentence = gettext(
        "{image} is encrypted, and its data would be written to {into} unencrypted. Use virsh, with a definition of "
        "the new file that encrypts it, or leave the disk as it is."
    )
    image = next((one for one in images if one.encrypted), None)
    return [] if image is None else [Refusal("encrypted", sentence.format(image=image.name, into=into))]


def backed_up(guest: Guest, now: GuestNow) -> list[Refusal]:
    """What of libvirt's backups would not agree with a changed chain any more."""
    found: list[Refusal] = []
    if now.checkpoints:
        sentence = gettext(
            "libvirt keeps checkpoints of {guest} for incremental backups ({names}), whose bitmaps are in these "
            "images: delete them first (virsh checkpoint-delete)."
        ).format(guest=guest.name, names=", ".join(now.checkpoints[:5]))
        found.append(Refusal("checkpoint_kept", sentence))
    if now.backs_up:
        sentence = gettext("A backup of {guest} is running: wait until it has ended.").format(guest=guest.name)
        found.append(Refusal("guest_locked", sentence))
    return found


def about_bitmaps(images: Iterable[Image]) -> list[str]:
    """What to know of the bitmaps by which backup tools find what has changed; nothing where there are none."""
    names = sorted({str(one["name"]) for image in images for one in image.bitmaps})
    if not names:
        return []
    sentence = gettext(
        "Backup tools keep bitmaps in these images ({names}), which may not hold afterwards: the next backup has to "
        "be a full one."
    )
    return [sentence.format(names=", ".join(names[:5]))]


def as_scanned(guest: Guest, target: str) -> Layers:
    """A disk's chain as of the last scan; empty where that does not know it, or it is cut."""
    images, image = list[Image](), images_of(guest).get(target)
    if image is not None:
        with contextlib.suppress(RefusedError):
            images = [image, *neighbours.ancestors(image)]
    chain = [one.path for one in images]
    return Layers(guest.pk, target, chain, dict(enumerate(images)), "", None, ())


def layers_of(guest: Guest, now: GuestNow, disk: DiskNow) -> Layers:
    """A disk's chain, with what stands against changing it."""
    keys = {path_key(os.fsencode(path)): place for place, path in enumerate(disk.chain) if path}
    images = Image.objects.filter(host=guest.host_id, path_key__in=list(keys)).select_related("host", "pool")
    found: list[Refusal] = []
    if "" in disk.chain or disk.kind not in {"file", "block", "volume"}:
        sentence = gettext("The chain of {disk} has something that is neither a file nor a device.").format(
            disk=disk.target
        )
        found.append(Refusal("unsupported_pool", sentence))
    if disk.format != "qcow2":
        sentence = gettext("{disk} is {format}: only qcow2 images have backing files.")
        found.append(Refusal("unsupported_subformat", sentence.format(disk=disk.target, format=disk.format or "?")))
    if now.snapshots:
        sentence = gettext(
            "libvirt keeps snapshots of {guest} ({snapshots}), which name these images: delete them first."
        ).format(guest=guest.name, snapshots=", ".join(now.snapshots[:5]))
        found.append(Refusal("in_snapshot_chain", sentence))
    found += backed_up(guest, now)
    found += [Refusal("merged", image.state_detail) for image in images if image.state == Image.State.MERGED]
    return Layers(
        guest.pk, disk.target, list(disk.chain), {keys[image.path_key]: image for image in images},
        disk.format, occupied(guest, replace(now, disks=(disk,))).get(disk.target), tuple(found),
    )  # fmt: skip
