"""Undo copies: which jobs keep one in a pool, until when, and which were taken away by somebody else."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone

from images.models import Image
from images.rewrite import holding, refusals
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import display
from storage_admin.jobs.models import Job

#: How long a pool's page goes on telling of a copy that somebody else took away.
TOLD_FOR = timedelta(days=30)


@dataclass(frozen=True)
class UndoCopy:
    """A job's undo copy.

    Args:
        job: whose it is.
        image: what it is the original of; ``None`` where that row is gone.
        held_bytes: what it occupies, and so keeps from being free.
        overdue: its window has closed, and it could not be removed yet.
        trouble: why the last try to remove it failed; empty where none did.
    """

    job: Job
    image: Image | None
    held_bytes: int
    expires: datetime | None
    overdue: bool
    trouble: str


@dataclass(frozen=True)
class UndoCopies:
    """The undo copies in a pool, the largest first.

    Args:
        held_bytes: their sum.
        others_bytes: what the last scan found in undo copies beyond it: files that none of our jobs knows.
        missing: jobs whose copy somebody else took away lately.
    """

    rows: tuple[UndoCopy, ...]
    held_bytes: int
    others_bytes: int
    missing: tuple[UndoCopy, ...]


def jobs_with_copies(pool: StoragePool) -> QuerySet[Job]:
    """The jobs whose undo copies wait in a pool."""
    images = Image.every.filter(pool=pool).values("pk")
    return Job.objects.filter(undo_state=Job.UndoState.AVAILABLE, target_kind="image", target_id__in=images)


def kept_on_hosts() -> list[dict[str, Any]]:
    """All undo copies, as a backup lists them: host, path and bytes of each."""
    jobs = Job.objects.filter(undo_state=Job.UndoState.AVAILABLE, target_kind="image").select_related("host")
    kept = list(jobs.only("uid", "target_id", "undo_bytes", "host__name").order_by("pk"))
    images = Image.every.in_bulk({job.target_id for job in kept})
    return [
        {"host": job.host.name, "path": display(_beside(images[job.target_id], job)), "bytes": job.undo_bytes}
        for job in kept
        if job.host is not None and job.target_id in images
    ]


def _beside(image: Image, job: Job) -> bytes:
    return bytes(image.path_bytes).rpartition(b"/")[0] + f"/.sa-{job.uid}.orig".encode()


def undo_copies(pool: StoragePool) -> UndoCopies:
    """What undo copies hold in a pool, job by job."""
    now = timezone.now()
    kept = list(jobs_with_copies(pool).defer("plan", "commands").order_by("-undo_bytes", "-id"))
    lost = Job.objects.filter(
        undo_state=Job.UndoState.MISSING, target_kind="image", undo_expires__gt=now - TOLD_FOR,
        target_id__in=Image.every.filter(pool=pool).values("pk"),
    ).defer("plan", "commands")[:20]  # fmt: skip
    lost_jobs = list(lost)
    images = Image.every.in_bulk({job.target_id for job in [*kept, *lost_jobs]})
    failed = holding.whys_of(kept)

    def row(job: Job) -> UndoCopy:
        overdue = job.undo_available and job.undo_expires is not None and job.undo_expires <= now
        image = images.get(job.target_id)
        lost = [refusal.detail for refusal in refusals.only_copy(image)] if overdue and image is not None else []
        trouble = lost[0] if lost else failed.get(job.pk, "")
        return UndoCopy(job, image, job.undo_bytes, job.undo_expires, overdue, trouble)

    held = sum(job.undo_bytes for job in kept)
    return UndoCopies(
        rows=tuple(map(row, kept)),
        held_bytes=held,
        others_bytes=max(pool.undo_bytes - held, 0),
        missing=tuple(map(row, lost_jobs)),
    )
