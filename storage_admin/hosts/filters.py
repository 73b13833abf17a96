"""Filters by things that stand in the database: what does not exist for the asker is an error, not an empty list; and
those of the list of hosts, for the API and the page alike.
"""

from typing import Any

import django_filters
from django.core.exceptions import ValidationError
from django.db.models import F, Model, OrderBy, Q, QuerySet
from django.forms import IntegerField, ModelChoiceField
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts.authentication import actor_of
from storage_admin.given_filters import GivenFilters, Order
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.selectors import hosts_for, pools_for

#: What the list of hosts can be ordered by.
ORDERINGS = ("name", "slug", "status", "last_seen", "id")


class RowField(ModelChoiceField):  # type: ignore[type-arg]
    """The row of an id, or of a slug where the model has one."""

    def to_python(self, value: Any) -> Model | None:
        if value in self.empty_values:
            return None
        text = str(value)
        rows: QuerySet[Any] | None = self.queryset
        found: Model | None = None
        if rows is not None and text.isascii() and text.isdigit():
            found = rows.filter(pk=text).first()
        elif rows is not None and rows.model is Host and text.isprintable():  # PostgreSQL takes no NUL
            found = rows.filter(slug=text).first()
        if found is None:
            raise ValidationError(_("Not found, or no access."))
        return found


class RowFilter(django_filters.ModelChoiceFilter):  # type: ignore[misc]  # an untyped library
    """Rows that belong to one of those which exist for the asker."""

    field_class = RowField


class WholeNumberFilter(django_filters.NumberFilter):  # type: ignore[misc]  # an untyped library
    """By a whole number that the database can compare."""

    field_class = IntegerField

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"min_value": 0, "max_value": (1 << 63) - 1} | options))

    def get_max_validator(self) -> None:
        """None of its own: ``max_value`` says it."""


def HostFilter(**options: Any) -> RowFilter:  # noqa: N802 (reads as a filter where it is used)
    """By host: id or slug."""
    return RowFilter(queryset=_hosts, label=_("Id or slug of a host."), **options)


def PoolFilter(**options: Any) -> RowFilter:  # noqa: N802
    """By pool: id."""
    return RowFilter(queryset=_pools, label=_("Id of a pool."), **options)


def _hosts(request: HttpRequest | None) -> QuerySet[Host]:
    return Host.objects.none() if request is None else hosts_for(actor_of(request))


def _pools(request: HttpRequest | None) -> QuerySet[StoragePool]:
    return StoragePool.objects.none() if request is None else pools_for(actor_of(request))


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
