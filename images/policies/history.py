"""What earlier jobs say of an image: when the last one was, whether what it won is lost again, who has it now."""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db.models import Max

from images.models import ImageSample
from storage_admin.jobs.models import Job, ResourceLock

#: An image has grown back when it has taken so much of what was won again, within so long.
REGROWN_PERCENT = 80
REGROWN_WITHIN = timedelta(days=30)
#: So many ids stand in one query.
_AT_ONCE = 5000


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


class Regrown(NamedTuple):
    """An image that has grown back; sizes in bytes."""

    last: Last
    grown_bytes: int
    at: datetime


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


def regrown(last: dict[int, Last], sizes: dict[int, int], now: datetime) -> dict[int, Regrown]:
    """The images whose savings decayed, by id: they stand grown back now, and were so soon after the job.

    An image that grew back once is so for good, however long ago that was: what it was like then, its samples tell.

    Args:
        last: the last reclaim of each.
        sizes: what each image takes now, in bytes.
    """
    back: dict[int, int] = {}
    for pk, size in sizes.items():
        job = last.get(pk)
        if job is None or job.undone or job.won_bytes <= 0:
            continue
        if size - job.after_bytes >= job.won_bytes * REGROWN_PERCENT / 100:
            back[pk] = size - job.after_bytes
    first = _first_back({pk: last[pk] for pk in back})
    found: dict[int, Regrown] = {}
    for pk, grown in back.items():
        at = first.get(pk, now)
        if at - last[pk].finished <= REGROWN_WITHIN:
            found[pk] = Regrown(last[pk], grown, at)
    return found


def _first_back(jobs: dict[int, Last]) -> dict[int, datetime]:
    """When a scan first found each image grown back."""
    found: dict[int, datetime] = {}
    ids = sorted(jobs)
    for begin in range(0, len(ids), _AT_ONCE):
        part = ids[begin : begin + _AT_ONCE]
        oldest = min(jobs[pk].finished for pk in part)
        samples = ImageSample.objects.filter(image__in=part, at__gt=oldest, allocated_size__isnull=False)
        for pk, at, size in samples.order_by("at").values_list("image_id", "at", "allocated_size"):
            job = jobs[pk]
            needed = job.after_bytes + job.won_bytes * REGROWN_PERCENT / 100
            if at > job.finished and pk not in found and (size or 0) >= needed:
                found[pk] = at
    return found


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
