"""What a reclaim does to volumes, and what it wins, as far as the database knows."""

from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.rewrite import guest_locks, space
from images.rewrite.kind import Choice
from storage_admin.jobs.plan_and_progress import Refusal
from storage_admin.words import Translatable

#: The methods of their plans.
DISCARD = "discard"
#: What holds while they work.
PROMISES: dict[str, Translatable] = {
    DISCARD: _(
        "What is read from the volume stays the same at all times. Only while zeros are discarded, the volume has "
        "another name, so that no guest can start from it."
    )
}


def discard(image: Image, options: dict[str, Any]) -> Choice:
    """The chunks of a thin volume that hold zeros go back to its pool."""
    after, low, high = space.predicted(image, "in_place")
    won = None if after is None else space.analyzed_bytes(image) - after
    alone, warnings = image.alone_bytes, list[str]()
    if alone is not None and image.allocated_size is not None and alone < image.allocated_size:
        won = None if won is None else min(won, alone)
        told = gettext("Snapshots or other volumes share {shared:,} bytes of it. Zeros among these free nothing.")
        warnings.append(told.format(shared=image.allocated_size - alone))
    told = gettext("Chunks of zeros go back to the thin pool. The savings are unknown until the volume is analyzed.")
    if won is not None:
        told = gettext("Chunks of zeros go back to the thin pool. Expected savings, from a sample: {won:,} bytes.")
    if image.orphan is not True and (guest_locks.are_needed(image) or image.disks):
        warnings.append(
            gettext("It is read first. While zeros are discarded, it has another name and its guests cannot start.")
        )
    return Choice(
        DISCARD, told.format(won=won), _discarding(image), after, low, high, won, scratch=0,
        refusals=[*_only_auto(options), *guest_locks.refusals(image, 1)],
        warnings=[*warnings, *guest_locks.warnings(image)],
    )  # fmt: skip


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
