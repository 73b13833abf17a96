"""Time that passes for an undo copy, without any clock being touched: what was written down lies further back."""

from datetime import timedelta
from pathlib import Path

from django.utils import timezone

from images.models import Image
from storage_admin.guests.models import GuestSpan
from storage_admin.jobs.models import Elapsed, Job
from tests.agent.harness import age


def undo_window(job: Job) -> None:
    """The undo window of a job has closed a second ago, for the dashboard and for its host."""
    job.refresh_from_db()
    assert job.undo_due is not None
    left = job.undo_due - Elapsed.now() + 1
    expires = timezone.now() - timedelta(seconds=1)
    Job.objects.filter(pk=job.pk).update(undo_expires=expires, undo_due=Elapsed.now() - 1)
    for journal in journals(job):
        age(journal, boottime=left, wall=left)


def guest_ran(kind: str, uid: str, host_id: int, begin: float, end: float) -> None:
    """A guest was seen to run from so many to so many seconds ago."""
    now = Elapsed.now()
    GuestSpan.objects.create(host_id=host_id, kind=kind, uid=uid, ran=True, since=now - begin, until=now - end)


def journals(job: Job) -> list[Path]:
    """The journal of a job, where it is there; a later job may have given the image another name in its folder."""
    image = Image.every.get(pk=job.target_id)
    folder = Path(bytes(image.path_bytes).decode()).parent
    return [path for path in [folder / f".sa-{job.uid}.journal"] if path.exists()]
