"""One record of a scan as one row, written without making objects of it.

Ten thousand model instances cost more than all the rest of a first scan, so rows go to the database as tuples; what a
column means is said in :class:`images.models.Image`.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from django.db import connection

from images.models import Image
from storage_admin.agent.protocol import unb64
from storage_admin.hosts.names import display, path_key

#: Columns that a scan writes, also anew when it meets a path that it knows.
SCANNED = (
    "pool_id", "path", "name", "path_bytes", "fingerprint", "dev", "inode", "nlink", "mtime_ns", "ctime_ns",
    "file_size", "allocated_size", "exclusive_bytes", "snapshot_bytes", "reservation_bytes", "virtual_size", "format",
    "cluster_size", "compression", "preallocation",
    "encrypted", "header", "snapshots", "backing_file", "backing_format", "backing_key", "backing_path",
    "backing_path_bytes", "backing_found", "backing_unsafe", "unreadable", "seen", "missing_since", "changed_scan",
)  # fmt: skip
#: Columns of a new row that a scan does not fill: they start as here, until links are resolved.
STARTING: dict[str, Any] = {
    "declared_format": "", "declared_by": "", "admin_format": "", "chain_depth": 1, "overlays_count": 0,
    "in_use_detail": "", "held": "", "orphan_evidence": "[]", "state_detail": "", "reclaimable_method": "",
    "analyzed_fingerprint": b"", "listed": False, "state": str(Image.State.OK),
}  # fmt: skip
#: Header facts that have no column of their own.
HEADER = (
    "compat", "refcount_bits", "lazy_refcounts", "extended_l2", "subformat", "encryption", "dirty", "corrupt",
    "data_file_raw", "other_size", "bitmaps", "mode", "uid", "gid", "acl",
    "capabilities", "immutable", "key_slots",
)  # fmt: skip
#: Those that an image has one plain value of; the others are lists.
_PLAIN_HEADER = tuple(name for name in HEADER if name not in {"bitmaps", "key_slots"})
#: What stands in few headers, or differs from one to the next.
_LISTS = ("volume", "bitmaps", "key_slots", "data_file_b64", "extents_b64", "alone", "keeper")
#: What the column of names takes: more than any file's name, but a volume's may be as long as it likes.
LONGEST_NAME = 1100
#: The largest number that the database's columns take.
LARGEST = (1 << 63) - 1


def stand_in(path: bytes) -> str:
    """What stands for the inode of what has none that anybody tells: a digest of its path."""
    return blake2b(path, digest_size=8).hexdigest()


def inode(dev: Any, number: Any) -> str:
    """Device and inode as one word; empty where there is no file."""
    return "" if dev is None or number is None else f"{dev}:{number}"


def row_of(event: dict[str, Any], scan: int, at: str | datetime) -> tuple[Any, ...]:
    """The values of :data:`SCANNED`, and the path's key as the last one.

    Args:
        event: an ``image`` event of the agent.
        scan: id of the job.
        at: when it was seen, as the database takes it.
    """
    path = unb64(event["path_b64"])
    text = display(path)
    base_b64, written_b64 = event.get("backing_path_b64"), event.get("backing_b64")
    base_path = unb64(base_b64) if base_b64 else b""
    unreadable = "" if event["state"] == "ok" else _plain(event.get("detail") or "The header cannot be read.")
    virtual_size = event.get("virtual_size")
    if virtual_size is not None and virtual_size > LARGEST:
        unreadable, virtual_size = f"The header claims a virtual size of {virtual_size} bytes.", None
    return (
        event["pool"], text, text.rpartition("/")[2][:LONGEST_NAME], path, bytes.fromhex(event["fp"]),
        str(event["dev"]), str(event["inode"]), event["nlink"], min(event["mtime_ns"], LARGEST),
        min(event["ctime_ns"], LARGEST), event["file_size"], event["allocated_size"],
        event.get("exclusive_bytes"), event.get("snapshot_bytes"), event.get("reservation_bytes"), virtual_size,
        event["format"] or "", event.get("cluster_size"), event.get("compression") or "",
        event.get("preallocation") or "", None if unreadable else event.get("encrypted"), _header_column(event),
        _json(event.get("snapshots") or []),
        display(unb64(written_b64)) if written_b64 else "", _plain(event.get("backing_format") or "")[:20],
        path_key(base_path) if base_path else "", display(base_path), base_path,
        inode(event.get("backing_dev"), event.get("backing_inode")), _plain(event.get("backing_unsafe") or ""),
        unreadable, at, None, scan, path_key(path),
    )  # fmt: skip


def _plain(text: str) -> str:
    """What strangers wrote into a header, as a database can keep it: PostgreSQL takes no NUL in a text."""
    return text if text.isprintable() else display(text.encode("utf-8", "backslashreplace"))


def _json(value: Any) -> str:
    """A column of JSON; what is no plain text in it (``\\u....`` once encoded) is shown as names are."""
    encoded = json.dumps(value)
    return json.dumps(_cleaned(value)) if "\\u" in encoded else encoded


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return _plain(value)
    if isinstance(value, dict):
        return {name: _cleaned(part) for name, part in value.items()}
    return [_cleaned(part) for part in value] if isinstance(value, list) else value


def _header_column(event: dict[str, Any]) -> str:
    """Most images of a host say the same: what has no lists in it is written out once."""
    if any(map(event.get, _LISTS)) or "groups" in event:
        return _json(_header(event))
    return _plain_header(event.get("bitmaps") is None, tuple(map(event.get, _PLAIN_HEADER)))


@lru_cache(maxsize=1024)
def _plain_header(no_bitmaps_known: bool, values: tuple[Any, ...]) -> str:
    facts = dict(zip(_PLAIN_HEADER, values, strict=True))
    return _json(_header(facts if no_bitmaps_known else facts | {"bitmaps": []}))


def _header(event: dict[str, Any]) -> dict[str, Any]:
    facts = {name: event[name] for name in HEADER if event.get(name) is not None}
    if event.get("data_file_b64"):
        facts["data_file"] = display(unb64(event["data_file_b64"]))
    if event.get("extents_b64"):
        facts["extents"] = [display(unb64(extent)) for extent in event["extents_b64"]]
    if event.get("alone"):
        facts["alone"] = True
    if event.get("groups") is not None:
        facts |= {"groups": event["groups"], "backing_closed": bool(event.get("backing_closed"))}
    if event.get("keeper") is not None:
        facts |= {"keeper": event["keeper"], "keeper_closed": bool(event.get("keeper_closed"))}
    if event.get("volume"):
        facts["volume"] = event["volume"]
    if event.get("parts"):
        facts["parts"] = [inode(*part) for part in event["parts"]]
    return facts


def upsert(host_id: int, at: str | datetime, rows: Sequence[tuple[Any, ...]]) -> None:
    """Writes rows of :func:`row_of`: a path that is known keeps its row, a new one starts unlisted.

    Nobody else may write images of these pools meanwhile. (One statement that inserts or updates takes SQLite twice as
    long, since the table has foreign keys.)
    """
    by_key = {row[-1]: row for row in rows}
    known = _known_rows(host_id, list(by_key))
    fixed = (host_id, at, *STARTING.values())
    names = [*SCANNED, "path_key", "host_id", "first_seen", *STARTING]
    quote = connection.ops.quote_name
    table, columns = quote(Image._meta.db_table), ", ".join(map(quote, names))
    changes = ", ".join(f"{quote(column)} = %s" for column in SCANNED)
    with connection.cursor() as cursor:
        cursor.executemany(
            f"INSERT INTO {table} ({columns}) VALUES ({', '.join(['%s'] * len(names))})",  # noqa: S608 (our own names)
            [row + fixed for key, row in by_key.items() if key not in known],
        )
        cursor.executemany(
            f"UPDATE {table} SET {changes} WHERE id = %s",  # noqa: S608 (as above)
            [(*row[:-1], known[key]) for key, row in by_key.items() if key in known],
        )


def _known_rows(host_id: int, keys: Sequence[str]) -> dict[str, int]:
    """Ids of the rows that a host has by their paths' keys."""
    if not keys:
        return {}
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT path_key, id FROM {connection.ops.quote_name(Image._meta.db_table)} "  # noqa: S608 (our own names)
            f"WHERE host_id = %s AND path_key IN ({', '.join(['%s'] * len(keys))})",
            [host_id, *keys],
        )
        return dict(cursor.fetchall())
