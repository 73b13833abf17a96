"""Whether another registered host that shares a storage has an image open right now: asked of its agent.

What another client of a network filesystem has not written to the server yet, nobody else can see, and over NFSv3 not
even that it has the file open. So each of them is asked, before the work and again before the swap.
"""

from images import refusals
from images.models import Image
from images.orphans import sharing
from storage_admin.agent.protocol import HostError, RefusedError, b64
from storage_admin.hosts import asking
from storage_admin.hosts.models import StoragePool


def refuse_used(image: Image) -> None:
    """Lets a rewrite go on where nobody has the image open on another host that shares its storage.

    Raises:
        RefusedError: ``image_in_use``; ``guests_unknown``, where one of these hosts cannot be asked. No host is named:
            it may not exist for whoever reads that.
    """
    path = bytes(image.path_bytes)
    asked: set[int] = set()
    for pair in sharing.shared(image.host):
        if pair.pool.pk == image.pool_id and path.startswith(pair.after) and pair.other.host_id not in asked:
            asked.add(pair.other.host_id)
            _ask(pair.other, pair.before + path[len(pair.after) :], image)


def _ask(pool: StoragePool, path: bytes, image: Image) -> None:
    try:
        if without := refusals.without_agent(pool.host):
            raise RefusedError(without[0].code, without[0].detail)
        told = asking.ask(pool.host, "users", {"path_b64": b64(path), "pool_path_b64": b64(bytes(pool.path_bytes))})
    except (HostError, RefusedError) as error:
        raise RefusedError(
            "guests_unknown",
            f"Another registered host shares the storage of {image.name} and could not be asked who uses the image "
            f"there ({error.code}). Scan that host and try again.",
        ) from error
    if told["who"] is not None:
        raise RefusedError(
            "image_in_use",
            f"{image.name} is open on another host that shares its storage. Shut down what uses it there and try "
            "again.",
        )
    if str(told["inode"]) != image.inode:
        raise RefusedError(
            "stale_plan",
            f"Another host that shares the storage of {image.name} finds another file there. Scan both and try again.",
        )
