"""Filters of the list of hosts, for the API and the page alike."""

import django_filters
from django.db.models import F, OrderBy, Q, QuerySet
from django.utils.translation import gettext_lazy as _

from storage_admin.given_filters import GivenFilters, Order
from storage_admin.hosts.models import Host

ORDERINGS = ("name", "slug", "status", "last_seen", "id")


class HostFilters(GivenFilters):
    """Filters, search and order of the list of hosts."""

    kind = django_filters.ChoiceFilter(choices=Host.Kind.choices)
    status = django_filters.ChoiceFilter(choices=Host.Status.choices)
    search = django_filters.CharFilter(method="by_text", max_length=200, label=_("Part of the name, slug or address."))
    ordering = Order(ORDERINGS)

    def by_text(self, rows: QuerySet[Host], _name: str, value: str) -> QuerySet[Host]:
        return rows.filter(Q(name__icontains=value) | Q(slug__icontains=value) | Q(address__icontains=value))

    def by_order(self, rows: QuerySet[Host], _name: str, value: str) -> QuerySet[Host]:
        down = value.startswith("-")
        return rows.order_by(OrderBy(F(value.removeprefix("-")), descending=down, nulls_last=True), "id")
