"""What every rewrite of an image leaves on rows: the new file's path and identity, the undo copy, the ledger's line.

Nothing else writes a job's line of the ledger. That is done in the transaction that writes the job's result. A line
says what the job itself did to the space of its filesystem, to the byte: ``st_blocks``, and of blocks that files share
(reflinks) what the filesystem gave or got back:

- before and after: what the image occupied; of a new file beside an image, 0 and what the new file occupies;
- freed: before less after, once that is so for good. As long as an undo copy waits it is 0: the filesystem holds both
  files then, and nothing was won. What was undone has freed 0 for ever.

So the sum of what was freed is the change of allocated space on the disks once no undo copy waits any more, whatever
guests wrote into their images meanwhile: that is no job's doing, and no line's.

Once a job has ended, the policies' runs are rung for at once, so that nothing waits for the scheduler.
"""

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Sum
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from images.models import Image, PolicyPick, PolicyRun
from images.rewrite import space
from storage_admin.accounts.models import SYSTEM, audit
from storage_admin.agent.protocol import unb64
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import display, path_key
from storage_admin.jobs import claims, routing
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


def limits(job: Job) -> dict[str, Any]:
    """How fast a job may go and what it has to leave free, as its agent is told of it."""
    return asdict(speed_for(job)) | space.limits(job)


def replaced(job: Job, image: Image, result: Mapping[str, Any]) -> dict[str, Any]:
    """A rewrite has ended well, and the agent tells so; what the job shows as its result."""
    before, after = result["before_bytes"], result["after_bytes"]
    held = result["swapped"] and result["undo"] is not None
    if result["swapped"]:
        name = result.get("name_b64")
        image_replaced(image, result, sibling(image, unb64(name)) if name else None)
    if held:
        keep_undo(job, result["held_bytes"], timedelta(hours=job.options["undo_hours"]))
        write_held_line(job, image.pool, before, after, result.get("made_bytes"))
    elif result["swapped"] or before != after:
        write_line(job, image.pool, before, after, freed=result["freed_bytes"])
    shown = {
        "before_bytes": before,
        "predicted_after_bytes": job.plan.get("predicted_after_bytes"),
        "after_bytes": after,
        "held_bytes": result["held_bytes"],
        "freed_bytes": result["freed_bytes"],
        "freed_at": timezone.now().isoformat() if result["swapped"] and not held else None,
        "method": result["method"],
        "seconds": result["seconds"],
        "swapped": result["swapped"],
    }
    return shown | {name: result[name] for name in ("compression", "found") if name in result}


def image_replaced(image: Image, result: Mapping[str, Any], path: bytes | None = None) -> None:
    """The file under the image's name is another one now. The scan that follows reads the rest of its facts.

    Args:
        result: ``dev``, ``inode`` and ``after_bytes``.
        path: its path, where the image may have another one now.
    """
    if path is not None:
        move(image, path)
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
    space.write_totals([image.pool])


def move(image: Image, path: bytes) -> None:
    """The image's file is at another path now.

    A row that a scan made of the file there meanwhile goes; one of an image that was there once, and is not any more,
    gets the path that becomes free, where it is as little.
    """
    before, key = bytes(image.path_bytes), path_key(path)
    if key == image.path_key:
        return
    with transaction.atomic():
        other = Image.every.select_for_update().filter(host=image.host_id, path_key=key).first()
        if other is not None and other.missing_since is None:
            other.delete()
            other = None
        if other is not None:
            Image.every.filter(pk=other.pk).update(path_key=f"moving {other.pk}")
        _write_path(image, path)
        if other is not None:
            _write_path(other, before)


def _write_path(image: Image, path: bytes) -> None:
    image.path_bytes, image.path_key, image.path = path, path_key(path), display(path)
    image.name = display(path.rpartition(b"/")[2])
    image.save(update_fields=["path_bytes", "path_key", "path", "name"])


def paths_of(job: Job) -> list[bytes]:
    """The paths between which a job moves its image; none where it does not."""
    return [unb64(job.kept[name]) for name in ("path_b64", "new_path_b64") if name in job.kept]


def path_left_by(job: Job, image: Image) -> bytes:
    """Where a job has left its image: a later one, as a conversion in its place, may have given it another name."""
    later = Job.objects.filter(
        target_kind="image", target_id=image.pk, state=Job.State.SUCCEEDED, finished__gt=job.finished,
        kept__has_key="path_b64",
    ).exclude(undo_state=Job.UndoState.UNDONE)  # fmt: skip
    first = later.order_by("finished", "pk").first()
    return bytes(image.path_bytes) if first is None else unb64(first.kept["path_b64"])


def sibling(image: Image, name: bytes) -> bytes:
    """The path of a file of that name in the image's folder."""
    return bytes(image.path_bytes).rpartition(b"/")[0] + b"/" + name


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
    close_line(job, freed_bytes, undone=state == Job.UndoState.UNDONE)
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
            why = f"{why}; it still exists as {kept.name}, so no space was freed"
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


def write_line(job: Job, pool: StoragePool | None, before: int, after: int, *, freed: int | None = None) -> None:
    """A job has changed space for good.

    Args:
        pool: where; ``None`` where nobody knows that any more.
        before, after: allocated bytes of what it worked on.
        freed: bytes, where that is not what is between the two.
    """
    freed = before - after if freed is None else freed
    _write_line(job, pool, before_bytes=before, after_bytes=after, **_freed_columns(freed))


def write_held_line(job: Job, pool: StoragePool | None, before: int, after: int, made: int | None = None) -> None:
    """A job has put another file in an image's place, and the original waits as its undo copy: nothing is freed yet.

    Args:
        made: bytes that the filesystem gave for the new file, where that shares blocks with the original.
    """
    _write_line(job, pool, before_bytes=before, after_bytes=after, made_bytes=made, **_freed_columns(0, for_good=False))


def write_line_beside(job: Job, pool: StoragePool | None, made: int) -> None:
    """A job has made a new file of that many allocated bytes beside what there was: so much less is free."""
    _write_line(job, pool, planned_before=0, before_bytes=0, after_bytes=made, **_freed_columns(-made))


def close_line(job: Job, freed: int, *, undone: bool = False) -> None:
    """A job's undo copy does not wait any more, and this came of it in the end.

    Args:
        freed: bytes; 0 where the job was undone.
    """
    Job.objects.filter(pk=job.pk, freed_bytes__isnull=False).update(**_freed_columns(freed, for_good=not undone))


def begin_line_in_place(job: Job, before: int) -> None:
    """A running job is about to change an image where it stands: what that occupies, in bytes. It is no line yet."""
    job.ours().update(before_bytes=before)


def write_line_in_place(job: Job, pool: StoragePool | None, before: int, after: int, freed: int | None = None) -> None:
    """What a job has won in place, whatever its end will be; no line where that is nothing.

    Args:
        pool: where; ``None`` where nobody knows that any more.
        freed: bytes, where other files share some of what was let go of.
    """
    if before == after:
        Job.objects.filter(pk=job.pk, freed_bytes=None).update(before_bytes=None)
        return
    write_line(job, pool, before, after, freed=freed)


def _freed_columns(freed: int, *, for_good: bool = True) -> dict[str, Any]:
    now = timezone.now() if for_good else None
    return {"freed_bytes": freed, "freed_at": now, "freed_month": f"{now:%Y-%m}" if now else ""}


def _write_line(job: Job, pool: StoragePool | None, *, planned_before: int | None = None, **columns: Any) -> None:
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
