"""Every error of the API in one shape: ``{"code", "detail", "fields"}``."""

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404
from rest_framework import exceptions, status
from rest_framework.response import Response
from rest_framework.views import set_rollback

from storage_admin.accounts import refusals
from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.errors import AccountError
from storage_admin.accounts.roles import ForbiddenError
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.errors import InvalidError, NotFoundError, UnconfirmedError

NOT_FOUND = "There is nothing at this address, or not for you. Addresses of the API end with a slash."


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """REST framework's exception handler.

    Returns:
        The answer, or ``None`` for a bug, which then shows as one.
    """
    answer = _answer(error, context)
    if answer is None:
        return None
    request = context.get("request")
    if isinstance(error, ForbiddenError) and request is not None:
        refusals.forbidden(request, actor_of(request), str(error))
    code, status_code, detail, fields = answer
    set_rollback()
    response = Response({"code": code, "detail": detail, "fields": fields}, status=status_code)
    if header := getattr(error, "auth_header", None):
        response["WWW-Authenticate"] = header
    return response


def _answer(error: Exception, context: dict[str, Any]) -> tuple[str, int, str, dict[str, str]] | None:
    match error:
        case RefusedError() | UnconfirmedError() | AccountError():
            return _conflict(error)
        case InvalidError():
            return "invalid", status.HTTP_400_BAD_REQUEST, error.detail, error.fields
        case exceptions.ValidationError():
            fields = flat(error.detail)
            return "invalid", status.HTTP_400_BAD_REQUEST, _sentence(fields), fields
        case exceptions.ParseError() | exceptions.UnsupportedMediaType():
            return "invalid", status.HTTP_400_BAD_REQUEST, _parse_sentence(error), {}
        case exceptions.NotAcceptable():
            return "invalid", status.HTTP_406_NOT_ACCEPTABLE, "Only JSON or YAML can be had here.", {}
        case exceptions.NotAuthenticated():
            detail = "Sign in, or send the header “Authorization: Bearer TOKEN”."
            return "not_authenticated", status.HTTP_401_UNAUTHORIZED, detail, {}
        case exceptions.AuthenticationFailed():
            return "not_authenticated", status.HTTP_401_UNAUTHORIZED, str(error.detail), {}
        case ForbiddenError() | exceptions.PermissionDenied() | PermissionDenied():
            return "forbidden", status.HTTP_403_FORBIDDEN, str(error) or "This is not allowed.", {}
        case NotFoundError():
            return "not_found", status.HTTP_404_NOT_FOUND, error.detail, {}
        case Http404() | exceptions.NotFound():
            return "not_found", status.HTTP_404_NOT_FOUND, NOT_FOUND, {}
        case exceptions.MethodNotAllowed():
            return "method_not_allowed", status.HTTP_405_METHOD_NOT_ALLOWED, _not_allowed(context), {}
        case _:
            return None


def _conflict(error: RefusedError | UnconfirmedError | AccountError) -> tuple[str, int, str, dict[str, str]]:
    if isinstance(error, UnconfirmedError):
        return "host_key_unconfirmed", status.HTTP_409_CONFLICT, error.detail, error.shown
    # A refusal is a conflict with how things stand; input that nothing could make right is invalid.
    refused = status.HTTP_400_BAD_REQUEST if error.code == "invalid" else status.HTTP_409_CONFLICT
    return error.code, refused, error.detail, getattr(error, "fields", {})


def flat(detail: Any, prefix: str = "") -> dict[str, str]:
    """Nested messages by dotted field name; those of no field stand under ``body``."""
    if isinstance(detail, dict):
        found: dict[str, str] = {}
        for name, inner in detail.items():
            shown = "" if name == "non_field_errors" else str(name)
            found |= flat(inner, ".".join(part for part in (prefix, shown) if part))
        return found
    messages = detail if isinstance(detail, list | tuple) else [detail]
    if any(isinstance(message, dict | list) for message in messages):
        found = {}
        for number, inner in enumerate(messages):
            if inner:
                found |= flat(inner, f"{prefix}.{number}" if prefix else str(number))
        return found
    return {prefix or "body": " ".join(str(message) for message in messages)}


def _sentence(fields: dict[str, str]) -> str:
    return " ".join(text if name == "body" else f"{name}: {text}" for name, text in fields.items())


def _parse_sentence(error: exceptions.APIException) -> str:
    if isinstance(error, exceptions.UnsupportedMediaType):
        return "Send the body as JSON, with the header “Content-Type: application/json”."
    return str(error.detail)


def _not_allowed(context: dict[str, Any]) -> str:
    view, request = context["view"], context["request"]
    if special := getattr(view, "not_allowed", {}).get(request.method):
        return str(special)
    answers = ", ".join(method for method in view.allowed_methods if method != "OPTIONS")
    return f"{request.method} does not work on {request.path}; it answers {answers}."
