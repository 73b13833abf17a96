"""Events of a scan as an agent would send them, made of what hypervisors and backends tell."""

import json
from hashlib import blake2b
from typing import Any

from images.models import Image
from images.scan.rows import stand_in
from storage_admin.agent.protocol import b64
from storage_admin.agent.scan.records import FINGERPRINT_SIZE
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import raw

Event = dict[str, Any]


class Places:
    """What all pools of one scan of a host share."""

    def __init__(self, host: Host) -> None:
        self.host = host
        known = Image.every.filter(host=host, missing_since=None)
        #: Keys of the paths that images lie at, so far as anybody knows.
        self.paths = set(known.values_list("path_key", flat=True))
        self._listed = set[str]()

    def is_first(self, path: str) -> bool:
        """Whether no pool before had a volume there: two pools may list one device, or be one folder."""
        first = path not in self._listed
        self._listed.add(path)
        return first


def pool_event(row: StoragePool, **told: Any) -> Event:
    """The event of a pool, in which nothing is, and nothing is wrong, unless that is told."""
    return {
        "event": "pool", "id": row.pk, "state": "ok", "detail": "", "images": 0, "others": {"count": 0, "bytes": 0},
        "undo_bytes": 0, "undo_copies": 0, "leftovers": 0, "vanished_b64": "",
    } | told  # fmt: skip


def as_last_seen(row: StoragePool, detail: str) -> Event:
    """The event of a pool that nobody told of: its row stays as it is."""
    kept = ("filesystem", "network", "shared_key", "fs_key", "undo_bytes", "owners_unknown", "volume_facts")
    return pool_event(
        row, state="unreadable", detail=detail, kind=str(row.kind), images=row.images_count,
        others={"count": row.others_count, "bytes": row.others_bytes}, **{name: getattr(row, name) for name in kept},
    )  # fmt: skip


def image_event(row: StoragePool, path: str, known_by: object, **told: Any) -> Event:
    """The event of an image.

    Args:
        known_by: all by which it is seen that the image has changed.
        told: of it. Where nobody tells device and inode, these stand for the path alone, so that no two volumes look
            like one file.
    """
    written = json.dumps(known_by, sort_keys=True).encode()
    return {
        "event": "image", "pool": row.pk, "path_b64": b64(raw(path)),
        "fp": blake2b(written, digest_size=FINGERPRINT_SIZE).hexdigest(),
        "dev": "", "inode": stand_in(raw(path)), "nlink": 1, "mtime_ns": 0, "ctime_ns": 0, "file_size": None,
        "encrypted": None,
    } | told  # fmt: skip


def is_new(image: Event, known: set[bytes]) -> bool:
    """Whether none of the known fingerprints is that of an image; one that is, is taken out: the others are gone."""
    fingerprint = bytes.fromhex(image["fp"])
    if fingerprint not in known:
        return True
    known.remove(fingerprint)
    return False
