"""Rewrites and scans that do not come further. They are told of and nothing else: a time limit would end one in the
middle of a rename as well.

Undo copies that stay after their windows because they may be the last good copies, and a clock that was set.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from django.db.models import Q

from images.rewrite import holding
from images.rewrite.record import speed_for
from storage_admin.events import services as events
from storage_admin.events.services import Trouble
from storage_admin.jobs.models import Elapsed, Job
from storage_admin.words import size

#: A scan tells of images as it finds them, a sample of every image, and a recovery takes moments; one of them that says
#: nothing stands before a disk that answers no more.
JUDGED = Q(rewrites=True) | Q(kind__in=("scan", "sample", "recover"))
#: A rewrite that has not come further for so long may be stuck. Some of its work has no progress to tell, and seldom
#: takes longer: a new file is flushed to its disk; ``qemu-img check`` reads an image's metadata, which of 10 TiB in
#: clusters of 64 KiB is 1.6 GiB, or 27 minutes at 1 MiB a second.
PATIENCE = timedelta(minutes=30)
#: How much of a stage's bytes is read from one word of ``qemu-img`` to the next: it tells of each 2 % at most, and a
#: comparison reads two images.
STEP = 2 * 0.02
#: What a disk is taken to read and write at least, in bytes a second, unless the job is limited to less.
SLOW = 20 << 20
#: So many undo copies have an alert each; the page of each pool lists all.
EACH = 100


def stalled(now: datetime) -> Iterator[Trouble]:
    """Jobs at work that have not come further for long. One that waits, for a guest or a slot, is queued."""
    at_work = Job.objects.filter(JUDGED, state=Job.State.RUNNING).select_related("host").order_by("pk")
    for job in at_work.defer("plan", "commands", "result", "kept", "host__capabilities"):
        since = job.progressed or job.started
        if since is not None and now - since >= patience(job):
            yield Trouble(
                f"{events.JOB_STALLED}:{job.pk}", "warning", f"{job} makes no progress",
                f"No progress since {since:%Y-%m-%d %H:%M} UTC: {_place(job)}. See the job log for what it is "
                "doing. The disk may no longer answer, or other work may slow the job down. The job is not stopped "
                "automatically. It can be cancelled safely at any stage.",
                job.host.slug, "job", job.pk, str(job),
            )  # fmt: skip


def patience(job: Job) -> timedelta:
    """For how long a job may say nothing new: longer where a large image is read slowly."""
    speed = min(speed_for(job).bandwidth_bytes_sec or SLOW, SLOW)
    return PATIENCE + timedelta(seconds=STEP * (job.total_bytes or 0) / speed)


def _place(job: Job) -> str:
    far = (
        f", {size(job.done_bytes)} of {size(job.total_bytes)}" if job.done_bytes is not None and job.total_bytes else ""
    )
    return f'at "{job.stage}"{far}, {int(job.progress)} % in total'


def undo_kept() -> Iterator[Trouble]:
    """Undo copies of which nobody but a user can say that they are not needed."""
    for job, why in holding.kept(EACH):
        name = job.target_label
        yield Trouble(
            f"{events.UNDO_KEPT}:{job.pk}", "warning", f"The undo copy of {name} may be the last good copy",
            f"{why} It holds {size(job.undo_bytes)}. An admin can undo job {job.pk}, or force the removal on its page.",
            job.host.slug, "job", job.pk, str(job),
        )  # fmt: skip


def clock_changed() -> Iterator[Trouble]:
    """This machine's clock was set while it ran."""
    if step := Elapsed.clock_jump():
        yield Trouble(
            events.CLOCK_JUMPED, "danger", f"The dashboard's clock was changed by {step:+,.0f} s",
            f"Nothing expires until the clock is right again, or has been stable for {Elapsed.SETTLED / 3600:.0f} "
            "hours. Check the time service of the dashboard's machine.",
        )  # fmt: skip
