"""How a request proves who sends it: a token, or the browser's session."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.translation import gettext as _
from rest_framework import authentication, exceptions
from rest_framework.request import Request

from storage_admin.accounts import refusals
from storage_admin.accounts.addresses import address_of
from storage_admin.accounts.models import Actor, Token, User
from storage_admin.accounts.services import digest_of

#: A token's last use is written at most this often, so that reading stays reading.
LAST_USED_EVERY = timedelta(minutes=5)


class TokenUser:
    """Stands in ``request.user`` for a token: authenticated, and nobody's account."""

    is_authenticated = True
    is_active = True
    is_anonymous = False
    pk = None

    def __init__(self, token: Token) -> None:
        self.token = token
        self.username = f"token {token.name}"
        self.actor = token.actor


def sends_token(request: Request | HttpRequest) -> bool:
    """Whether a request is judged by the token in it alone: it is refused where that opens nothing, whoever is signed
    in.
    """
    return request.headers.get("Authorization", "").partition(" ")[0].lower() == "bearer"


class TokenAuthentication(authentication.BaseAuthentication):
    """``Authorization: Bearer TOKEN``."""

    def authenticate(self, request: Request) -> tuple[TokenUser, Token] | None:
        if not sends_token(request):
            return None
        secret = request.headers["Authorization"].partition(" ")[2]
        token = Token.objects.filter(digest=digest_of(secret.strip())).order_by().first()
        if token is None:
            refusals.token_refused(request, None)
            raise exceptions.AuthenticationFailed(_("Unknown token: it was deleted or mistyped."))
        if token.expired:
            refusals.token_refused(request, token.name)
            raise exceptions.AuthenticationFailed(
                _("The token {token} has expired: ask an admin for a new one.").format(token=token.name)
            )
        now = timezone.now()
        if token.last_used is None or now - token.last_used > LAST_USED_EVERY:
            Token.objects.filter(pk=token.pk).update(last_used=now)
        return TokenUser(token), token

    def authenticate_header(self, _request: Request) -> str:
        return "Bearer"


def actor_of(request: Request | HttpRequest) -> Actor:
    """Who sends an authenticated request.

    Raises:
        TypeError: it is not authenticated, which the caller had to make sure of.
    """
    user: Any = request.user
    if isinstance(user, User | TokenUser):
        return replace(user.actor, address=address_of(request))
    raise TypeError("the request is not authenticated")
