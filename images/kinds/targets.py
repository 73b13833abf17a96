"""What job kinds on images share: the target, its locks, and its facts as the agent wants them."""

from typing import Any

from images.models import Image
from storage_admin.agent.protocol import RefusedError, b64
from storage_admin.jobs.errors import NotFoundError
from storage_admin.jobs.kinds import JobKind, Lock, Target


def find(image_id: int) -> Image:
    """The image with its host and pool.

    Raises:
        NotFoundError: there is none.
    """
    image = Image.objects.select_related("host", "pool").filter(pk=image_id).first()
    if image is None:
        raise NotFoundError(f"There is no image {image_id}.")
    return image


def ancestors(image: Image) -> list[Image]:
    """The images below this one, its immediate base first.

    Raises:
        RefusedError: ``chain_cycle``.
    """
    below: list[Image] = []
    seen = {image.pk}
    step = image.backing_id
    while step is not None:
        if step in seen:
            raise RefusedError("chain_cycle", f"The chain of {image.name} comes back to itself.")
        seen.add(step)
        base = Image.objects.select_related("host", "pool").get(pk=step)
        below.append(base)
        step = base.backing_id
    return below


def descendants(image: Image) -> list[Image]:
    """Every image that needs this one, however far above."""
    above: list[Image] = []
    layer = [image.pk]
    while layer:
        overlays = Image.objects.filter(backing__in=layer).exclude(pk__in=[known.pk for known in above])
        found = list(overlays.select_related("host", "pool").order_by("name", "pk"))
        above += found
        layer = [overlay.pk for overlay in found]
    return above


def locks_on(image: Image, *, exclusive: bool) -> list[Lock]:
    """What is locked of an image: the file itself, by whatever path it is reached, and its row, whatever file that is
    by the time the job runs.
    """
    keys = (f"inode:{image.host_id}:{image.dev}:{image.inode}", f"image:{image.pk}")
    return [Lock(key, exclusive=exclusive) for key in keys]


def facts(image: Image) -> dict[str, Any]:
    """The image as the plan saw it; the agent refuses when it finds another one."""
    return {
        "path_b64": b64(bytes(image.path_bytes)),
        "pool_path_b64": b64(bytes(image.pool.path_bytes)),
        "format": image.declared_format,
        "dev": int(image.dev),
        "inode": int(image.inode),
        "file_size": image.file_size,
        "mtime_ns": image.mtime_ns,
        "ctime_ns": image.ctime_ns,
    }


class ImageKind(JobKind):
    """A kind whose target is an image."""

    target = "image"

    def resolve(self, target_id: int) -> Target:
        image = find(target_id)
        return Target(kind="image", id=image.pk, host=image.host, label=image.name)


class RewriteKind(ImageKind):
    """A kind that replaces an image: alone on it, together with others on its ancestors."""

    rewrites = True

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:  # noqa: ARG002 (the same for all)
        image = find(target.id)
        shared = [lock for base in ancestors(image) for lock in locks_on(base, exclusive=False)]
        return [*locks_on(image, exclusive=True), *shared]
