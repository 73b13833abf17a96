"""What the agent read of LVM, as the events of a scan: logical volumes, with what each takes. Nothing rewrites them.

Where libvirt or Proxmox VE has a pool for the same group or thin pool, that pool's row gets what LVM says, in place of
what they told. What nodes share is left to the API, which lists it once.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from django.db import transaction

from images.alert_rules.pools import NEVER_PERCENT
from images.models import Image
from images.scan.from_proxmox import as_last_seen
from images.scan.rows import stand_in
from storage_admin.agent.protocol import b64
from storage_admin.agent.scan.records import FINGERPRINT_SIZE
from storage_admin.hosts import services
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key

Kind = StoragePool.Kind
Source = StoragePool.Source
Event = dict[str, Any]
KINDS = (Kind.LVM, Kind.LVMTHIN)

_AS_LAST_SEEN = "Its volumes are shown as of the last successful scan."
_OWNERS_UNKNOWN = (
    "The volumes of this pool are not files, and a guest may use a volume under another name. So a volume may be in "
    "use even if no guest names it."
)


@dataclass
class _Told:
    """A volume group or a thin pool, by LVM's own name of it (``vg0``, ``vg0/pool0``)."""

    name: str
    kind: Kind
    why: str = ""
    #: By the group's own id: hosts that see one group see one storage.
    key: str = ""
    capacity: int | None = None
    available: int | None = None
    facts: Event = field(default_factory=dict)
    volumes: list[Event] = field(default_factory=list)
    #: Names of all volumes of the group: what a volume may stand on.
    beside: set[str] = field(default_factory=set)


def sync(host: Host, event: Event) -> dict[int, StoragePool]:
    """Makes pools of groups and thin pools that have volumes, where nobody else has; forgets those that are empty.

    Returns:
        The host's pools of LVM by their ids.
    """
    others = {name_of(row) for row in _rows(host) if row.source != Source.LVM}
    for told in () if event["why"] else _told(event):
        if told.name not in others and (told.volumes or told.kind == Kind.LVMTHIN):
            path = f"/dev/{told.name}"
            values = {"name": told.name[:200], "path": path, "path_bytes": path.encode(), "source": Source.LVM}
            more = {"warn_percent": NEVER_PERCENT} if told.kind == Kind.LVM else {}
            StoragePool.objects.get_or_create(
                host=host, path_key=path_key(b"lvm " + told.name.encode()),
                defaults=values | more | {"kind": told.kind},
            )  # fmt: skip
    for row in _rows(host):
        if row.source == Source.LVM and name_of(row) in others and not Image.every.filter(pool=row).exists():
            with transaction.atomic():
                Host.objects.select_for_update().get(pk=host.pk)  # no job is submitted meanwhile
                if not services.in_the_way_of_removal(row):
                    row.delete()
    return {row.pk: row for row in _rows(host)}


def events(host: Host, event: Event, held: Iterable[Event], declared: Mapping[str, str]) -> Iterator[Event]:
    """The ``image`` and ``pool`` events of all pools of LVM.

    Args:
        event: of the agent, ``lvm``.
        held: what libvirt and Proxmox VE told of their pools.
        declared: the formats that guests declare, by the paths of their disks.
    """
    by_name: dict[str, list[StoragePool]] = defaultdict(list)
    for row in _rows(host):
        by_name[name_of(row)].append(row)
    told = {one.name: one for one in _told(event)}
    taken: set[int] = set()
    for name, rows in by_name.items():
        # Its own row comes last: it has been there before whoever else has the pool was asked.
        first, *rest = sorted(rows, key=lambda row: (row.source == Source.LVM, row.pk))
        one = told.get(name)
        why = event["why"] or (one.why if one is not None else "")
        if any(row.network for row in rows) or (one is None and not why and first.source != Source.LVM):
            continue
        if why:
            ours = [row for row in rows if row.lvm is not None]
            taken |= {row.pk for row in ours}
            yield from (as_last_seen(row, f"{why} {_AS_LAST_SEEN}") for row in ours)
            continue
        taken |= {row.pk for row in rows}
        if one is None:
            gone = f"LVM on {host.name} no longer lists it. {_AS_LAST_SEEN}"
            yield as_last_seen(first, gone) | {"state": "missing"}
        else:
            yield from _pool(first, one, declared)
            for row in rest:  # each volume is listed once
                detail = f"Its volumes are listed in {first.name}."
                yield _pool_event(row, replace(one, volumes=[]), _known(row)) | {"detail": detail}
    yield from (one for one in held if one.get("pool", one.get("id")) not in taken)


def _rows(host: Host) -> list[StoragePool]:
    return list(StoragePool.objects.filter(host=host, kind__in=KINDS).order_by("pk"))


def name_of(row: StoragePool) -> str:
    """What LVM calls the group or thin pool of a row: Proxmox VE's have ``lvmthin vg0/pool0`` as their path."""
    return row.path.partition(" ")[2] if row.source == Source.PROXMOX else row.path.removeprefix("/dev/")


def fullness(told: Mapping[str, Any]) -> Event:
    """What a thin pool's row keeps of how the kernel tells of it (the agent's ``lvm.thin_pools``)."""
    facts = {name: told[name] for name in ("mode", "needs_check")}
    if told["metadata_size"]:
        percent = 100 * told["metadata_used"] / told["metadata_size"]
        facts |= {"metadata_bytes": told["metadata_size"], "metadata_percent": round(percent, 2)}
    return facts


def _told(event: Event) -> list[_Told]:
    groups = {
        one["name"]: _Told(one["name"], Kind.LVM, one["why"], f"lvm {one['uuid']}", one["size"], one["free"])
        for one in event["groups"]
    }
    thin = {}
    for one in event["pools"]:
        name, used, size = f"{one['group']}/{one['name']}", one["used"], one["size"]
        facts = {"metadata_bytes": one["metadata_size"], "metadata_percent": one["metadata_percent"]}
        facts |= {name: one[name] for name in ("mode", "needs_check", "extend_at", "extend_by") if name in one}
        facts["group_free"] = groups[one["group"]].available
        key = f"{groups[one['group']].key}/{one['name']}"
        thin[name] = _Told(name, Kind.LVMTHIN, "", key, size, None if used is None else size - used, facts)
    for one in event["volumes"]:
        place = thin.get(f"{one['group']}/{one['pool']}") if one["pool"] else groups[one["group"]]
        if place is not None:
            place.volumes.append(one)
            place.beside = groups[one["group"]].beside
            place.beside.add(one["name"])
    return [*groups.values(), *thin.values()]


def _pool(row: StoragePool, told: _Told, declared: Mapping[str, str]) -> Iterator[Event]:
    known = _known(row)
    for volume in told.volumes:
        image = _image(row, told, volume, declared)
        fingerprint = bytes.fromhex(image["fp"])
        if fingerprint in known:
            known.discard(fingerprint)
        else:
            yield image
    yield _pool_event(row, told, known)


def _known(row: StoragePool) -> set[bytes]:
    return set(map(bytes, Image.every.filter(pool=row, missing_since=None).values_list("fingerprint", flat=True)))


def _pool_event(row: StoragePool, told: _Told, vanished: Iterable[bytes]) -> Event:
    return {
        "event": "pool", "id": row.pk, "state": "ok", "detail": "", "kind": str(told.kind), "filesystem": "LVM",
        "capacity_bytes": told.capacity, "available_bytes": told.available, "images": len(told.volumes),
        "others": {"count": 0, "bytes": 0}, "undo_bytes": 0, "undo_copies": 0, "leftovers": 0,
        "vanished_b64": b64(b"".join(sorted(vanished))), "owners_unknown": _OWNERS_UNKNOWN, "fs_key": told.key,
        "shared_key": told.key, "lvm": told.facts,
    }  # fmt: skip


def _image(row: StoragePool, told: _Told, volume: Event, declared: Mapping[str, str]) -> Event:
    path = f"/dev/{volume['group']}/{volume['name']}"
    usual = "qcow2" if volume["name"].endswith(".qcow2") else "raw"
    form = (declared.get(path) or declared.get(volume["dm_path"]) or usual)[:20]
    base = b64(f"/dev/{volume['group']}/{volume['origin']}".encode()) if volume["origin"] in told.beside else ""
    written = json.dumps([row.pk, volume, form, base], sort_keys=True).encode()
    active = volume["inode"] is not None
    return {
        "event": "image", "pool": row.pk, "path_b64": b64(path.encode()),
        "fp": blake2b(written, digest_size=FINGERPRINT_SIZE).hexdigest(),
        # By its device a guest is found that names the volume otherwise; of one without, by the other name.
        "dev": volume["dev"] if active else "",
        "inode": volume["inode"] if active else stand_in(volume["dm_path"].encode()),
        "nlink": 1, "mtime_ns": 0, "ctime_ns": 0, "file_size": None, "allocated_size": volume["allocated"],
        "virtual_size": volume["size"], "format": form, "encrypted": None,
        "state": "unreadable" if volume["health"] == "partial" else "ok",
        "detail": "A physical volume that it lies on is missing.",
        **({"backing_b64": base, "backing_path_b64": base} if base else {}),
    }  # fmt: skip
