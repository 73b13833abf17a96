"""Every error of the API in one shape: ``{"code", "detail", "fields"}``."""

import sys
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from rest_framework import exceptions, status
from rest_framework.response import Response
from rest_framework.views import set_rollback

from storage_admin.accounts import refusals
from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.models import ForbiddenError
from storage_admin.accounts.tries import TooManyTriesError
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError, NotFoundError, UnconfirmedError

#: Seconds after which a database that was locked is worth asking again.
RETRY_SECONDS = 5

NOT_FOUND = _("Not found, or no access. API addresses end with a slash.")


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """REST framework's exception handler.

    Returns:
        The answer, or ``None`` for a bug, which then shows as one.
    """
    answer = _away(error) or _answer(error, context)
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
    if status_code == status.HTTP_503_SERVICE_UNAVAILABLE:
        response["Retry-After"] = str(RETRY_SECONDS)
    if isinstance(error, TooManyTriesError):
        response["Retry-After"] = str(error.seconds)
    return response


def _answer(error: Exception, context: dict[str, Any]) -> tuple[str, int, str, dict[str, str]] | None:
    match error:
        case RefusedError() | UnconfirmedError() | InvalidError() | TooManyTriesError():
            return _conflict(error)
        case exceptions.ValidationError():
            fields = flat(error.detail)
            return "invalid", status.HTTP_400_BAD_REQUEST, _sentence(fields), fields
        case exceptions.ParseError() | exceptions.UnsupportedMediaType():
            return "invalid", status.HTTP_400_BAD_REQUEST, _parse_sentence(error), {}
        case exceptions.NotAcceptable():
            return "invalid", status.HTTP_406_NOT_ACCEPTABLE, gettext("Only JSON and YAML are available."), {}
        case exceptions.NotAuthenticated():
            detail = gettext("Sign in, or send the header “Authorization: Bearer TOKEN”.")
            return "not_authenticated", status.HTTP_401_UNAUTHORIZED, detail, {}
        case exceptions.AuthenticationFailed():
            return "not_authenticated", status.HTTP_401_UNAUTHORIZED, str(error.detail), {}
        case ForbiddenError() | exceptions.PermissionDenied() | PermissionDenied():
            return "forbidden", status.HTTP_403_FORBIDDEN, str(error) or gettext("This is not allowed."), {}
        case NotFoundError():
            return "not_found", status.HTTP_404_NOT_FOUND, error.detail, {}
        case Http404() | exceptions.NotFound():
            return "not_found", status.HTTP_404_NOT_FOUND, str(NOT_FOUND), {}
        case exceptions.MethodNotAllowed():
            return "method_not_allowed", status.HTTP_405_METHOD_NOT_ALLOWED, _not_allowed(context), {}
        case _:
            return None


def _away(error: Exception) -> tuple[str, int, str, dict[str, str]] | None:
    if not isinstance(error, OperationalError | InterfaceError):
        return None
    return "database_unavailable", status.HTTP_503_SERVICE_UNAVAILABLE, unavailable(error), {}


def unavailable(error: OperationalError | InterfaceError) -> str:
    """What a database that cannot be used means to whoever asked, in a sentence."""
    said = str(error).lower()
    if "locked" in said:
        why = gettext("The database is locked by another process.")
    elif any(word in said for word in ("full", "no space")):
        why = gettext("The disk of the database is full.")
    else:
        why = gettext("The database does not answer.")
    return gettext("{why} Try again in a moment.").format(why=why)


def server_error(request: HttpRequest) -> HttpResponse:
    """What nothing else has handled (``handler500``), wherever it happened: JSON for the API, a plain page else.

    A page needs no database. Without one, sessions and the audit trail fail before and after the views as well.
    """
    error = sys.exc_info()[1]
    away = isinstance(error, OperationalError | InterfaceError)
    code, number = ("database_unavailable", 503) if away else ("bug", 500)
    sentence = unavailable(error) if isinstance(error, OperationalError | InterfaceError) else ""
    if request.path_info.startswith("/api/"):
        detail = sentence or gettext("This is a bug in the dashboard. See its log for details.")
        answer: HttpResponse = JsonResponse({"code": code, "detail": detail, "fields": {}}, status=number)
    else:
        answer = render(None, "500.html", {"sentence": sentence}, status=number)
    if away:
        answer["Retry-After"] = str(RETRY_SECONDS)
    return answer


def _conflict(
    error: RefusedError | UnconfirmedError | InvalidError | TooManyTriesError,
) -> tuple[str, int, str, dict[str, str]]:
    if isinstance(error, TooManyTriesError):
        return "too_many_requests", status.HTTP_429_TOO_MANY_REQUESTS, error.detail, {}
    if isinstance(error, UnconfirmedError):
        return error.code, status.HTTP_409_CONFLICT, error.detail, error.shown
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
        return gettext("Send the body as JSON, with the header “Content-Type: application/json”.")
    return str(error.detail)


def _not_allowed(context: dict[str, Any]) -> str:
    view, request = context["view"], context["request"]
    if special := getattr(view, "not_allowed", {}).get(request.method):
        return str(special)
    answers = ", ".join(method for method in view.allowed_methods if method != "OPTIONS")
    return gettext("{path} does not support {method}. Supported: {answers}.").format(
        method=request.method, path=request.path, answers=answers
    )
