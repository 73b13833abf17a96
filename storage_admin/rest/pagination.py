"""Pages of lists. A value that makes no sense is an error, not the first page."""

from typing import Any

from django.db.models import Model, QuerySet
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, inline_serializer
from rest_framework import serializers
from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.pagination import CursorPagination, LimitOffsetPagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param
from rest_framework.views import APIView

DEFAULT_LIMIT = 50
MAX_LIMIT = 1000
#: The largest number that databases take.
LARGEST = (1 << 63) - 1


def whole_number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """A number from the query string.

    Raises:
        ValidationError: it is none, or out of bounds.
    """
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 20 and least <= int(given) <= most):
        raise ValidationError(
            {name: _("Must be a whole number from {least} to {most}.").format(least=least, most=most)}
        )
    return int(given)


def _parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": schema}


LIMIT_PARAMETER = _parameter(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    f"Number of results, at most {MAX_LIMIT}.",
)
OFFSET_PARAMETER = _parameter(
    "offset",
    {"type": "integer", "minimum": 0, "maximum": LARGEST - MAX_LIMIT, "default": 0},
    "Number of results to skip.",
)


#: The same for endpoints that are no list of their own.
PAGE = [
    OpenApiParameter(one["name"], one["schema"], description=one["description"])
    for one in (LIMIT_PARAMETER, OFFSET_PARAMETER)
]


class LimitPagination(LimitOffsetPagination):
    """``?limit=`` (50 unless told, at most 1000) and ``?offset=``.

    A view with a method ``listed(rows)`` gives what is counted and cut into pages instead of the rows.
    """

    default_limit = DEFAULT_LIMIT
    max_limit = MAX_LIMIT

    def get_limit(self, request: Request) -> int:
        return whole_number(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)

    def get_offset(self, request: Request) -> int:
        return whole_number(request, "offset", 0, 0, LARGEST - MAX_LIMIT)

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any]:
        self.request = request
        self.limit = self.get_limit(request)
        self.offset = self.get_offset(request)
        listed = getattr(view, "listed", None)
        rows = listed(queryset) if listed else queryset
        self.count = self.get_count(rows)
        return list(rows[self.offset : self.offset + self.limit]) if self.offset < self.count else []

    def get_schema_operation_parameters(self, _view: APIView) -> list[dict[str, Any]]:
        return [LIMIT_PARAMETER, OFFSET_PARAMETER]

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        return envelope(schema, count={"type": "integer"})


class JobPagination(CursorPagination):
    """``?cursor=`` and ``?limit=``: new jobs at the top do not shift the pages below them."""

    page_size = DEFAULT_LIMIT
    page_size_query_param = "limit"
    ordering = "-id"

    def get_page_size(self, request: Request) -> int:
        return whole_number(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any] | None:
        self.count = queryset.count()
        return super().paginate_queryset(queryset, request, view)

    def get_ordering(self, request: Request, *_about: Any) -> tuple[str, ...]:
        given = request.query_params.get("ordering", "-id")
        if given not in {"id", "-id"}:
            raise ValidationError({"ordering": _("Must be id or -id.")})
        return (given,)

    def get_schema_operation_parameters(self, _view: APIView) -> list[dict[str, Any]]:
        cursor = _parameter("cursor", {"type": "string"}, _("Cursor from “next” or “previous” of a response."))
        ordering = _parameter(
            "ordering", {"type": "string", "enum": ["id", "-id"], "default": "-id"}, _("Default: newest first.")
        )
        return [LIMIT_PARAMETER, cursor, ordering]

    def decode_cursor(self, request: Request) -> Any:
        try:
            cursor = super().decode_cursor(request)
        except NotFound:
            raise ValidationError(
                {"cursor": _("Invalid cursor. Use the one in “next” or “previous” of a response.")}
            ) from None
        position = str(cursor.position or 0) if cursor else "0"
        if not (position.isascii() and position.isdigit() and int(position) <= LARGEST):
            raise ValidationError({"cursor": _("Invalid cursor. Use the one in “next” or “previous” of a response.")})
        return cursor

    def get_paginated_response(self, data: Any) -> Response:
        links = {"next": self.get_next_link(), "previous": self.get_previous_link()}
        return Response({"count": self.count, **links, "results": data})

    def get_paginated_response_schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        return envelope(schema, count={"type": "integer"})


def after_page(request: Request, rows: QuerySet[Model], serialize: Any) -> Response:
    """Rows in the order of their ids, as far as ``?limit=``; ``next`` continues behind the last of them.

    Args:
        rows: what is to be shown at all, from ``?after=`` on.
        serialize: makes a list of the shown rows ready for the answer.
    """
    limit = whole_number(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    page = list(rows[: limit + 1])
    more, page = len(page) > limit, page[:limit]
    following = replace_query_param(request.build_absolute_uri(), "after", page[-1].pk) if more else None
    return Response({"count": rows.count(), "next": following, "previous": None, "results": serialize(page)})


def envelope(schema: dict[str, Any], **fields: dict[str, Any]) -> dict[str, Any]:
    """The schema of a list's answer."""
    link = {"type": ["string", "null"], "format": "uri"}
    return {
        "type": "object",
        "required": [*fields, "next", "previous", "results"],
        "properties": {**fields, "next": link, "previous": link, "results": schema},
    }


def page_of(shape: type[serializers.Serializer[Any]]) -> Any:
    """A page of these, for the schema of endpoints that are no list of their own.

    The shape is given itself, not by a reference to its name: a name that nothing else mentions is not in the schema,
    and programs that are generated from it leave out what refers to it.
    """
    name = shape.__name__.removesuffix("Serializer")
    fields: dict[str, serializers.Field[Any, Any, Any, Any]] = {
        "count": serializers.IntegerField(),
        "next": serializers.URLField(allow_null=True, read_only=True),
        "previous": serializers.URLField(allow_null=True, read_only=True),
        "results": shape(many=True),
    }
    return inline_serializer(f"{name}Page", fields)
