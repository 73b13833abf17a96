"""What every rewrite of an image leaves on rows: the new file's identity, the undo copy, what was freed."""

import contextlib
import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db.models import Sum
from django.utils import timezone

from images import writing
from images.models import Image
from storage_admin.accounts.roles import SYSTEM
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job


def image_replaced(image: Image, result: Mapping[str, Any]) -> None:
    """The file under the image's name is another one now. The scan that follows reads the rest of its facts."""
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
    writing.write_totals([image.pool])


def keep_undo(job: Job, held_bytes: int, window: timedelta) -> None:
    """The original waits as an undo copy of that many bytes until its window closes; none where it holds nothing."""
    if not held_bytes:
        return
    Job.objects.filter(pk=job.pk).update(
        undo_state=Job.UndoState.AVAILABLE, undo_expires=timezone.now() + window, undo_bytes=held_bytes
    )
    image = Image.objects.filter(pk=job.target_id).first()
    if image is not None:
        write_undo_bytes(image.pool)


def close_undo(job: Job, state: str, freed_bytes: int) -> None:
    """A job's undo copy is gone: ``freed_bytes`` is what its work has won in the end."""
    result = dict(job.result or {})
    if result:
        result |= {"held_bytes": 0, "freed_bytes": freed_bytes, "freed_at": timezone.now().isoformat()}
    Job.objects.filter(pk=job.pk).update(undo_state=state, undo_bytes=0, result=result or None)
    image = Image.objects.filter(pk=job.target_id).first()
    if image is not None:
        write_undo_bytes(image.pool)


def write_undo_bytes(pool: StoragePool) -> None:
    """What the undo copies in a pool hold, by our jobs; the next scan counts the files themselves."""
    jobs = Job.objects.filter(
        undo_state=Job.UndoState.AVAILABLE, target_kind="image",
        target_id__in=Image.every.filter(pool=pool).values("pk"),
    )  # fmt: skip
    held = jobs.aggregate(held=Sum("undo_bytes"))["held"] or 0
    StoragePool.objects.filter(pk=pool.pk).update(undo_bytes=held)


def reserved_elsewhere(job: Job, image: Image) -> int:
    """Scratch space that other jobs at work on the same filesystem may still need, in bytes."""
    pools = StoragePool.objects.filter(host=image.host)
    same = pools.filter(fs_key=image.pool.fs_key) if image.pool.fs_key else pools.filter(pk=image.pool_id)
    others = Job.objects.filter(
        state=Job.State.RUNNING, rewrites=True, host=job.host_id, target_kind="image",
        target_id__in=Image.every.filter(pool__in=same).values("pk"),
    ).exclude(pk=job.pk)  # fmt: skip
    return sum(int(other.plan.get("scratch_bytes") or 0) for other in others)


def rescan(job: Job) -> None:
    """Has the host scanned after a rewrite, so that the image's facts are read from the image itself."""
    with contextlib.suppress(RefusedError):  # a host that is gone is scanned when it is back
        services.submit(SYSTEM, "scan", job.host_id, {})
