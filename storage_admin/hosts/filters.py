"""Filters by things that stand in the database: what does not exist for the asker is an error, not an empty list."""

from typing import Any

import django_filters
from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet
from django.forms import IntegerField, ModelChoiceField
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts.authentication import actor_of
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.selectors import hosts_for, pools_for


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
