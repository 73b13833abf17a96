"""Guests: their state, their disks, and what their cache and discard modes mean for space."""

from dataclasses import dataclass
from typing import Any

from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from images import selectors
from images.filters import GuestFilters
from images.models import Image
from storage_admin.accounts.saved_views import list_page
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.guests.backups import of_guests
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.selectors import hosts_for, in_scope
from storage_admin.web.lists import Filtered, as_choices, columns, filtered
from storage_admin.web.page import PageRequest, page, paginated

PER_PAGE = 50
PAGE = list_page("guests", gettext_noop("Guests"), GuestFilters.base_filters)
KINDS = (("domain", _("libvirt domain")), ("vm", _("Proxmox VE VM")), ("container", _("container")))

#: Columns: what they are ordered by, their word, the order that a first click gives.
COLUMNS = (
    ("name", gettext_noop("Guest"), ""),
    ("state", gettext_noop("State"), ""),
    (None, "I/O", ""),
    (None, gettext_noop("Disk"), ""),
    (None, gettext_noop("Image"), ""),
    (None, gettext_noop("Physical"), ""),
    (None, gettext_noop("Cache"), ""),
    (None, gettext_noop("Discard"), ""),
)


@dataclass(frozen=True)
class Advice:
    """What to think of a disk's setting; ``good`` where nothing is to be done."""

    good: bool
    sentence: str


def cache_advice(disk: GuestDisk) -> Advice:
    """What the cache mode means for a guest's data and the host's memory."""
    sentences = {
        "none": Advice(
            True, gettext("Bypasses the host's page cache: no data is kept twice, and live migration is safe.")
        ),
        "directsync": Advice(True, gettext("Safe, but slower than cache=none, because every write is flushed.")),
        "unsafe": Advice(
            False, gettext("Flushes are ignored: a power cut can destroy the guest's filesystem. Use cache=none.")
        ),
        "": Advice(
            False,
            gettext(
                "Not set: the hypervisor's default keeps data twice, in the guest and on the host. Set cache=none."
            ),
        ),
    }
    if not disk.cache and disk.guest.kind == Guest.Kind.VM:
        return Advice(True, gettext("Not set: Proxmox VE's default is none, which bypasses the host's page cache."))
    default = Advice(False, gettext("Keeps data twice, in the guest and in the host's page cache. Set cache=none."))
    return sentences.get("" if disk.cache == "default" else disk.cache, default)


def discard_advice(disk: GuestDisk) -> Advice:
    """What the discard mode means for space that the guest frees."""
    if disk.discard in ("unmap", "on"):  # libvirt's word, and Proxmox VE's
        return Advice(True, gettext("Space that the guest trims becomes free on the host."))
    wanted = "unmap" if disk.guest.kind == Guest.Kind.DOMAIN else "on"
    return Advice(
        False,
        gettext(
            "Space that the guest frees stays allocated on the host. Set discard={wanted}, then run fstrim in "
            "the guest."
        ).format(wanted=wanted),
    )


def _listed(request: PageRequest) -> Filtered[Guest]:
    """The guests that the query string asks for, by name unless it says otherwise."""
    return filtered(request, GuestFilters, selectors.guests_for(request.actor).order_by("name", "id"))


@require_safe
@page()
def guests(request: PageRequest) -> HttpResponseBase:
    """Guests by filters, with their disks and the images that those are."""
    found = _listed(request)
    values = found.values
    shown = paginated(request, selectors.Matches(found.rows), PER_PAGE)
    images = in_scope(Image.objects.filter(uses__disk__guest__in=list(shown)), request.actor).only(
        "name", "allocated_size"
    )
    backups = of_guests(shown)
    listed = [
        {
            "guest": guest,
            "disks": [(disk, cache_advice(disk), discard_advice(disk)) for disk in guest.disks.all()],
            "backup": backups.get(guest.pk),
        }
        for guest in shown
    ]
    hosts = list(hosts_for(request.actor).defer("capabilities"))
    states = selectors.guests_for(request.actor).order_by("state").values_list("state", flat=True).distinct()
    context: dict[str, Any] = {
        "section": "guests",
        "rows": shown,
        "listed": listed,
        "columns": columns(COLUMNS, values.get("ordering", "name")),
        "values": values,
        "ignored": found.ignored,
        "images": {image.pk: image for image in images},
        "states": as_choices(((state, state) for state in states), values.get("state", "")),
        "kinds": as_choices(KINDS, values.get("kind", "")),
        "hosts": as_choices(((host.pk, host.name) for host in hosts), values.get("host", "")),
        "unknown": [host for host in hosts if host.owners_unknown],
    }
    return render(request, "guests/guests.html", context)


def _images_of(guest: Guest) -> list[str]:
    return [disk.path for disk in guest.disks.all() if disk.path]


#: A line of the list as CSV: one of each guest.
CSV_COLUMNS: Columns = {
    "id": "pk",
    "host": "host.name",
    "kind": "kind",
    "uid": "uid",
    "name": "name",
    "state": "state",
    "lock": "lock",
    "disks": lambda guest: len(guest.disks.all()),
    "disk_targets": lambda guest: [disk.target for disk in guest.disks.all()],
    "disk_paths": _images_of,
    "cache": lambda guest: [disk.cache or gettext("not set") for disk in guest.disks.all()],
    "discard": lambda guest: [disk.discard or gettext("not set") for disk in guest.disks.all()],
    "io_priority": "io_priority",
    "io_weight": "io_weight",
    "io_limits": lambda guest: guest.io_limits or None,
    "last_seen": "last_seen",
}


@require_safe
@page()
def guests_csv(request: PageRequest) -> HttpResponseBase:
    """The whole list as it is filtered and ordered."""
    return csv_answer("guests", CSV_COLUMNS, _listed(request).exact())
