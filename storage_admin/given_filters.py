"""Filters of a list, of which only those that were given are set up; yes and no; and its order."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import django_filters
from django.db.models import F, Model, OrderBy, QuerySet

M = TypeVar("M", bound=Model)


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


def in_order(rows: QuerySet[M], columns: Mapping[str, str], wanted: str, nullable: Collection[str] = ()) -> QuerySet[M]:
    """The rows by one of the columns that these names mean, downwards with a ``-`` before it; what is equal, by its id
    in the same direction.

    Args:
        nullable: columns in which what is unknown comes last, either way.

    Raises:
        KeyError: the list cannot be ordered by that.
    """
    down, column = wanted.startswith("-"), columns[wanted.removeprefix("-")]
    sign = "-" if down else ""
    if column in nullable:
        return rows.order_by(OrderBy(F(column), descending=down, nulls_last=True), f"{sign}id")
    return rows.order_by(*dict.fromkeys((f"{sign}{column}", f"{sign}id")))
