"""What becomes of an image's row, and of the job that set it aside, when it is set aside, restored or deleted."""

import secrets
from datetime import timedelta
from typing import Any

from django.db.models import Count, Sum
from django.utils import timezone

from images.models import Image
from images.rewrite import space
from images.scan import bulk_write
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import path_key
from storage_admin.jobs.models import Job

#: How long an image that is set aside cannot be deleted where nobody says otherwise.
GRACE_DAYS = 14
#: The kinds of jobs that do it.
KINDS = ("set_aside", "restore_aside", "delete_aside")


def set_aside(image: Image, job: Job) -> None:
    """The image has its other name. Its row keeps what it is called; the key of its path is that of the other name, so
    that a file which takes its place is another image.
    """
    now = timezone.now()
    folder = bytes(image.path_bytes).rpartition(b"/")[0]
    _write(
        image, path_key=path_key(folder + f"/.sa-{job.uid}.aside".encode()), aside_job=job, aside_since=now,
        aside_until=now + timedelta(days=int(job.options.get("grace_days", GRACE_DAYS))), aside_by=job.created_by,
        missing_since=None, deleted_at=None, held="",
    )  # fmt: skip


def restored(image: Image) -> None:
    """The image has its own name again. A row of a file that had the name meanwhile, and is gone, goes."""
    key = path_key(bytes(image.path_bytes))
    Image.every.filter(host=image.host_id, path_key=key).exclude(pk=image.pk).delete()
    _close(image)
    aside = {"aside_job": None, "aside_since": None, "aside_until": None, "aside_by": ""}
    _write(image, path_key=key, missing_since=None, deleted_at=None, **aside)


def deleted(image: Image) -> None:
    """The image is gone for good, by an admin's word; its row and its history stay."""
    _close(image)
    now = timezone.now()
    _write(image, deleted_at=now, missing_since=now, aside_since=None, aside_until=None)


def vanished(image: Image) -> None:
    """Somebody else took the image away while it was set aside: it has vanished like any other."""
    _close(image)
    aside = {"aside_job": None, "aside_since": None, "aside_until": None, "aside_by": ""}
    _write(image, missing_since=timezone.now(), **aside)


def _write(image: Image, **columns: Any) -> None:
    # A fingerprint that no file has: a scan that is at work takes it neither for vanished nor for unchanged.
    columns["fingerprint"] = secrets.token_bytes(16)
    for name, value in columns.items():
        setattr(image, name, value)
    image.save(update_fields=list(columns))
    bulk_write.resolve_host(image.host)
    space.write_totals([image.pool])
    image.refresh_from_db()


def _close(image: Image) -> None:
    """The job that set it aside holds nothing any more; what was freed, the deletion says."""
    job = image.aside_job
    if job is not None and job.result:
        Job.objects.filter(pk=job.pk).update(result=job.result | {"held_bytes": 0})


def taken(image: Image, told: int) -> int:
    """What an image takes, in bytes.

    Args:
        told: by the agent, which says 0 of a volume of which nobody tells, as of a thin one that is inactive: then what
            a scan has seen counts.
    """
    return told or image.allocated_size or 0 if image.volume else told


def bytes_aside(pools: list[StoragePool]) -> dict[int, tuple[int, int | None]]:
    """How many images are set aside in each pool, and the bytes that they occupy, ``None`` where of one of them nobody
    tells; pools without any are left out.
    """
    rows = Image.objects.filter(pool__in=pools, aside_since__isnull=False).order_by().values_list("pool_id")
    found = rows.annotate(Count("id"), Count("allocated_size"), Sum("allocated_size"))
    return {pool: (count, size if measured == count else None) for pool, count, measured, size in found}
