"""What people do with their own second factor, in the audit trail."""

from typing import Any

from allauth.mfa import signals
from django.http import HttpRequest

from storage_admin.accounts import second_factor
from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.models import audit


def listen() -> None:
    """Has django-allauth tell what is added, removed and made anew."""
    signals.authenticator_added.connect(_added)
    signals.authenticator_removed.connect(_removed)
    signals.authenticator_reset.connect(_made_anew)


def _added(request: HttpRequest, authenticator: Any, **_more: Any) -> None:
    if authenticator.type != authenticator.Type.RECOVERY_CODES:
        request.session.pop(second_factor.FIRST, None)
    _write(request, authenticator, "second factor added")


def _removed(request: HttpRequest, authenticator: Any, **_more: Any) -> None:
    _write(request, authenticator, "second factor removed")


def _made_anew(request: HttpRequest, authenticator: Any, **_more: Any) -> None:
    _write(request, authenticator, "recovery codes made anew")


def _write(request: HttpRequest, authenticator: Any, what: str) -> None:
    actor = actor_of(request)
    audit(actor, what, actor.name, after={"kind": second_factor.KINDS[authenticator.type]})
