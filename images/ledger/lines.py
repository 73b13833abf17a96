"""The one place that writes a job's line of the ledger. Call it in the transaction that writes the job's result.

A line says what the job itself did to the space of its filesystem, to the byte: ``st_blocks``, and of blocks that files
share (reflinks) what the filesystem gave or got back:

- before and after: what the image occupied; of a new file beside an image, 0 and what the new file occupies;
- freed: before less after, once that is so for good. As long as an undo copy waits it is 0: the filesystem holds both
  files then, and nothing was won. What was undone has freed 0 for ever.

So the sum of what was freed is the change of allocated space on the disks once no undo copy waits any more, whatever
guests wrote into their images meanwhile: that is no job's doing, and no line's.
"""

from typing import Any

from django.utils import timezone

from images.models import Image
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job


def write(job: Job, pool: StoragePool | None, before: int, after: int, *, freed: int | None = None) -> None:
    """A job has changed space for good.

    Args:
        pool: where; ``None`` where nobody knows that any more.
        before, after: allocated bytes of what it worked on.
        freed: bytes, where that is not what is between the two.
    """
    freed = before - after if freed is None else freed
    _write(job, pool, before_bytes=before, after_bytes=after, **_freed(freed))


def write_held(job: Job, pool: StoragePool | None, before: int, after: int, made: int | None = None) -> None:
    """A job has put another file in an image's place, and the original waits as its undo copy: nothing is freed yet.

    Args:
        made: bytes that the filesystem gave for the new file, where that shares blocks with the original.
    """
    _write(job, pool, before_bytes=before, after_bytes=after, made_bytes=made, **_freed(0, for_good=False))


def write_beside(job: Job, pool: StoragePool | None, made: int) -> None:
    """A job has made a new file of that many allocated bytes beside what there was: so much less is free."""
    _write(job, pool, planned_before=0, before_bytes=0, after_bytes=made, **_freed(-made))


def close(job: Job, freed: int, *, undone: bool = False) -> None:
    """A job's undo copy does not wait any more, and this came of it in the end.

    Args:
        freed: bytes; 0 where the job was undone.
    """
    Job.objects.filter(pk=job.pk, freed_bytes__isnull=False).update(**_freed(freed, for_good=not undone))


def begin_in_place(job: Job, before: int) -> None:
    """A running job is about to change an image where it stands: what that occupies, in bytes. It is no line yet."""
    job.ours().update(before_bytes=before)


def write_in_place(job: Job, before: int, after: int, freed: int | None = None) -> None:
    """What a job has won in place, whatever its end will be; no line where that is nothing.

    Args:
        freed: bytes, where other files share some of what was let go of.
    """
    if before == after:
        Job.objects.filter(pk=job.pk, freed_bytes=None).update(before_bytes=None)
        return
    image = Image.every.select_related("pool").filter(pk=job.target_id).first()
    write(job, image.pool if image else None, before, after, freed=freed)


def _freed(freed: int, *, for_good: bool = True) -> dict[str, Any]:
    now = timezone.now() if for_good else None
    return {"freed_bytes": freed, "freed_at": now, "freed_month": f"{now:%Y-%m}" if now else ""}


def _write(job: Job, pool: StoragePool | None, *, planned_before: int | None = None, **columns: Any) -> None:
    predicted = job.plan.get("predicted_after_bytes")
    before = job.plan.get("before_bytes") if planned_before is None else planned_before
    known = isinstance(predicted, int) and isinstance(before, int)
    Job.objects.filter(pk=job.pk).update(
        space_pool=pool,
        pool_name=pool.name if pool else "",
        host_name=job.host.name,
        predicted_bytes=before - predicted if known else None,
        **columns,
    )
