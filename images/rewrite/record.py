"""What every rewrite of an image leaves on rows: the new file's identity, the undo copy, what was freed.

Once a job has ended, the policies' runs are rung for at once, so that nothing waits for the scheduler.
"""

import contextlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Sum
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from images.ledger import lines
from images.models import Image, PolicyPick, PolicyRun
from images.rewrite import moving
from images.scan import bulk_write
from storage_admin.accounts.models import SYSTEM
from storage_admin.accounts.services import audit
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import claims, routing, services
from storage_admin.jobs.models import Elapsed, Job, JobLog

#: The options of a rewriting job that say how fast it may go. Null means: as its host says.
SPEED_OPTIONS: dict[str, dict[str, Any]] = {
    "bandwidth_bytes_sec": {
        "type": ["integer", "null"],
        "minimum": 1_048_576,
        "default": None,
        "description": _("Limit in bytes per second; null for the host default, which may be no limit."),
    },
    "idle_io": {
        "type": ["boolean", "null"],
        "default": None,
        "description": _("Idle I/O priority; null for the host default, which is on initially."),
    },
}


@dataclass(frozen=True)
class Speed:
    """How fast a job may go.

    Args:
        bandwidth_bytes_sec: at most so many bytes a second; ``None`` for no limit.
        idle_io: whether it only uses the disk when nobody else does.
    """

    bandwidth_bytes_sec: int | None
    idle_io: bool


def speed_for(job: Job) -> Speed:
    """How fast a job may go: as its options say, and where they do not, as its host says."""
    bandwidth, idle_io = job.options.get("bandwidth_bytes_sec"), job.options.get("idle_io")
    return Speed(
        job.host.bandwidth_bytes_sec if bandwidth is None else bandwidth,
        job.host.idle_io if idle_io is None else idle_io,
    )


def image_replaced(image: Image, result: Mapping[str, Any], path: bytes | None = None) -> None:
    """The file under the image's name is another one now. The scan that follows reads the rest of its facts.

    Args:
        result: ``dev``, ``inode`` and ``after_bytes``.
        path: its path, where the image may have another one now.
    """
    if path is not None:
        moving.move(image, path)
    image.dev, image.inode = str(result["dev"]), str(result["inode"])
    image.allocated_size = result["after_bytes"]
    image.reclaimable_bytes = image.reclaimable_low = image.reclaimable_high = image.estimate = None
    image.reclaimable_method, image.analyzed_at = "", None
    # A fingerprint that no file has: the next scan reads the new file, or finds that this one has vanished.
    image.fingerprint = secrets.token_bytes(16)
    image.save(
        update_fields=[
            "dev", "inode", "allocated_size", "reclaimable_bytes", "reclaimable_low", "reclaimable_high", "estimate",
            "reclaimable_method", "analyzed_at", "fingerprint",
        ]
    )  # fmt: skip
    bulk_write.write_totals([image.pool])


def keep_undo(job: Job, held_bytes: int, window: timedelta) -> None:
    """The original waits as an undo copy of that many bytes until its window closes."""
    Job.objects.filter(pk=job.pk).update(
        undo_state=Job.UndoState.AVAILABLE, undo_expires=timezone.now() + window, undo_bytes=held_bytes,
        undo_due=Elapsed.now() + window.total_seconds(),
    )  # fmt: skip
    image = Image.objects.filter(pk=job.target_id).first()
    if image is not None:
        write_undo_bytes(image.pool)


def close_undo(job: Job, state: str, freed_bytes: int) -> None:
    """A job's undo copy is gone: ``freed_bytes`` is what its work has won in the end."""
    lines.close(job, freed_bytes, undone=state == Job.UndoState.UNDONE)
    result = dict(job.result or {})
    if result:
        result |= {"held_bytes": 0, "freed_bytes": freed_bytes, "freed_at": timezone.now().isoformat()}
    Job.objects.filter(pk=job.pk).update(undo_state=state, undo_bytes=0, result=result or None)
    image = Image.objects.filter(pk=job.target_id).first()
    if image is not None:
        write_undo_bytes(image.pool)


def note_ready(job: Job, ready: Mapping[str, Any]) -> None:
    """Keeps with a running job what its agent says of the files before it exchanges them.

    Where the worker dies and the agent leaves no trace, a recovery tells by the inode whether it came to that, and by
    the sizes what the job has won.

    Args:
        ready: ``before_bytes`` and ``made_bytes`` of the file that goes and the one that comes, ``made_inode`` of that;
            ``goes_shared`` and ``made_shared``: what other files have of them as well.
    """
    told = {name: ready[name] for name in ("before_bytes", "made_bytes", "made_inode")}
    told |= {name: ready.get(name, 0) for name in ("goes_shared", "made_shared")}
    job.kept = job.kept | {"ready": told}
    job.ours().update(kept=job.kept)


def won_bytes(job: Job, copy_bytes: int | None = None) -> int:
    """What a job has won once its undo copy is gone, in bytes: what that gives back, less what the new file took.

    Args:
        copy_bytes: what the filesystem got back; where nobody saw that, it is what the copy occupied.
    """
    return (job.undo_bytes if copy_bytes is None else copy_bytes) - made_bytes(job)


def made_bytes(job: Job) -> int:
    """What the filesystem gave for a job's new file: what that occupied, less what it shared with the original."""
    return int((job.result or {}).get("after_bytes") or 0) if job.made_bytes is None else job.made_bytes


def lives_on(job: Job, original: Mapping[str, Any] | None) -> Image | None:
    """An image that is the very file which a job's undo copy was: somebody has moved it instead of deleting it.

    It may be the job's own, where a later job has given that another name, and the file was put back under that one.

    Args:
        original: its stamp, ``None`` where nobody knows it any more.
    """
    if original is None:
        return None
    # The number of an inode is given again, but not together with the size and time of the file that had it.
    same = {"inode": str(original["inode"]), "file_size": original["file_size"], "mtime_ns": original["mtime_ns"]}
    return Image.objects.filter(host=job.host_id, missing_since=None, **same).first()


def undo_copy_lost(job: Job, why: str, *, found: Mapping[str, Any] | None = None, known: bool = True) -> bool:
    """Somebody else took a job's undo copy away: its row, its log and the audit trail say so, once.

    Args:
        why: what was found, as a sentence without its full stop.
        found: what the agent says of it. ``put_back``: it has the image's name again, so that the job was undone by
            hand, and nothing was won. ``original``: its stamp, where that is known: it may stand under another name.
        known: whether it is gone; else it may wait somewhere still, and nothing counts as won.

    Returns:
        ``False`` where no undo copy of it waited any more.
    """
    with transaction.atomic():
        waiting = Job.objects.select_for_update().filter(pk=job.pk, undo_state=Job.UndoState.AVAILABLE).first()
        if waiting is None:
            return False
        held = waiting.undo_bytes
        # A later job's new file may have got the inode's number that the deleted original left.
        later = Job.objects.filter(
            target_kind=waiting.target_kind, target_id=waiting.target_id, rewrites=True, pk__gt=waiting.pk
        )
        found = found or {}
        put_back = bool(found.get("put_back")) and (
            bool(found["surely_back"]) or not later.filter(state=Job.State.SUCCEEDED).exists()
        )
        kept = None if put_back else lives_on(waiting, found.get("original"))
        put_back = put_back or (kept is not None and kept.pk == waiting.target_id)
        state = Job.UndoState.UNDONE if put_back else Job.UndoState.MISSING
        if kept is not None and not put_back:
            why = f"{why}; it is kept as {kept.name}, so no space was freed"
        close_undo(waiting, state, won_bytes(waiting, 0 if kept else None) if known and not put_back else 0)
        if put_back and waiting.kept.get("volumes"):
            # Its VM names it as a flat image, and it is a linked clone again (images.rewrite.linked_clones).
            Job.objects.filter(pk=waiting.pk).update(repoint_due=True)
        claims.log(waiting, f"{why}: this job can no longer be undone", JobLog.Level.WARNING)
        what = "undo copy restored by somebody else" if put_back else "undo copy missing"
        audit(SYSTEM, what, waiting.target_label, before={"job": job.pk, "undo_bytes": held}, after={"found": why})
    return True


def write_undo_bytes(pool: StoragePool) -> None:
    """What the undo copies in a pool hold, by our jobs; the next scan counts the files themselves."""
    jobs = Job.objects.filter(
        undo_state=Job.UndoState.AVAILABLE, target_kind="image",
        target_id__in=Image.every.filter(pool=pool).values("pk"),
    )  # fmt: skip
    held = jobs.aggregate(held=Sum("undo_bytes"))["held"] or 0
    StoragePool.objects.filter(pk=pool.pk).update(undo_bytes=held)


def rescan(job: Job) -> None:
    """Has the host scanned after a rewrite, so that the image's facts are read from the image itself."""
    with contextlib.suppress(RefusedError):  # a host that is gone is scanned when it is back
        services.submit(SYSTEM, "scan", job.host_id, {})


POLICIES_STEP = "images.tasks.advance_policies"


def ring_policies() -> None:
    """Asks for a step once what was written is committed. If nobody hears, the scheduler asks within seconds."""
    transaction.on_commit(_ring_policies)


def ring_policies_after(job: Job) -> None:
    """Asks for a step when a job has ended that a run waits for: its place is free for the next one."""
    if PolicyPick.objects.filter(job=job, run__state=PolicyRun.State.RUNNING).exists():
        _ring_policies()


def _ring_policies() -> None:
    routing.send("the policies' next step", POLICIES_STEP)
