"""Writes: guests and their disks, as a hypervisor told them, and when guests ran, as far as anybody looked.

The times speak for a change of an image being its guest's own.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from storage_admin.guests.models import OFF_STATES, Guest, GuestDisk, GuestSpan
from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import display, path_key, shown
from storage_admin.jobs.models import Elapsed

#: Of one guest so many snapshots are kept in mind: whoever makes them may be hostile.
MOST_SNAPSHOTS = 1000
#: Device and inode of a file.
Inode = tuple[str, str]


def disk_paths(guests: Iterable[GuestFacts]) -> list[bytes]:
    """The paths that these guests name as disks."""
    return sorted({os.fsencode(disk.path) for guest in guests for disk in guest.disks if disk.path.startswith("/")})


def record_guests(
    host: Host,
    kinds: Collection[str],
    facts: Iterable[GuestFacts],
    inodes: Mapping[bytes, Inode],
    at: datetime,
    hidden: Collection[str] = (),
) -> bool:
    """Makes the host's guests of these kinds what their hypervisor told. Those that it did not tell are gone.

    Args:
        kinds: that the hypervisor was asked for; guests of others stay as they are.
        facts: every guest of these kinds.
        inodes: device and inode by path, of the disks whose files exist.
        at: when it told.
        hidden: uids that it may not be asked about any more: what was known of these guests stays.

    Returns:
        Whether anything is otherwise than before: a guest, its state, a disk.

    Raises:
        ValueError: a guest is of another kind.
    """
    rows = Guest.objects.filter(host=host, kind__in=kinds)
    told = {(guest.kind, guest.uid): guest for guest in facts}
    if strangers := {kind for kind, _ in told} - set(kinds):
        raise ValueError(f"guests of kinds that were not requested: {strangers}")
    known = {(guest.kind, guest.uid): guest for guest in rows.prefetch_related("disks")}
    gone = [guest.pk for key, guest in known.items() if key not in told and guest.uid not in hidden]
    changed = bool(gone)
    with transaction.atomic():
        rows.filter(pk__in=gone).delete()
        rows.exclude(uid__in=set(hidden) - {uid for _, uid in told}).update(last_seen=at)
        for key, guest in told.items():
            changed |= _record_guest(host, known.get(key), guest, inodes, at)
        ago = max((timezone.now() - at).total_seconds(), 0.0)
        saw_run(host, kinds, {key: guest.state for key, guest in told.items()}, ago)
    return changed


def _record_guest(
    host: Host, known: Guest | None, told: GuestFacts, inodes: Mapping[bytes, Inode], at: datetime
) -> bool:
    values: dict[str, Any] = {
        "name": shown(told.name, 255), "state": shown(told.state, 20), "lock": shown(told.lock, 100),
        "io_priority": told.io_priority, "io_weight": told.io_weight, "io_limits": told.io_limits,
        "unread": [shown(line, 1000) for line in told.unread], "digest": shown(told.digest, 40),
        "waiting": [shown(target, 40) for target in told.waiting],
        "snapshots": [
            asdict(one) | {"name": shown(one.name, 200), "files": [shown(path, 4096) for path in one.files]}
            for one in told.snapshots[:MOST_SNAPSHOTS]
        ],
        "checkpoints": told.checkpoints,
    }  # fmt: skip
    row, changed = known, False
    if row is None:
        row, changed = Guest.objects.create(host=host, kind=told.kind, uid=told.uid, last_seen=at, **values), True
    elif {name: getattr(row, name) for name in values} != values:
        Guest.objects.filter(pk=row.pk).update(**values)
        changed = True
    return _record_disks(row, told.disks, inodes) or changed


def _record_disks(guest: Guest, disks: Iterable[DiskFacts], inodes: Mapping[bytes, Inode]) -> bool:
    known = {(disk.target, disk.only_in): disk for disk in guest.disks.all()}
    changed = False
    for (target, only_in), told in _each_once(disks).items():
        disk = known.pop((target, only_in), None) or GuestDisk(guest=guest, target=target, only_in=only_in)
        raw = os.fsencode(told.path)
        dev, inode = inodes.get(raw, ("", ""))
        values = {
            "device": shown(told.device, 10), "path": display(raw), "path_bytes": raw,
            "path_key": path_key(raw) if raw else "", "dev": dev, "inode": inode, "format": shown(told.format, 20),
            "cache": shown(told.cache, 20), "discard": shown(told.discard, 20), "readonly": told.readonly,
            "records_chain": told.records_chain, "volume": shown(told.volume, 1000), "in_backups": told.in_backups,
        }  # fmt: skip
        if disk.pk is None or {key: _plain(getattr(disk, key)) for key in values} != values:
            changed = True
            for key, value in values.items():
                setattr(disk, key, value)
            disk.save()
    if known:
        GuestDisk.objects.filter(pk__in=[disk.pk for disk in known.values()]).delete()
    return changed or bool(known)


def _each_once(disks: Iterable[DiskFacts]) -> dict[tuple[str, str], DiskFacts]:
    """The disks by target and section as columns take them; none is lost where a definition has two of one name."""
    found: dict[tuple[str, str], DiskFacts] = {}
    for disk in disks:
        target, only_in, number = shown(disk.target, 40), shown(disk.only_in, 100), 2
        while (target, only_in) in found:
            target, number = f"{shown(disk.target, 34)} #{number}", number + 1
        found[target, only_in] = disk
    return found


def _plain(value: object) -> object:
    return bytes(value) if isinstance(value, memoryview) else value


#: Seconds between two looks that saw the same, in which it counts as so: more than between two scans.
SAME_SPAN, CHANGED_WITHIN = 20 * 60.0, 90.0
#: Words for a state of which nothing is known, as that of a guest of another node.
UNKNOWN_STATES = frozenset({"", "unknown"})
#: Seconds for which a span is kept: longer than any undo copy may be.
SPANS_KEPT = 400 * 24 * 3600.0


def saw_run(host: Host, kinds: Collection[str], states: Mapping[tuple[str, str], str], ago: float = 0.0) -> None:
    """Writes down a look at a host's guests.

    Between a look that saw a guest run and one that saw it off it counts as running, where they are seconds apart.

    Args:
        kinds: of guests that were asked for: one of these that was not told is gone.
        states: by kind and uid.
        ago: seconds since that was so.
    """
    with transaction.atomic():
        Host.objects.select_for_update().filter(pk=host.pk).first()  # one look after the other
        at = Elapsed.now() - ago
        own = GuestSpan.objects.filter(host=host, kind__in=kinds)
        own.filter(until__lt=at - SPANS_KEPT).delete()
        last = own.order_by().values("kind", "uid").annotate(last=Max("pk")).values("last")
        known = {(span.kind, span.uid): span for span in own.filter(pk__in=last)}
        same, before = [], []
        for key, state in states.items():
            ran, span = state not in OFF_STATES, known.get(key)
            if state in UNKNOWN_STATES or (span is not None and span.until > at):
                continue  # nobody knows, or somebody has looked since
            if span is not None and span.ran == ran and at - span.until <= SAME_SPAN:
                same.append(span.pk)
                continue
            near = span is not None and span.ran != ran and at - span.until <= CHANGED_WITHIN
            since = span.until if span is not None and near and ran else at
            if span is not None and span.ran and near:
                GuestSpan.objects.filter(pk=span.pk).update(until=at)
            elif span is not None and not span.ran:
                before.append(span.pk)
            GuestSpan.objects.create(host=host, kind=key[0], uid=key[1], ran=ran, since=since, until=at)
        own.filter(pk__in=same).update(until=at)
        own.filter(pk__in=before).delete()


def spans_of(guests: Collection[Guest]) -> list[tuple[float, float]]:
    """From and until when these guests ran, as far as anybody looked, in the seconds of :meth:`Elapsed.now`."""
    found: list[tuple[float, float]] = []
    for guest in guests:
        spans = GuestSpan.objects.filter(host=guest.host_id, kind=guest.kind, uid=guest.uid, ran=True)
        found += spans.values_list("since", "until")
    return found
