"""Bodies that take what they say and nothing else."""

import math
from typing import Any

from django.utils.translation import gettext as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers
from rest_framework.fields import empty
from rest_framework.request import Request


class Body(serializers.Serializer[Any]):
    """A request's body. Keys that it does not know are an error: a typo must not pass as a default."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, dict) and (unknown := sorted(str(key) for key in data if key not in self.fields)):
            known = ", ".join(self.fields) or "nothing"
            raise serializers.ValidationError(
                dict.fromkeys(unknown, _("Unknown field. Known fields: {known}.").format(known=known))
            )
        return super().to_internal_value(data)

    @classmethod
    def of(cls, request: Request, **context: Any) -> dict[str, Any]:
        """What the body of a request says.

        Raises:
            ValidationError: it is not of this shape; it names each field.
        """
        given = cls(data=request.data, context=context)
        given.is_valid(raise_exception=True)
        return dict(given.validated_data)


class StrictBoolean(serializers.BooleanField):
    """``true`` or ``false``, not a text or number that looks like one."""

    def run_validation(self, data: Any = empty) -> Any:
        if data is not empty and not isinstance(data, bool):
            raise serializers.ValidationError(_("Must be true or false."))
        return super().run_validation(data)


class StrictInteger(serializers.IntegerField):
    """A whole number that the database can keep."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"min_value": -(1 << 63), "max_value": (1 << 63) - 1} | options))

    def to_internal_value(self, data: Any) -> int:
        if isinstance(data, bool) or not isinstance(data, int):
            raise serializers.ValidationError(_("Must be a whole number."))
        return data


class StrictNumber(serializers.FloatField):
    """A number, not a text or truth value that looks like one, and neither infinite nor none at all."""

    def to_internal_value(self, data: Any) -> float:
        if isinstance(data, bool) or not isinstance(data, int | float):
            raise serializers.ValidationError(_("Must be a number."))
        try:
            number = float(data)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise serializers.ValidationError(_("Must be finite."))
        return number


class StrictText(serializers.CharField):
    """A text, not a number that is written like one."""

    def to_internal_value(self, data: Any) -> str:
        if not isinstance(data, str):
            raise serializers.ValidationError(_("Must be text."))
        return super().to_internal_value(data)


@extend_schema_field({"type": ["string", "null"]})
class TextOrNull(serializers.Field[Any, Any, "str | None", Any]):
    """Read only: an empty text stands for something that is not there or not known, and is ``null``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"read_only": True, "allow_null": True} | options))

    def to_representation(self, value: Any) -> str | None:
        return str(value) if value else None
