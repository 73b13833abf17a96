"""What is known before a scan, and goes to the agent with its request: which files need not be read again."""

from collections.abc import Iterable
from typing import Any

from django.db.models import F, Q, QuerySet, TextField
from django.db.models.functions import Cast

from images.models import Image
from storage_admin.agent.protocol import b64
from storage_admin.hosts.models import Host, StoragePool


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
