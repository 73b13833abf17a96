"""What a reclaim does to volumes, and what it wins, as far as the database knows."""

from typing import Any

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.orphans.evidence import number_of
from images.rewrite import guest_locks, space
from images.rewrite.kind import Choice
from images.rewrite.volumes import dataset
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.kinds import Unsuccessful
from storage_admin.jobs.plan_and_progress import Refusal
from storage_admin.words import Translatable

#: The methods of their plans.
DISCARD, SPARSIFY, FLATTEN, PROMOTE = "discard", "sparsify", "flatten", "promote"
#: What holds while they work.
RECLAIMS: dict[str, Translatable] = {
    DISCARD: _(
        "What is read from the volume stays the same at all times. Only while zeros are discarded, the volume has "
        "another name, so that no guest can start from it."
    ),
    SPARSIFY: _(
        "Ceph looks at each object and frees its zeros in one step, so that what is read from the image stays the "
        "same at all times. Refused while any host has it open."
    ),
}
FLATTENS: dict[str, Translatable] = {
    FLATTEN: _(
        "What is read from the image stays the same at all times. It keeps its parent until all data is copied. "
        "Refused while any host has it open."
    ),
    PROMOTE: _("ZFS does it in one step. What is read from either volume stays the same at all times."),
}
#: What is said of jobs that did not succeed.
_ZEROS_GONE = Unsuccessful(
    gettext_noop("The volume's contents are unchanged. Some of its zeros may have been discarded."),
    gettext_noop("This job did not change what is read from the volume."),
)
UNSUCCESSFUL = {
    DISCARD: _ZEROS_GONE,
    SPARSIFY: _ZEROS_GONE,
    FLATTEN: Unsuccessful(
        gettext_noop("The volume's contents are unchanged. It may have a copy of some of its parent's data."),
        gettext_noop("This job did not change what is read from the volume."),
    ),
    PROMOTE: Unsuccessful(
        gettext_noop("The contents of both volumes are unchanged. They may have exchanged their parts."),
        gettext_noop("This job did not exchange anything."),
    ),
}


def reclaim(image: Image, options: dict[str, Any]) -> Choice:
    """What is done to a volume by its pool; nothing in one that gives nothing back."""
    match image.pool.kind:
        case StoragePool.Kind.LVMTHIN:
            return discard(image, options)
        case StoragePool.Kind.RBD:
            return sparsify(image, options)
    return Choice("", "", scratch=0)


def discard(image: Image, options: dict[str, Any]) -> Choice:
    """The chunks of a thin volume that hold zeros go back to its pool."""
    after, low, high = space.predicted(image, "in_place")
    won = None if after is None else space.analyzed_bytes(image) - after
    alone, warnings = image.alone_bytes, list[str]()
    # Of one that is inactive LVM tells nothing.
    mapped = image.allocated_size or space.analyzed_bytes(image)
    if alone is not None and alone < mapped:
        won = None if won is None else min(won, alone)
        told = gettext("Snapshots or other volumes share {shared:,} bytes of it. Zeros among these free nothing.")
        warnings.append(told.format(shared=mapped - alone))
    told = gettext("Chunks of zeros go back to the thin pool. The savings are unknown until the volume is analyzed.")
    if won is not None:
        told = gettext("Chunks of zeros go back to the thin pool. Expected savings, from a sample: {won:,} bytes.")
    against = [*_only_auto(options), *guest_locks.refusals(image, 1)]
    if image.backing is not None and image.backing.pool_id != image.pool_id:
        outside = gettext("Where {image} has nothing, it reads from {base}, not zeros. Its zeros cannot be given back.")
        against.append(Refusal("unsupported_pool", outside.format(image=image.name, base=image.backing.name)))
    if image.orphan is not True and (guest_locks.are_needed(image) or image.disks):
        warnings.append(
            gettext("It is read first. While zeros are discarded, it has another name and its guests cannot start.")
        )
    return Choice(
        DISCARD, told.format(won=won), _discarding(image), after, low, high, won, scratch=0,
        refusals=against, warnings=[*warnings, *guest_locks.warnings(image)],
    )  # fmt: skip


def sparsify(image: Image, options: dict[str, Any]) -> Choice:
    """Ceph frees the zeros of an image."""
    warnings = [gettext("Ceph counts in whole objects: zeros that it frees within an object do not show as freed.")]
    if image.snapshot_bytes:
        warnings.append(gettext("Snapshots of the image keep their zeros."))
    return Choice(
        SPARSIFY, gettext("Ceph frees the zeros of the image. How many there are is known only afterwards."),
        [["rbd", "sparsify", _spec(image)]], low=None if image.allocated_size is None else 0,
        high=image.allocated_size, scratch=0, refusals=_only_auto(options), warnings=warnings,
    )  # fmt: skip


def flatten(image: Image, below: list[Image]) -> Choice:
    """What is done to a clone by its pool; nothing in one that has none to flatten."""
    match image.pool.kind:
        case StoragePool.Kind.RBD:
            return _copied_up(image, below)
        case StoragePool.Kind.ZFS:
            return _promoted(image, below)
    return Choice("", "", scratch=0)


def _promoted(image: Image, below: list[Image]) -> Choice:
    """A clone of ZFS and what it is a clone of exchange their parts."""
    base, clone = below[0] if below else None, dataset(image.path)
    origin = dataset(base.path) if base is not None else ""
    against = []
    if base is None or not clone or not origin:
        told = gettext("{image} is no clone of a volume in this inventory, so there is nothing to exchange.")
        against = [Refusal("stale_plan", told.format(image=image.name))]
    elif number_of(base.name, base.path):
        told = gettext(
            "{base} is named as a volume of Proxmox VE, which would not find its snapshots, its replication or its "
            "linked clones any more. Move the disk to another storage instead, which makes a full copy."
        )
        against = [Refusal("in_snapshot_chain", told.format(base=base.name))]
    told = gettext(
        "{image} and {base} exchange their parts: the snapshot on which {image} stands and all earlier ones of {base} "
        "move to {image}, and their space is charged to it. {base} becomes a clone of it. Nothing is copied and "
        "nothing is freed. It is of use where {base} is to be deleted."
    )
    return Choice(
        PROMOTE, told.format(image=image.name, base=base.name if base else "?"), [["zfs", "promote", clone]],
        scratch=0, refusals=against, below={base.pk: gettext("becomes the clone")} if base else {},
    )  # fmt: skip


def _copied_up(image: Image, below: list[Image]) -> Choice:
    """Ceph copies to a clone what it reads of its parent."""
    own, base = image.allocated_size, below[0] if below else None
    after, low, high = _grown(image, base)
    against = []
    if base is None:
        told = gettext("{image} has no parent in this inventory, so there is nothing to flatten.")
        against = [Refusal("stale_plan", told.format(image=image.name))]
    return Choice(
        FLATTEN,
        gettext(
            "Ceph copies to the image what it reads of {base}, so that it has no parent any more. The image grows by "
            "that. The parent stays as it is."
        ).format(base=base.name if base else "?"),
        [["rbd", "flatten", _spec(image)]], after, low, high,
        scratch=None if high is None or own is None else high - own, refusals=against,
    )  # fmt: skip


def _grown(image: Image, base: Image | None) -> space.Predicted:
    """What a clone takes once it has copied all that it reads of its parent."""
    own, size = image.allocated_size, image.virtual_size
    if base is None or base.allocated_size is None or own is None or not size:
        return space.Predicted(None, None, None)
    taken = min(base.allocated_size + (base.snapshot_bytes or 0), size)
    # Where among the parent's objects the clone has its own is not known: by chance, as everywhere.
    return space.Predicted(own + taken * max(size - own, 0) // size, max(own, taken), min(own + taken, max(size, own)))


def _spec(image: Image) -> str:
    return image.path.removeprefix("rbd:")


def _only_auto(options: dict[str, Any]) -> list[Refusal]:
    if options["method"] in {"auto", "in_place"}:
        return []
    return [Refusal("unsupported_subformat", gettext("Volumes cannot be compressed or copied. Choose auto."))]


def _discarding(image: Image) -> list[list[str]]:
    """The agent reads zeros and discards each stretch by itself; these are the nearest commands that there are."""
    group, name = image.volume.get("group", ""), image.volume.get("name", "")
    return [
        ["lvchange", "-an", f"{group}/{name}"],
        ["lvrename", group, name, ".sa-JOB.work"],
        ["blkdiscard", "--offset", "START", "--length", "BYTES", "DEVICE"],
        ["lvrename", group, ".sa-JOB.work", name],
    ]
