"""What job kinds on images share: the target, its locks, and its facts as the agent wants them."""

from abc import abstractmethod
from typing import Any, ClassVar

from django.utils.translation import gettext, gettext_noop

from images.models import Image
from images.rewrite import neighbours
from images.scan import look
from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import RefusedError, b64
from storage_admin.errors import NotFoundError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.kinds import JobKind, Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan


def find(image_id: int) -> Image:
    """The image with its host and pool.

    Raises:
        NotFoundError: there is none.
    """
    image = Image.objects.select_related("host", "pool").filter(pk=image_id).first()
    if image is None:
        raise NotFoundError(gettext("Image {image} does not exist.").format(image=image_id))
    return image


def ancestors(image: Image) -> list[Image]:
    """The images below this one as the database knows them now, its immediate base first.

    Raises:
        RefusedError: ``chain_cycle``; ``chain_broken``, where one of them is not listed any more.
    """
    return neighbours.fresh(image).below


def descendants(image: Image) -> list[Image]:
    """Every image that needs this one now, however far above; without the large columns."""
    return neighbours.fresh(image).above


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


def silent_storage(image_id: int) -> str:
    """The pool of an image, or of one below it, if it does not answer: as in "waits for …"; else empty."""
    image = Image.every.select_related("pool").filter(pk=image_id).first()
    try:
        pools = [image.pool, *(base.pool for base in ancestors(image))] if image is not None else []
    except RefusedError:  # the job's own request says so
        return ""
    away = next((pool for pool in pools if pool.state == StoragePool.SILENT), None)
    return f"the storage pool {away.name} to answer"[:200] if away is not None else ""


class ImageKind(JobKind):
    """A kind whose target is an image."""

    target = "image"
    #: Whether space is what it is for: an image's page offers it first, its plan says what is freed, known or not.
    frees_space: ClassVar[bool] = False

    def resolve(self, target_id: int) -> Target:
        image = find(target_id)
        return Target(kind="image", id=image.pk, host=image.host, label=image.name)

    def look(self, target_id: int, job: Job | None = None) -> None:
        look.at([find(target_id)], job)

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        return self.plan_for(actor, find(target_id), options)

    @abstractmethod
    def plan_for(self, actor: Actor, image: Image, options: dict[str, Any]) -> Plan:
        """What the job would do to an image whose row is fetched already, perhaps with those of others
        (:func:`images.rewrite.neighbours.share`).
        """


class RewriteKind(ImageKind):
    """A kind that replaces an image: alone on it, together with others on its ancestors."""

    rewrites = True
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("The image is the original or the finished result, never a mixture."),
            gettext_noop("This job did not replace the image, and removed what it had written."),
        ),
        "in_place": Unsuccessful(
            gettext_noop("What is read from the image is unchanged; some of its blocks of zeros may be freed."),
            gettext_noop("This job changed no byte that is read from the image."),
        ),
        "check": Unsuccessful(
            gettext_noop("This job only reads the image."), gettext_noop("This job only reads the image.")
        ),
    }

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:  # noqa: ARG002 (the same for all)
        image = find(target.id)
        shared = [lock for base in ancestors(image) for lock in locks_on(base, exclusive=False)]
        return [*locks_on(image, exclusive=True), *shared]

    def waits_for_storage(self, job: Job) -> str:
        return silent_storage(job.target_id)
