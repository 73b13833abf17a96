"""Filters of a list, of which only those that were given are set up; yes and no; and its order."""

from collections.abc import Iterable, Mapping
from typing import Any

import django_filters
from django.db.models import QuerySet


class GivenFilters(django_filters.FilterSet):  # type: ignore[misc]  # an untyped library
    """A list knows a dozen filters, and most requests give one: copying all of them with their fields takes longer."""

    base_filters: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None, *args: Any, **options: Any) -> None:
        known: dict[str, Any] = type(self).base_filters
        self.base_filters = {name: known[name] for name in known if name in (data or {})}
        super().__init__(data, *args, **options)


class YesOrNo(django_filters.ChoiceFilter):  # type: ignore[misc]  # an untyped library
    """``true`` or ``false``, as a method of the list takes it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(choices=[("true", "true"), ("false", "false")], **options)


class Order(django_filters.ChoiceFilter):  # type: ignore[misc]  # an untyped library
    """By which of the names a list is ordered, downwards with a ``-`` before it, as its ``by_order`` does."""

    def __init__(self, names: Iterable[str], **options: Any) -> None:
        choices = [(sign + name, sign + name) for name in names for sign in ("", "-")]
        super().__init__(choices=choices, method="by_order", **options)


def in_order(rows: QuerySet[Any], columns: Mapping[str, str], wanted: str) -> QuerySet[Any]:
    """The rows by one of the columns that these names mean; what is equal, by its id in the same direction."""
    sign = "-" if wanted.startswith("-") else ""
    column = columns[wanted.removeprefix("-")]
    return rows.order_by(*dict.fromkeys((f"{sign}{column}", f"{sign}id")))
