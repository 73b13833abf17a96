"""Guests: their state, their disks, and what their cache and discard modes mean for space."""

from dataclasses import dataclass
from typing import Any

from django.db.models import Q
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from images import selectors
from images.models import Image
from images.views.access import PageRequest, page, paginated
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.models import Host

PER_PAGE = 50


@dataclass(frozen=True)
class Advice:
    """What to think of a disk's setting; ``good`` where nothing is to be done."""

    good: bool
    sentence: str


def cache_advice(disk: GuestDisk) -> Advice:
    """What the cache mode means for a guest's data and the host's memory."""
    sentences = {
        "none": Advice(True, "Bypasses the host's page cache: no data is kept twice, and live migration is safe."),
        "directsync": Advice(True, "Safe; slower than none, as every write is flushed."),
        "unsafe": Advice(False, "Flushes are ignored: a power cut can destroy the guest's filesystem. Use cache=none."),
        "": Advice(
            False, "Not set: the hypervisor's default keeps data twice, in the guest and on the host. Set none."
        ),
    }
    if not disk.cache and disk.guest.kind == Guest.Kind.VM:
        return Advice(True, "Not set: Proxmox VE's default is none, which bypasses the host's page cache.")
    default = Advice(False, "Keeps data twice, in the guest and in the host's page cache. Set cache=none.")
    return sentences.get("" if disk.cache == "default" else disk.cache, default)


def discard_advice(disk: GuestDisk) -> Advice:
    """What the discard mode means for space that the guest frees."""
    if disk.discard in ("unmap", "on"):  # libvirt's word, and Proxmox VE's
        return Advice(True, "What the guest trims becomes free on the host.")
    wanted = "unmap" if disk.guest.kind == Guest.Kind.DOMAIN else "on"
    return Advice(
        False, f"What the guest deletes stays allocated here. Set discard={wanted}, then run fstrim in the guest."
    )


@require_safe
@page()
def guests(request: PageRequest) -> HttpResponseBase:
    """All guests, with their disks and the images that those are."""
    rows = selectors.guests_for(request.actor).order_by("name", "id")
    query, state = request.GET.get("q", "").replace("\0", ""), request.GET.get("state", "")
    if query:
        rows = rows.filter(Q(name__icontains=query) | Q(uid__icontains=query))
    states = sorted(set(selectors.guests_for(request.actor).order_by().values_list("state", flat=True)))
    if state in states:
        rows = rows.filter(state=state)
    shown = paginated(request, rows, PER_PAGE)
    found = Image.objects.filter(uses__disk__guest__in=list(shown)).only("name", "allocated_size")
    listed = [
        {"guest": guest, "disks": [(disk, cache_advice(disk), discard_advice(disk)) for disk in guest.disks.all()]}
        for guest in shown
    ]
    unknown = [host for host in Host.objects.exclude(owners_unknown="") if request.actor.sees(host.slug)]
    context: dict[str, Any] = {
        "section": "guests",
        "rows": shown,
        "listed": listed,
        "states": states,
        "state": state,
        "q": query,
    }
    context |= {"images": {image.pk: image for image in found}}
    return render(request, "guests/guests.html", context | {"unknown": unknown})
