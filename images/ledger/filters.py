"""Filters and order of the ledger, for the API and the page alike."""

from typing import Any

import django_filters
from django.db.models import Q, QuerySet, Value
from django.db.models.lookups import Exact
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field

from images.ledger.selectors import HELD, ORDERINGS, POLICY, ordered, unindexed, with_image, with_number
from storage_admin.given_filters import Order, YesOrNo
from storage_admin.hosts.filters import HostFilter, PoolFilter, WholeNumberFilter
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job
from storage_admin.moments import period_filters


class LedgerFilters(period_filters("at")):  # type: ignore[misc]  # an untyped library
    """``from`` and ``to`` are of when space became free or was taken; of what is held or undone, of the job's end."""

    host = HostFilter(method="by_host")
    pool = PoolFilter(method="by_pool")
    image = WholeNumberFilter(method="by_image", label=_("Id of an image."))
    kind = django_filters.ChoiceFilter(choices=lambda: kinds.titles().items(), method="by_kind")
    by = django_filters.CharFilter(
        field_name="created_by", max_length=150, label=_("User, token or policy that requested the job (full name).")
    )
    policy = django_filters.CharFilter(method="by_policy", max_length=100, label=_("Full name of a policy."))
    held = YesOrNo(method="by_held", label=_("Whether an undo copy holds the space."))
    ordering = Order(ORDERINGS, label=_("Unknown values come last."))

    def by_host(self, rows: QuerySet[Job], _name: str, host: Host) -> QuerySet[Job]:
        return rows.filter(with_number("host_id", host.pk))

    def by_kind(self, rows: QuerySet[Job], _name: str, name: str) -> QuerySet[Job]:
        return rows.filter(Exact(unindexed("kind"), Value(name)))

    @extend_schema_field({"type": "integer", "description": "Id of a pool."})
    def by_pool(self, rows: QuerySet[Job], _name: str, pool: StoragePool) -> QuerySet[Job]:
        return rows.filter(with_number("space_pool_id", pool.pk))

    def by_image(self, rows: QuerySet[Job], _name: str, value: Any) -> QuerySet[Job]:
        return rows.filter(with_image(int(value)))

    def by_policy(self, rows: QuerySet[Job], _name: str, name: str) -> QuerySet[Job]:
        return rows.filter(created_by=f"{POLICY}{name}")

    def by_held(self, rows: QuerySet[Job], _name: str, value: str) -> QuerySet[Job]:
        return rows.filter(HELD if value == "true" else ~Q(HELD))

    def by_order(self, rows: QuerySet[Job], _name: str, value: str) -> QuerySet[Job]:
        return ordered(rows, value)


class SumFilters(LedgerFilters):
    """The same without ``held``, by which the page only chooses what it lists: sums tell both apart."""

    held = None  # type: ignore[assignment]  # as django-filter takes a filter away
