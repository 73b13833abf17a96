"""Signing in by a site's OpenID Connect provider: discovery, code flow with PKCE, a signed ID token.

django-allauth speaks the protocol. Who is let in, and as what, ``directory.py`` decides.
"""

import logging
from typing import Any

from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.internal import jwtkit
from allauth.socialaccount.models import SocialAccount, SocialApp
from allauth.socialaccount.providers.base import AuthProcess
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from allauth.socialaccount.providers.oauth2.views import OAuth2CallbackView, OAuth2LoginView
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.urls import path
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe
from requests import RequestException

from storage_admin.accounts import directory, tries
from storage_admin.accounts.directory import DeniedError

log = logging.getLogger(__name__)
#: As it stands in the callback's address.
PROVIDER = "oidc"
AWAY = _("The sign-in at your organisation was not completed. Try again, or sign in with a local account.")


class SiteAdapter(DefaultSocialAccountAdapter):  # type: ignore[misc]
    """One provider, of the settings; an account of it is one that it made."""

    def list_apps(self, _request: Any, provider: Any = None, client_id: Any = None) -> list[Any]:  # noqa: ARG002 (as it is called)
        if not settings.OIDC_URL or provider not in {None, PROVIDER, "openid_connect"}:
            return []
        about = {
            "server_url": settings.OIDC_URL, "oauth_pkce_enabled": True, "scope": settings.OIDC_SCOPES,
            "fetch_userinfo": True,
        }  # fmt: skip
        return [
            SocialApp(
                provider="openid_connect", provider_id=PROVIDER, name=settings.OIDC_NAME,
                client_id=settings.OIDC_CLIENT_ID, secret=settings.OIDC_CLIENT_SECRET, settings=about,
            )
        ]  # fmt: skip

    def is_open_for_signup(self, _request: Any, _login: Any) -> bool:
        return False  # accounts are made below, or not at all

    def can_authenticate_by_email(self, _login: Any, _email: str) -> bool:
        return False  # whoever may choose their address there would choose whose account they get here

    def pre_social_login(self, _request: HttpRequest, sociallogin: Any) -> None:
        """Makes or updates the account; raises DeniedError where nobody is let in."""
        if sociallogin.state.get("process") != AuthProcess.LOGIN:
            raise DeniedError(gettext("This provider is only for sign-in. Accounts cannot be linked to it."))
        told = sociallogin.account.extra_data
        token, more = told.get("id_token") or {}, told.get("userinfo") or {}
        if not token or token.get("sub") != more.get("sub"):
            raise DeniedError(gettext("The identity data of your organisation is inconsistent. Ask an admin."))
        claims = more | token
        user = directory.admit(
            directory.OIDC, f"{token['iss']} {token['sub']}", str(claims.get("preferred_username") or token["sub"]),
            _groups(claims.get(settings.OIDC_GROUPS_CLAIM)), email=str(claims.get("email") or ""),
        )  # fmt: skip
        account, __ = SocialAccount.objects.get_or_create(
            provider=sociallogin.account.provider, uid=sociallogin.account.uid, defaults={"user": user}
        )
        if account.user_id != user.pk:
            # The same subject of another provider that stood in the settings before.
            account.user = user
        account.extra_data = {}  # nothing of what was told is kept but what the user's row says
        account.save()
        sociallogin.account, sociallogin.user = account, user

    def on_authentication_error(self, _request: Any, _provider: Any, **about: Any) -> None:
        log.warning("sign-in by OpenID Connect failed: %s", about.get("exception") or about.get("error"))
        raise DeniedError(AWAY)


class _Protocol(OpenIDConnectOAuth2Adapter):  # type: ignore[misc]
    """With the token's signature looked at in any case, also where it came over TLS."""

    def _decode_id_token(self, app: Any, id_token: str) -> dict[str, Any]:
        config = self.openid_config
        decoded: dict[str, Any] = jwtkit.verify_and_decode(
            credential=id_token, keys_url=config["jwks_uri"], issuer=config["issuer"], audience=app.client_id,
            lookup_kid=jwtkit.lookup_kid_jwk,
        )  # fmt: skip
        return decoded


def _groups(claim: Any) -> list[str]:
    """Groups are a list of names; a single one may stand there by itself."""
    found = [claim] if isinstance(claim, str) else claim if isinstance(claim, list) else []
    return [group for group in found if isinstance(group, str)]


def _view(kind: Any, request: HttpRequest) -> HttpResponse:
    if not settings.OIDC_URL:
        raise Http404
    tries.count(request)  # each asks the provider, while a thread waits
    try:
        answer: HttpResponse = kind.adapter_view(_Protocol(request, PROVIDER))(request)
    except ImmediateHttpResponse as found:
        return found.response  # type: ignore[no-any-return]
    except (RequestException, OAuth2Error, KeyError) as error:
        log.warning("OpenID Connect: %s: %s", type(error).__name__, error)
        raise DeniedError(AWAY) from error
    return answer


@require_safe
@login_not_required
def begin(request: HttpRequest, **_provider: str) -> HttpResponse:
    """Sends the browser to the provider. Of the address only where to go afterwards is taken."""
    wanted = QueryDict(mutable=True)
    wanted["next"] = request.GET.get("next", "")
    request.GET = wanted  # type: ignore[assignment]
    return _view(OAuth2LoginView, request)


@require_safe
@login_not_required
def come_back(request: HttpRequest, **_provider: str) -> HttpResponse:
    """Where the provider sends the browser back to."""
    return _view(OAuth2CallbackView, request)


#: By the names that django-allauth knows them by.
urlpatterns = [
    path("login/sso/<slug:provider_id>/", begin, name="openid_connect_login"),
    path("login/sso/<slug:provider_id>/callback/", come_back, name="openid_connect_callback"),
]
