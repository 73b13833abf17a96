"""Files beside images that jobs of another dashboard left: this one's database does not know those jobs."""

from dataclasses import dataclass
from typing import Any

from images.models import Image
from storage_admin.agent.protocol import unb64
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.names import display, path_key
from storage_admin.jobs.models import Job


@dataclass(frozen=True)
class Leftover:
    """What a job left in a pool.

    Args:
        job: its name in the files' names.
        path: of the image that its journal is about; ``None`` where none says.
        kinds: ``journal``, ``new``, ``orig`` or ``aside``.
        held_bytes: what the files occupy, and so keep from being free.
    """

    job: str
    folder: bytes
    path: bytes | None
    kinds: tuple[str, ...]
    held_bytes: int

    @property
    def shown(self) -> str:
        """The image, or the folder where it is not known."""
        return display(self.path if self.path is not None else self.folder)

    @property
    def has_copy(self) -> bool:
        """Whether it is an undo copy that can be restored or removed."""
        return self.path is not None and {"journal", "orig"} <= set(self.kinds)


def of_strangers(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what a scan was told of jobs' files, that of jobs which the database does not know."""
    known = set(Job.objects.filter(uid__in=[one["job"] for one in told]).values_list("uid", flat=True))
    return [one for one in told if one["job"] not in known]


def of_pool(pool: StoragePool) -> list[Leftover]:
    """What the last scan found in a pool, the largest first."""
    rows = [_row(one) for one in pool.leftovers]
    return sorted(rows, key=lambda one: (-one.held_bytes, one.job))


def find(pool: StoragePool, job: str) -> Leftover | None:
    """What that job left in the pool."""
    return next((one for one in of_pool(pool) if one.job == job), None)


def image_of(pool: StoragePool, left: Leftover) -> Image | None:
    """The image that is there now, where the last scan has listed it."""
    if left.path is None:
        return None
    rows = Image.objects.select_related("host", "pool").exclude(state__in=Image.NOT_THERE)
    return rows.filter(host=pool.host_id, path_key=path_key(left.path)).first()


def _row(one: dict[str, Any]) -> Leftover:
    folder = unb64(one["folder_b64"])
    path = folder.rstrip(b"/") + b"/" + unb64(one["name_b64"]) if one.get("name_b64") else None
    return Leftover(str(one["job"]), folder, path, tuple(one["kinds"]), int(one["bytes"]))
