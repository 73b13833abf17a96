"""Filters of lists of images and guests, for the API and the pages alike."""

from typing import Any

import django_filters
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field

from images.models import Image
from images.orphans.selectors import unchanged_for
from images.scan import shared_storages
from images.selectors import ORDERINGS, at_least, at_most, of_host, ordered, with_text
from storage_admin.accounts.authentication import actor_of
from storage_admin.given_filters import GivenFilters, Order, in_order
from storage_admin.guests.models import Guest
from storage_admin.hosts.filters import HostFilter, PoolFilter, RowFilter, WholeNumberFilter
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.selectors import in_scope

#: What a scan may find an image to be.
FORMATS = ("qcow2", "raw", "vmdk", "vdi", "vpc", "vhdx", "qed", "luks", "parallels", "subvol", "unknown")

#: What a guest may be doing: libvirt's words, then Proxmox VE's.
GUEST_STATES = (
    "no state", "running", "idle", "paused", "in shutdown", "shut off", "crashed", "pmsuspended",
    "stopped", "suspended", "mounted", "unknown",
)  # fmt: skip

#: By what a list of guests can be ordered, and the columns that this means.
GUEST_ORDERINGS = {"name": "name", "state": "state", "kind": "kind", "host": "host__name", "id": "id"}

#: By what a list of pools can be ordered; of these, sizes are not always known.
POOL_SIZES = ("capacity_bytes", "available_bytes", "allocated_bytes", "virtual_bytes")
POOL_ORDERINGS = {name: name for name in ("name", "path", *POOL_SIZES, "id")}

#: Yes, no, or not known. ``null`` and ``unknown`` mean the same.
ANSWERS = {"true": True, "false": False, "null": None, "unknown": None}


def _guests(request: HttpRequest | None) -> QuerySet[Guest]:
    return Guest.objects.none() if request is None else in_scope(Guest.objects.all(), actor_of(request))


class ImageFilters(GivenFilters):
    """Filters, search and order of the list of images."""

    host = HostFilter(method="by_host")
    pool = PoolFilter(method="by_pool")
    guest = RowFilter(queryset=_guests, method="by_guest", label=_("Id of a guest."))
    format = django_filters.ChoiceFilter(
        choices=[(name, name) for name in FORMATS],
        method="by_format",
        label=_("The declared format, else the detected one."),
    )
    state = django_filters.ChoiceFilter(choices=Image.State.choices)
    min_chain_depth = WholeNumberFilter(field_name="chain_depth", method="by_least")
    max_chain_depth = WholeNumberFilter(field_name="chain_depth", method="by_most")
    min_reclaimable = WholeNumberFilter(
        field_name="reclaimable_bytes", method="by_least", label=_("Bytes. Images that are not analyzed are left out.")
    )
    in_use = django_filters.ChoiceFilter(choices=[(name, name) for name in ANSWERS], method="by_answer")
    orphan = django_filters.ChoiceFilter(choices=[(name, name) for name in ANSWERS], method="by_answer")
    search = django_filters.CharFilter(method="by_text", max_length=1100, label=_("Part of the name or path."))
    ordering = Order(ORDERINGS, label=_("Unknown values come last."))

    def by_host(self, rows: QuerySet[Image], _name: str, host: Host) -> QuerySet[Image]:
        return rows.filter(of_host(host.pk))

    @extend_schema_field(OpenApiTypes.INT64)
    def by_pool(self, rows: QuerySet[Image], _name: str, pool: StoragePool) -> QuerySet[Image]:
        return rows.filter(pool=shared_storages.listed_in(pool))

    @extend_schema_field(OpenApiTypes.INT64)
    def by_guest(self, rows: QuerySet[Image], _name: str, guest: Guest) -> QuerySet[Image]:
        return rows.filter(pk__in=guest.disks.filter(use__isnull=False).values("use__image_id"))

    def by_format(self, rows: QuerySet[Image], _name: str, value: str) -> QuerySet[Image]:
        return rows.filter(Q(declared_format=value) | Q(declared_format="", format=value))

    def by_answer(self, rows: QuerySet[Image], name: str, value: str) -> QuerySet[Image]:
        answer = ANSWERS[value]
        return rows.filter(**({f"{name}__isnull": True} if answer is None else {name: answer}))

    def by_least(self, rows: QuerySet[Image], column: str, value: int) -> QuerySet[Image]:
        return rows.filter(at_least(column, value))

    def by_most(self, rows: QuerySet[Image], column: str, value: int) -> QuerySet[Image]:
        return rows.filter(at_most(column, value))

    def by_text(self, rows: QuerySet[Image], _name: str, value: str) -> QuerySet[Image]:
        return rows.filter(with_text(value))

    def by_order(self, rows: QuerySet[Image], _name: str, value: str) -> QuerySet[Image]:
        return ordered(rows, value)


class OrphanFilters(GivenFilters):
    """Filters of the list of orphans."""

    host = HostFilter(method="by_host")
    pool = PoolFilter(method="by_pool")
    age = WholeNumberFilter(method="by_age", max_value=36_500)

    by_host, by_pool = ImageFilters.by_host, ImageFilters.by_pool

    def by_age(self, rows: QuerySet[Image], _name: str, days: int) -> QuerySet[Image]:
        return unchanged_for(rows, days)


class GuestsByName(GivenFilters):
    """Guests by their host and name, where something of theirs is listed."""

    host = HostFilter()
    search = django_filters.CharFilter(
        method="by_text", max_length=200, label=_("Part of the name, or the beginning of the UUID.")
    )

    def by_text(self, rows: QuerySet[Guest], _name: str, value: str) -> QuerySet[Guest]:
        return rows.filter(Q(name__icontains=value) | Q(uid__istartswith=value))


class GuestFilters(GuestsByName):
    """Filters and search of the list of guests."""

    kind = django_filters.ChoiceFilter(choices=Guest.Kind.choices)
    state = django_filters.ChoiceFilter(choices=[(state, state) for state in GUEST_STATES])
    ordering = Order(GUEST_ORDERINGS)

    def by_order(self, rows: QuerySet[Guest], _name: str, value: str) -> QuerySet[Guest]:
        return in_order(rows, GUEST_ORDERINGS, value)


class PoolFilters(GivenFilters):
    """Filters and search of the list of pools."""

    host = HostFilter()
    search = django_filters.CharFilter(method="by_text", max_length=200, label=_("Part of the name or path."))
    ordering = Order(POOL_ORDERINGS, label=_("Unknown values come last."))

    def by_order(self, rows: QuerySet[Any], _name: str, value: str) -> QuerySet[Any]:
        return in_order(rows, POOL_ORDERINGS, value, nullable=POOL_SIZES)

    def by_text(self, rows: QuerySet[Any], _name: str, value: str) -> QuerySet[Any]:
        return rows.filter(Q(name__icontains=value) | Q(path__icontains=value))
