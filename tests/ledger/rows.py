"""Jobs with a line of the ledger, as they would have ended."""

from datetime import UTC, datetime
from typing import Any

from django.db.models import Model
from django.utils import timezone

from images.models import Image
from images.rewrite import record
from storage_admin.jobs.models import Job
from tests.factories import GIB, ImageFactory, JobFactory
from tests.working import reread

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def job_on(target: Model | None = None, **values: Any) -> Job:
    """A job on an image that has ended."""
    now = timezone.now()
    ended: dict[str, Any] = {"kind": "reclaim", "state": "succeeded", "started": now, "finished": now, "rewrites": True}
    return JobFactory.create(target=target or ImageFactory.create(), **ended | values)


def freed(
    before: int, after: int, image: Image | None = None, at: datetime | None = None, pool: Any = None, **values: Any
) -> Job:
    """One that has changed space for good, at a time."""
    image = image or ImageFactory.create()
    job = job_on(image, **values)
    record.write_line(job, pool or image.pool, before, after)
    if at is not None:
        Job.objects.filter(pk=job.pk).update(freed_at=at, freed_month=f"{at.astimezone(UTC):%Y-%m}", finished=at)
    return reread(job)


def held(before: int = 4 * GIB, after: int = GIB, image: Image | None = None, **values: Any) -> Job:
    """One whose undo copy waits."""
    image = image or ImageFactory.create()
    waits: dict[str, Any] = {"undo_state": "available", "undo_bytes": before, "undo_expires": timezone.now()}
    job = job_on(image, **waits | values)
    record.write_held_line(job, image.pool, before, after)
    return reread(job)
