"""Whether what a reclaim won is lost again: by what guests wrote, not by what later jobs made of the file."""

from collections import defaultdict
from datetime import datetime, timedelta
from typing import NamedTuple

from images.models import ImageSample
from images.policies.history import Last
from storage_admin.batches import batched
from storage_admin.jobs.models import Job

#: An image has grown back when it has taken so much of what was won again, within so long.
REGROWN_PERCENT = 80
REGROWN_WITHIN = timedelta(days=30)
#: So many ids stand in one query.
_AT_ONCE = 5000


class Regrown(NamedTuple):
    """An image that has grown back.

    Args:
        grown_bytes: by how much it had grown when that was found.
        at: when it was found first.
    """

    last: Last
    grown_bytes: int
    at: datetime


class _Added(NamedTuple):
    """Bytes by which a job, as a flatten, made an image's file larger; until the job was undone, where it was."""

    bytes: int
    since: datetime
    until: datetime | None


def regrown(last: dict[int, Last], sizes: dict[int, int], now: datetime) -> dict[int, Regrown]:
    """The images whose savings decayed, by id: they stand grown back now, and were so soon after the job.

    An image that grew back once is so for good, however long ago that was: what it was like then, its samples tell.
    What later jobs added to its file is no growth.

    Args:
        last: the last reclaim of each.
        sizes: what each image takes now, in bytes.
    """
    larger = {}
    for pk, size in sizes.items():
        job = last.get(pk)
        if job is not None and not job.undone and job.won_bytes > 0 and size - job.after_bytes >= _needed(job):
            larger[pk] = job
    added = _added_by_jobs(larger)
    grown = {pk: sizes[pk] - job.after_bytes - _added_at(added[pk], now) for pk, job in larger.items()}
    back = {pk: job for pk, job in larger.items() if grown[pk] >= _needed(job)}
    first = _first_back(back, added)
    found = {pk: Regrown(job, *first.get(pk, (grown[pk], now))) for pk, job in back.items()}
    return {pk: one for pk, one in found.items() if one.at - one.last.finished <= REGROWN_WITHIN}


def _needed(job: Last) -> float:
    return job.won_bytes * REGROWN_PERCENT / 100


def _added_at(added: list[_Added], at: datetime) -> int:
    return sum(one.bytes for one in added if one.since <= at and (one.until is None or at < one.until))


def _added_by_jobs(jobs: dict[int, Last]) -> dict[int, list[_Added]]:
    """What jobs have added to the images' files since the last reclaim of each."""
    found: dict[int, list[_Added]] = defaultdict(list)
    for part in batched(sorted(jobs), _AT_ONCE):
        swapped = Job.objects.filter(
            target_kind="image",
            target_id__in=part,
            state=Job.State.SUCCEEDED,
            result__swapped=True,
            finished__isnull=False,
        )
        rows = list(
            swapped.values_list(
                "pk", "target_id", "started", "finished", "result__before_bytes", "result__after_bytes", "undo_state"
            )
        )
        undone = {row[0] for row in rows if row[-1] == Job.UndoState.UNDONE}
        undos = _undos(undone)
        for pk, image, started, finished, before, after, _undo in rows:
            last, undo = jobs[image], undos.get(pk)
            if finished is not None and finished > last.finished:
                more = (after or 0) - (before or 0)
                if more > 0 and (undo is not None or pk not in undone):
                    found[image].append(_Added(more, started or finished, undo.since if undo else None))
            elif undo is not None and undo.since > last.finished:
                # It brought back the file from before an older job, and the reclaim went with the newer one.
                found[image].append(undo)
    return found


def _undos(jobs: set[int]) -> dict[int, _Added]:
    """How jobs were undone, by their ids: what the original takes more than the file that went, and since when."""
    undos = Job.objects.filter(kind="undo", state=Job.State.SUCCEEDED, target_kind="job", target_id__in=jobs)
    rows = undos.values_list("target_id", "finished", "result__before_bytes", "result__after_bytes")
    return {
        pk: _Added(max((after or 0) - (before or 0), 0), finished, None)
        for pk, finished, before, after in rows
        if finished is not None
    }


def _first_back(jobs: dict[int, Last], added: dict[int, list[_Added]]) -> dict[int, tuple[int, datetime]]:
    """By how many bytes each image had grown when a scan first found it grown back, and when that was."""
    found: dict[int, tuple[int, datetime]] = {}
    for part in batched(sorted(jobs), _AT_ONCE):
        oldest = min(jobs[pk].finished for pk in part)
        samples = ImageSample.objects.filter(image__in=part, at__gt=oldest, allocated_size__isnull=False)
        for pk, at, size in samples.order_by("at").values_list("image_id", "at", "allocated_size"):
            job = jobs[pk]
            grown = (size or 0) - job.after_bytes - _added_at(added[pk], at)
            if at > job.finished and pk not in found and grown >= _needed(job):
                found[pk] = grown, at
    return found
