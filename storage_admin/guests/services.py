"""Writes: guests and their disks, as a hypervisor told them."""

import os
from collections.abc import Mapping
from datetime import datetime

from django.db import transaction

from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.libvirt_reader import Domain, DomainDisk
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import display, path_key

#: Device and inode of a file.
Inode = tuple[str, str]


def disk_paths(domains: tuple[Domain, ...]) -> list[bytes]:
    """The paths that these domains name as disks."""
    return sorted({os.fsencode(disk.path) for domain in domains for disk in domain.disks if disk.path.startswith("/")})


def record_domains(host: Host, domains: tuple[Domain, ...], inodes: Mapping[bytes, Inode], at: datetime) -> bool:
    """Makes the host's domains what libvirt told. Those that it did not tell are gone.

    Args:
        inodes: device and inode by path, of the disks whose files exist.

    Returns:
        Whether anything is otherwise than before: a guest, its state, a disk.
    """
    rows = Guest.objects.filter(host=host, kind=Guest.Kind.DOMAIN)
    known = {guest.uid: guest for guest in rows.prefetch_related("disks")}
    told = {domain.uid for domain in domains}
    gone = [guest.pk for uid, guest in known.items() if uid not in told]
    changed = bool(gone)
    with transaction.atomic():
        rows.filter(pk__in=gone).delete()
        rows.update(last_seen=at)
        for domain in domains:
            guest = known.get(domain.uid)
            name, state = domain.name[:255], domain.state
            if guest is None:
                guest = Guest.objects.create(
                    host=host, kind=Guest.Kind.DOMAIN, uid=domain.uid, name=name, state=state, last_seen=at
                )
                changed = True
            elif (guest.name, guest.state) != (name, state):
                rows.filter(pk=guest.pk).update(name=name, state=state)
                changed = True
            changed |= _record_disks(guest, domain.disks, inodes)
    return changed


def _record_disks(guest: Guest, disks: tuple[DomainDisk, ...], inodes: Mapping[bytes, Inode]) -> bool:
    known = {disk.target: disk for disk in guest.disks.all()}
    changed = False
    for told in disks:
        disk = known.pop(told.target, None) or GuestDisk(guest=guest, target=told.target)
        raw = os.fsencode(told.path)
        dev, inode = inodes.get(raw, ("", ""))
        values = {
            "device": told.device, "path": display(raw), "path_bytes": raw, "path_key": path_key(raw) if raw else "",
            "dev": dev, "inode": inode, "format": told.format, "cache": told.cache, "discard": told.discard,
            "readonly": told.readonly, "records_chain": told.records_chain,
        }  # fmt: skip
        if disk.pk is None or {key: _plain(getattr(disk, key)) for key in values} != values:
            changed = True
            for key, value in values.items():
                setattr(disk, key, value)
            disk.save()
    if known:
        GuestDisk.objects.filter(pk__in=[disk.pk for disk in known.values()]).delete()
    return changed or bool(known)


def _plain(value: object) -> object:
    return bytes(value) if isinstance(value, memoryview) else value
