"""Filters of a list, of which only those that were given are set up."""

from collections.abc import Mapping
from typing import Any

import django_filters


class GivenFilters(django_filters.FilterSet):  # type: ignore[misc]  # an untyped library
    """A list knows a dozen filters, and most requests give one: copying all of them with their fields takes longer."""

    base_filters: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | None = None, *args: Any, **options: Any) -> None:
        known: dict[str, Any] = type(self).base_filters
        self.base_filters = {name: known[name] for name in known if name in (data or {})}
        super().__init__(data, *args, **options)
