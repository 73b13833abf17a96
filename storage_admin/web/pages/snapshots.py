"""Snapshots of all guests in one list: how old each is, and what it holds."""

from collections.abc import Iterable
from typing import Any

from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from images import selectors
from images.filters import GuestsByName
from images.selectors.snapshots import EXTERNAL, INTERNAL, STORAGE, Kept, snapshots_of
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.guests.models import Guest
from storage_admin.hosts.selectors import hosts_for
from storage_admin.web.lists import Filtered, as_choices, filtered
from storage_admin.web.page import PageRequest, page, paginated

PER_PAGE = 50
KINDS = {
    INTERNAL: _("in the images (internal)"),
    EXTERNAL: _("files of its own (external)"),
    STORAGE: _("kept by the storage"),
}
BY = {"libvirt": "libvirt", "proxmox": "Proxmox VE", "image": _("only the image")}


def _guests(request: PageRequest) -> Filtered[Guest]:
    return filtered(request, GuestsByName, selectors.guests_for(request.actor))


@require_safe
@page()
def snapshots(request: PageRequest) -> HttpResponseBase:
    """Snapshots of the guests that the filters leave, the oldest first."""
    found = _guests(request)
    kept = snapshots_of(found.rows)
    rows = paginated(request, kept, PER_PAGE)
    context: dict[str, Any] = {
        "section": "guests",
        "rows": rows,
        "listed": [{"kept": one, "kind": KINDS[one.kind], "by": BY[one.by]} for one in rows],
        "unmeasured": sum(None in (one.held_bytes, *_files(one)) for one in kept),
        "held_bytes": _known(one.held_bytes for one in kept),
        "files_bytes": _known(size for one in kept for size in _files(one)),
        "values": found.values,
        "ignored": found.ignored,
        "hosts": as_choices(hosts_for(request.actor).values_list("pk", "name"), found.values.get("host", "")),
    }
    return render(request, "guests/snapshots_list.html", context)


def _files(one: Kept) -> list[int | None]:
    return [one.files_bytes] if one.kind == EXTERNAL else []


def _known(sizes: Iterable[int | None]) -> int | None:
    """The sum of those that are known; ``None`` where there are sizes and none is."""
    told = list(sizes)
    known = [size for size in told if size is not None]
    return sum(known) if known or not told else None


#: A line of the list as CSV.
CSV_COLUMNS: Columns = {
    "guest": "guest.name",
    "host": "guest.host.name",
    "name": "name",
    "created": "created",
    "kind": "kind",
    "by": "by",
    "held_bytes": "held_bytes",
    "held_at": "held_at",
    "files_bytes": "files_bytes",
}


@require_safe
@page()
def snapshots_csv(request: PageRequest) -> HttpResponseBase:
    """The whole list as it is filtered."""
    found: list[Kept] = snapshots_of(_guests(request).exact())
    return csv_answer("snapshots", CSV_COLUMNS, found)
