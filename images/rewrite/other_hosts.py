"""Whether another registered host that shares a storage has an image open right now: asked of its agent.

What another client of a network filesystem has not written to the server yet, nobody else can see, and over NFSv3 not
even that it has the file open. So each of them is asked: before the work, before the swap, and right after the files
were exchanged, when both are still there.
"""

from collections.abc import Iterator
from typing import Any

from django.utils.translation import gettext as _

from images.models import Image
from images.orphans import sharing
from images.rewrite import refusals
from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.hosts import asking
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job


def asked(image: Image) -> dict[str, bool]:
    """What the agent is told of it."""
    return {"shared": any(_others(image))}


def refuse_used(image: Image, *, named: bool = True) -> None:
    """Lets a job go on where nobody has the image open on another host that shares its storage.

    Args:
        named: whether its file has its name; that of one that is set aside has another, and is asked for by its inode.

    Raises:
        RefusedError: ``image_in_use``; ``stale_plan``; ``guests_unknown``, where one of these hosts cannot be asked. No
            host is named: it may not exist for whoever reads that.
    """
    for pool, path in _others(image):
        told = _ask(pool, path, image, [int(image.inode)])
        if told["used"]:
            raise _used(image, _("Shut down what uses it there and try again."))
        if named and told["inode"] != int(image.inode):
            raise RefusedError(
                "stale_plan",
                _(
                    "Another host that shares the storage of {image} finds another file there. Scan both and try again."
                ).format(image=image.name),
            )


def look_again(job: Job, image: Image) -> None:
    """Lets a job end where nobody there has found the file that goes, after it was exchanged for the one that comes.

    Raises:
        RefusedError: ``image_in_use``, where somebody has it open: it has to get its name back. ``guests_unknown``,
            where a host cannot be asked, still finds that file by its name, or has both files open.
    """
    went, came = int(image.inode), int(job.kept["ready"]["made_inode"])
    used: set[int] = set()
    for pool, path in _others(image):
        told = _ask(pool, path, image, [went, came])
        used.update(told["used"])
        if told["inode"] == went:
            raise RefusedError(
                "guests_unknown", _("Another host still finds the former file of {image}.").format(image=image.name)
            )
    if used >= {went, came}:
        raise RefusedError(
            "guests_unknown",
            _("Both files of {image} are open on hosts that share its storage.").format(image=image.name),
        )
    if went in used:
        raise _used(image, _("It was opened during the swap."))


def _others(image: Image) -> Iterator[tuple[StoragePool, bytes]]:
    """The pool of each other host that shows the image, and the path that it has there."""
    path, found = bytes(image.path_bytes), set()
    for pair in sharing.shared(image.host):
        if pair.pool.pk == image.pool_id and path.startswith(pair.after) and pair.other.host_id not in found:
            found.add(pair.other.host_id)
            yield pair.other, pair.before + path[len(pair.after) :]


def _ask(pool: StoragePool, path: bytes, image: Image, inodes: list[int]) -> dict[str, Any]:
    try:
        if without := refusals.without_agent(pool.host):
            raise RefusedError(without[0].code, without[0].detail)
        args = {"path_b64": b64(path), "pool_path_b64": b64(bytes(pool.path_bytes)), "inodes": inodes}
        return asking.ask(pool.host, "users", args)
    except (HostError, RefusedError) as error:
        raise RefusedError(
            "guests_unknown",
            _(
                "Another registered host shares the storage of {image} and did not report who uses the image ({code}). "
                "Scan that host and try again."
            ).format(image=image.name, code=error.code),
        ) from error


def _used(image: Image, what: str) -> RefusedError:
    return RefusedError("image_in_use", f"{image.name} is open on another host that shares its storage. {what}")
