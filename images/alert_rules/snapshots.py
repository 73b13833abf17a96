"""Snapshots that are forgotten: each holds space, and slows down the guest that writes above it."""

from collections.abc import Iterator
from datetime import datetime, timedelta

from storage_admin.events import services as events
from storage_admin.events.services import Trouble
from storage_admin.guests.models import Guest

#: A guest is told of from so old a snapshot on, and from so many of them.
OLD, MANY = timedelta(days=30), 10


def forgotten(now: datetime) -> Iterator[Trouble]:
    """Guests with a snapshot that is old, or with many."""
    for guest in Guest.objects.exclude(snapshots=[]).select_related("host").defer("host__capabilities").order_by("pk"):
        oldest, count = guest.oldest_snapshot, len(guest.snapshots)
        is_old = oldest is not None and now - oldest >= OLD
        if not is_old and count < MANY:
            continue
        age = f"; the oldest was created on {oldest:%Y-%m-%d}" if oldest is not None else ""
        yield Trouble(
            f"{events.SNAPSHOTS_FORGOTTEN}:{guest.pk}", "warning", f"{guest.name} has old or many snapshots",
            f"{count} snapshots{age}. Each holds space that its guest has overwritten since. Delete those that nobody "
            "will go back to, on the page of the guest or in Proxmox VE.",
            guest.host.slug, "guest", guest.pk, guest.name,
        )  # fmt: skip
