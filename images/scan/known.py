"""What the database knows when a scan asks and tells: which files need not be read again, whose jobs' files lie there.

Files beside images that jobs of another dashboard left are *leftovers*: this one's database does not know those jobs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.db.models import F, Q, QuerySet, TextField
from django.db.models.functions import Cast

from images.models import Image
from storage_admin.agent.protocol import b64, unb64
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import display, path_key
from storage_admin.jobs.models import Job


def known_fingerprints(pool: StoragePool) -> str:
    """The fingerprints of a pool's images as they travel: 16 bytes each."""
    return _fingerprints(Image.every.filter(pool=pool, missing_since=None, aside_since=None))


def linked_fingerprints(pool: StoragePool) -> str:
    """Of those only what is known to need which image: what a scan at work has read, or one that died, is not yet.

    Neither is what could not be read, what describes its base instead of naming it, and what reaches another file by
    a path that may lead elsewhere by now: its base by a link, its data in files of their own.
    """
    known = Image.objects.filter(pool=pool, missing_since=None, aside_since=None, backing_unsafe="", unreadable="")
    known = known.filter(Q(backing_key="") | Q(backing__path_key=F("backing_key")))
    known = known.annotate(text=Cast("header", TextField())).exclude(text__contains='"data_file"')
    known = known.exclude(text__contains='"extents"')
    return _fingerprints(known.filter(changed_scan__lte=pool.host.resolved_scan))


def _fingerprints(rows: QuerySet[Image]) -> str:
    known: Iterable[Any] = rows.order_by().values_list("fingerprint", flat=True)
    return b64(b"".join(map(bytes, known)))


def probe_paths(host: Host) -> list[bytes]:
    """Paths of bases that are no images of ours by that path: what is there is asked at every scan."""
    paths = standing_on_others(host.pk).order_by("pk").values_list("backing_path_bytes", flat=True)
    return sorted({bytes(path) for path in paths[:5000]})


def standing_on_others(host_id: int) -> QuerySet[Image]:
    """Images whose base is none of ours, or is reached by another path than we list it under."""
    named = Image.every.filter(host=host_id, backing_unsafe="").exclude(backing_key="")
    return named.exclude(backing__path_key=F("backing_key"))


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


def leftovers_of(pool: StoragePool) -> list[Leftover]:
    """What the last scan found in a pool, the largest first."""
    rows = [_leftover(one) for one in pool.leftovers]
    return sorted(rows, key=lambda one: (-one.held_bytes, one.job))


def find_leftover(pool: StoragePool, job: str) -> Leftover | None:
    """What that job left in the pool."""
    return next((one for one in leftovers_of(pool) if one.job == job), None)


def image_of(pool: StoragePool, left: Leftover) -> Image | None:
    """The image that is there now, where the last scan has listed it."""
    if left.path is None:
        return None
    rows = Image.objects.select_related("host", "pool").exclude(state__in=Image.NOT_THERE)
    return rows.filter(host=pool.host_id, path_key=path_key(left.path)).first()


def _leftover(one: dict[str, Any]) -> Leftover:
    folder = unb64(one["folder_b64"])
    path = folder.rstrip(b"/") + b"/" + unb64(one["name_b64"]) if one.get("name_b64") else None
    return Leftover(str(one["job"]), folder, path, tuple(one["kinds"]), int(one["bytes"]))
