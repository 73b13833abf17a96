"""Snapshots that are forgotten: each holds space, and slows down the guest that writes above it."""

from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta

from django.db.models import Sum

from images.models import Image
from images.selectors.guests import guests_for
from images.selectors.snapshots import Kept, snapshots_of
from storage_admin.accounts.models import SYSTEM
from storage_admin.events import services as events
from storage_admin.events.services import Trouble

#: A guest is told of from so old a snapshot on, from so many of them, and from so large a share of its disks that they
#: hold.
OLD, MANY, LARGE = timedelta(days=30), 10, 0.5


def forgotten(now: datetime) -> Iterator[Trouble]:
    """Guests with a snapshot that is old, with many, or with such as have grown large."""
    kept = defaultdict[int, list[Kept]](list)
    for one in snapshots_of(guests_for(SYSTEM)):
        kept[one.guest.pk].append(one)
    sizes = _sizes(list(kept))
    for pk, rows in sorted(kept.items()):
        guest, count = rows[0].guest, len(rows)
        oldest = min((one.created for one in rows if one.created is not None), default=None)
        held = sum((one.files_bytes or 0) if one.held_bytes is None else one.held_bytes for one in rows)
        is_old = oldest is not None and now - oldest >= OLD
        is_large = pk in sizes and held >= LARGE * sizes[pk]
        if not is_old and not is_large and count < MANY:
            continue
        age = f"; the oldest was created on {oldest:%Y-%m-%d}" if oldest is not None else ""
        size = f"; they hold {held:,} bytes" if held else ""
        yield Trouble(
            f"{events.SNAPSHOTS_FORGOTTEN}:{pk}", "warning", f"{guest.name} has old, many or large snapshots",
            f"{count} snapshots{age}{size}. Each holds space that its guest has overwritten since. Delete those that "
            "nobody will go back to, on the page of the guest or in Proxmox VE.",
            guest.host.slug, "guest", pk, guest.name,
        )  # fmt: skip


def _sizes(guests: list[int]) -> dict[int, int]:
    """The virtual size of each guest's disks together, in bytes, as far as they are images that are known."""
    own = Image.objects.filter(uses__disk__guest__in=guests, uses__disk__only_in="", uses__disk__device="disk")
    sums = own.values_list("uses__disk__guest").annotate(sum=Sum("virtual_size")).order_by()
    return {guest: size for guest, size in sums if size}
