"""Volumes of Proxmox VE that only its API tells of, as the events of a scan: all of a node that is reached by its API
alone, and beside an agent those that are no files. Nothing in such pools is rewritten.

A storage that several nodes of a cluster share is listed once: :mod:`images.scan.shared_storages`.
"""

import posixpath
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from images.models import Image
from images.orphans.evidence import NAMED, number_of
from images.scan import shared_storages
from images.scan.events import Places, as_last_seen, image_event, is_new, pool_event
from images.scan.rows import LARGEST
from storage_admin.agent.protocol import b64
from storage_admin.agent.scan.records import backing_unsafe
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.names import path_key, raw
from storage_admin.hosts.proxmox import by_api_alone, registration, volumes
from storage_admin.hosts.proxmox.reader import Listing, ProxmoxFacts, VolumeFacts
from storage_admin.hosts.proxmox.storages import StorageFacts

#: What Proxmox VE calls the content of a file that is not what its name says.
INVALID = "invalid"
_INVALID = "Proxmox VE cannot read this file in the format that its name says."
_UNFINISHED = "?"


class _Seen(Places):
    """What all storages of one scan share."""

    def __init__(self, host: Host, scan: int, facts: ProxmoxFacts) -> None:
        super().__init__(host)
        self.scan, self.facts = scan, facts


def events(host: Host, facts: ProxmoxFacts, scan: int) -> Iterator[dict[str, Any]]:
    """The ``image`` and ``pool`` events, as an agent would send them; without an agent, all that a scan needs.

    Args:
        facts: with the listings of the storages to tell of.
        scan: the job's id.
    """
    if host.by_api_alone:
        yield {"event": "host", "agent": False, "libvirt": "absent"}
    storages = {one.name: one for one in facts.storages}
    listings = {one.storage: one for one in facts.listings}
    seen = _Seen(host, scan, facts)
    for listing in facts.listings:
        seen.paths |= {_key(volumes.place(one.volume, storages)) for one in listing.volumes}
    seen.paths |= {_key(path) for guest in facts.guests for path in guest.stands_on}
    for row in shown_pools(host):
        storage = storages.get(row.name)
        if facts.api_away:
            yield as_last_seen(row, f"{facts.api_away} {_AS_LAST_SEEN}")
        elif storage is not None:
            yield from _pool(seen, row, storage, listings.get(row.name))
    if host.by_api_alone:
        yield {"event": "seen", "probe": [], "busy": []}


def shown_pools(host: Host) -> list[StoragePool]:
    """The pools of a node that only its API tells of; each is called as its storage is."""
    return list(StoragePool.objects.filter(host=host, source=StoragePool.Source.PROXMOX, path_bytes=b""))


def not_told(host: Host, facts: ProxmoxFacts) -> tuple[set[str], set[str]]:
    """Storages, and numbers of guests, that are known here and that these facts tell nothing of."""
    storages = {one.name: one for one in facts.storages}
    names = {row.name for row in shown_pools(host)} - storages.keys()
    guests = set(Guest.objects.filter(host=host, kind__in=("vm", "container")).values_list("uid", flat=True))
    told = {str(one.vmid) for one in facts.guests}
    listed = {_key(volumes.place(one.volume, storages)) for listing in facts.listings for one in listing.volumes}
    rows = Image.every.filter(host=host, missing_since=None, pool__path_bytes=b"")
    found = rows.values_list("path_key", "name", "path")
    numbers = {number_of(name, path) for key, name, path in found if key not in listed}
    # Beside an agent the guests are read from their files.
    lost = guests - told if host.by_api_alone else set()
    return names, (lost | numbers) - {""}


def room(storage: StorageFacts) -> dict[str, int | None]:
    """How much room there is in a storage, as columns of its pool's row."""
    return {
        "capacity_bytes": _size(storage.total_bytes), "available_bytes": _available(storage),
        "reserved_bytes": _size(storage.reserved_bytes),
    }  # fmt: skip


def _pool(seen: _Seen, row: StoragePool, storage: StorageFacts, listing: Listing | None) -> Iterator[dict[str, Any]]:
    event = pool_event(
        row, kind=str(row.kind), **room(storage), filesystem=storage.type, network=storage.shared,
        shared_key=row.shared_key, fs_key=row.fs_key, owners_unknown=by_api_alone.nobody_looks(seen.host),
    )  # fmt: skip
    if not storage.active:
        # What is switched off says so already (sync_storages).
        state, why = registration.why_away(seen.facts, storage) if storage.enabled else ("missing", row.state_detail)
        yield event | {"state": state, "detail": why}
        return
    why = listing.why_incomplete if listing is not None else "The API does not list its volumes."
    lister = shared_storages.lister_of(row, is_whole=not why)
    if lister.pk != row.pk:
        shared_storages.leave_to(row, lister)
        event |= {"shared_key": lister.shared_key, "fs_key": lister.fs_key}
        yield event | {"detail": shared_storages.ELSEWHERE}
        return
    shared_storages.take_over(row, seen.scan)
    rows = Image.every.filter(pool=row, missing_since=None).values_list("fingerprint", "name", "path")
    numbers = {bytes(fingerprint): number_of(name, path) for fingerprint, name, path in rows}
    images, known = 0, set(numbers)
    for image in _images(seen, row, storage, listing):
        images += 1
        if is_new(image, known):
            yield image
    if why:
        yield event | {"state": "unreadable", "detail": f"{why} {_AS_LAST_SEEN}", "images": images}
        return
    if hidden := {numbers[fingerprint] for fingerprint in known} & seen.facts.hidden:
        named = ", ".join(sorted(hidden)[:NAMED])
        detail = (
            f"The API token can no longer see the disks of these guests: {named} (permissions on /vms). {_AS_LAST_SEEN}"
        )
        event |= {"state": "unreadable", "detail": detail}
    vanished = sorted(fingerprint for fingerprint in known if numbers[fingerprint] not in seen.facts.hidden)
    yield event | {"images": images, "vanished_b64": b64(b"".join(vanished))}


_AS_LAST_SEEN = "Anything that the API no longer reports is shown as last seen."


def _images(seen: _Seen, row: StoragePool, storage: StorageFacts, listing: Listing | None) -> Iterator[dict[str, Any]]:
    told = listing.volumes if listing is not None else ()
    storages = {one.name: one for one in seen.facts.storages}
    for volume in sorted((*told, *_snapshots(seen.facts, storage)), key=lambda one: one.volume):
        place = volumes.place(volume.volume, storages) or volume.path
        if place and seen.is_first(place):
            yield _image(seen, row, storage, volume, place)


def _snapshots(facts: ProxmoxFacts, storage: StorageFacts) -> Iterator[VolumeFacts]:
    """Snapshots that are files, which no list of a storage has: known by their guests, their sizes by nobody."""
    for guest in facts.guests if storage.is_folder else ():
        for disk in guest.facts.disks:
            if disk.path in guest.stands_on and disk.volume.startswith(f"{storage.name}:"):
                below = guest.stands_on[disk.path]
                parent = _UNFINISHED if below is None else below
                yield VolumeFacts(disk.volume, disk.path, "images", "qcow2", None, None, guest.vmid, parent)


def _image(seen: _Seen, row: StoragePool, storage: StorageFacts, volume: VolumeFacts, place: str) -> dict[str, Any]:
    broken = volume.format == INVALID
    base = {} if broken else _base(seen, storage, volume, place)
    return image_event(
        row, place, [asdict(volume), place, base], allocated_size=_size(volume.used_bytes),
        # A container's folder without a quota has no size of its own.
        virtual_size=_size(volume.size_bytes or None) if not broken else None,
        format="" if broken else volume.format[:20],
        state="unreadable" if broken else "ok", detail=_INVALID if broken else "", **base,
    )  # fmt: skip


def _base(seen: _Seen, storage: StorageFacts, volume: VolumeFacts, place: str) -> dict[str, Any]:
    """What a linked clone stands on: by its header in a folder, else by its volume id."""
    written = volume.parent if storage.is_folder else ""
    below = ""
    if written == _UNFINISHED:
        unfinished = "A change of snapshots of the VM is not finished. Its backing file is not reported."
        return {"backing_b64": b64(b"?"), "backing_unsafe": unfinished}
    if written and (why := backing_unsafe(raw(written))):
        return {"backing_b64": b64(raw(written)), "backing_unsafe": why}
    if written:
        below = posixpath.normpath(posixpath.join(posixpath.dirname(place), written))
    elif base_id := volumes.base_id(volume.volume, storage):
        below = volumes.place(base_id, {storage.name: storage})
        written = written or base_id
    if not below:
        return {}
    told = {"backing_b64": b64(raw(written)), "backing_path_b64": b64(raw(below))}
    if _key(below) in seen.paths:
        return told
    return told | {"backing_unsafe": f"The backing file {below} is not among the volumes that the API lists."}


def _available(storage: StorageFacts) -> int | None:
    told, whole = storage.available_bytes, storage.total_bytes
    return None if told is None or whole is None else min(told, whole, LARGEST)


def _size(told: int | None) -> int | None:
    return None if told is None else min(told, LARGEST)


def _key(place: str) -> str:
    return path_key(raw(place)) if place else ""
