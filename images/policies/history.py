"""What earlier jobs say of an image: when the last one was, and who has it now."""

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from django.db.models import Max

from storage_admin.jobs.models import Job, ResourceLock


class Last(NamedTuple):
    """The last job of a kind on an image, or a pool, that ended well.

    Args:
        won_bytes: by how much the image got smaller.
        after_bytes: what it took then.
        undone: whether somebody put the original back.
    """

    job_id: int
    finished: datetime
    won_bytes: int
    after_bytes: int
    undone: bool


def last_jobs(kind: str, target_kind: str, among: Collection[int] | None = None) -> dict[int, Last]:
    """The last job of a kind that ended well, by its target's id.

    Args:
        among: only those of these targets.
    """
    ended = Job.objects.filter(kind=kind, target_kind=target_kind, state=Job.State.SUCCEEDED)
    ended = ended if among is None else ended.filter(target_id__in=among)
    latest = ended.order_by().values("target_id").annotate(last=Max("pk")).values("last")
    rows = Job.objects.filter(pk__in=latest).values_list(
        "target_id", "pk", "finished", "result__before_bytes", "result__after_bytes", "undo_state"
    )
    return {
        target: Last(pk, finished, (before or 0) - (after or 0), after or 0, undo == Job.UndoState.UNDONE)
        for target, pk, finished, before, after, undo in rows.iterator()
        if finished is not None
    }


def held_images(kind: str, *, alone: bool) -> Collection[int]:
    """Ids of the images that other jobs have now.

    Args:
        alone: whether a job of the kind needs the image for itself; else only another one of its kind is in its way.
    """
    active = Job.objects.filter(state__in=Job.ACTIVE)
    if not alone:
        return set(active.filter(kind=kind, target_kind="image").values_list("target_id", flat=True))
    keys = ResourceLock.objects.filter(key__startswith="image:").values_list("key", flat=True)
    return {int(key.removeprefix("image:")) for key in keys if key.removeprefix("image:").isdigit()}


def measured_pools(kind: str) -> Collection[int]:
    """Ids of the pools that such a job is queued or at work on."""
    active = Job.objects.filter(state__in=Job.ACTIVE, kind=kind, target_kind="pool")
    return set(active.values_list("target_id", flat=True))
