"""What a recovery found of images that are set aside: rows and jobs say what the names and journals on the host say."""

from typing import Any

from django.db.models import Q, QuerySet

from images.kinds import aside
from images.models import Image
from images.orphans import rows
from images.rewrite import record
from storage_admin.accounts.models import SYSTEM, audit
from storage_admin.jobs import claims
from storage_admin.jobs.claims import tell_end
from storage_admin.jobs.models import Job, JobLog


def settle(recovery: Job, lost: Job, found: dict[str, Any]) -> bool:
    """Writes what became of one job of :data:`images.orphans.rows.KINDS`.

    Args:
        recovery: the job that found it.
        lost: the job that the agent names; it has ended.
        found: the agent's row.

    Returns:
        Whether an image's file is elsewhere than its row said.
    """
    image = Image.every.select_related("host", "pool", "aside_job").filter(pk=lost.target_id).first()
    if image is None:
        return False
    if found["undo_of"] is not None:
        return _settle_later(lost, image, found)
    if found["outcome"] == "kept":
        return _settle_kept(recovery, lost, image, found)
    if found["outcome"] == "reverted" and lost.needs_recovery:
        claims.log(lost, "recovered: the image has its original name and was not set aside")
    if found["outcome"] == "lost" and image.aside_job_id == lost.pk and image.state == Image.State.SET_ASIDE:
        return _settle_lost(recovery, lost, image, found)
    return False


def _settle_kept(recovery: Job, lost: Job, image: Image, found: dict[str, Any]) -> bool:
    """The image waits under its other name: the job has succeeded, whether somebody could write that down or not."""
    if image.state == Image.State.SET_ASIDE:
        return False
    if lost.state == Job.State.SUCCEEDED:
        return image.state in Image.NOT_THERE and _settle_found_again(recovery, lost, image)
    rows.set_aside(image, lost)
    _succeed(lost, aside.aside_result(rows.taken(image, found["undo_bytes"]), None))
    claims.log(lost, "recovered: the image was already set aside; the job has succeeded")
    return True


def _settle_found_again(recovery: Job, lost: Job, image: Image) -> bool:
    """It was taken for gone, as on a filesystem that was not mounted, and waits there after all."""
    if _is_at_work(recovery, lost, image):
        return False
    audit(SYSTEM, "image set aside found again", image.path, after={"job": lost.pk})
    rows.set_aside(image, lost)
    result = (lost.result or {}) | {"held_bytes": image.allocated_size or 0}
    Job.objects.filter(pk=lost.pk).update(result=result)
    claims.log(lost, "the missing image was found where it was set aside; its grace period starts again")
    return True


def _is_at_work(recovery: Job, lost: Job, image: Image) -> bool:
    """Whether a later job was at the image while the agent looked: its own end tells what it did."""
    ended_since = Q(finished__gte=recovery.started or recovery.created, needs_recovery=False)
    return _later(lost, image).filter(Q(state__in=Job.ACTIVE) | ended_since).exists()


def _later(lost: Job, image: Image) -> QuerySet[Job]:
    return Job.objects.filter(target_kind="image", target_id=image.pk, kind__in=rows.KINDS, pk__gt=lost.pk)


def _settle_later(later: Job, image: Image, found: dict[str, Any]) -> bool:
    """A restore or a deletion that was cut off."""
    if found["outcome"] != "finished":
        claims.log(later, "recovered: nothing had been changed; the image is still set aside")
        return False
    if image.state != Image.State.SET_ASIDE:
        return False
    _finish(later, image, found)
    return True


def _finish(later: Job, image: Image, found: dict[str, Any]) -> None:
    size = image.allocated_size or 0
    if later.kind == "restore_aside":
        rows.restored(image)
        _succeed(later, aside.aside_result(size, None) | {"held_bytes": 0})
    else:
        rows.deleted(image)
        # Nobody has counted what a volume gave back: no more than what it had alone, where that is known.
        freed = image.own_bytes if found["discarded_bytes"] is None else found["discarded_bytes"]
        _succeed(later, aside.deletion_result(size, freed, None))
        if freed is not None:
            record.write_line(later, image.pool, size, 0, freed=freed)
    claims.log(later, "recovered: the change was already done; the job has succeeded")


def _succeed(job: Job, result: dict[str, Any]) -> None:
    Job.objects.filter(pk=job.pk).update(
        state=Job.State.SUCCEEDED, error_code="", error_detail="", progress=100.0, stage="", message="",
        result=result | {"recovered": True},
    )  # fmt: skip
    tell_end(job.pk)


def _settle_lost(recovery: Job, lost: Job, image: Image, found: dict[str, Any]) -> bool:
    """The file does not wait where it should: our own work was cut off at its very end, or somebody else took it."""
    if _is_at_work(recovery, lost, image):
        return False
    is_back = found["inode"] is not None and str(found["inode"]) == image.inode
    cut_off = _later(lost, image).filter(needs_recovery=True).exclude(state__in=Job.ACTIVE).order_by("-pk").first()
    if cut_off is not None and (is_back if cut_off.kind == "restore_aside" else not is_back):
        _finish(cut_off, image, found)
        return True
    if found["before_bytes"] is None and not is_back and image.pool.state != "ok":
        return False  # perhaps only a filesystem that is not mounted
    what = "restored by someone else" if is_back else "missing"
    audit(SYSTEM, f"image set aside {what}", image.path, before={"job": lost.pk}, after={"found": found["detail"]})
    claims.log(lost, f"{found['detail'] or 'the image is no longer set aside'}: {what}", JobLog.Level.WARNING)
    if is_back:
        rows.restored(image)
    else:
        rows.vanished(image)
    return True
