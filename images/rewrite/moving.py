"""An image's row follows its file to another name, with all that is known of it."""

from django.db import transaction

from images.models import Image
from storage_admin.agent.protocol import unb64
from storage_admin.hosts.names import display, path_key
from storage_admin.jobs.models import Job


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
        _write(image, path)
        if other is not None:
            _write(other, before)


def _write(image: Image, path: bytes) -> None:
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
