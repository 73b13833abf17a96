"""django-allauth's pages around a second factor, as far as they are used, with what is recorded of them here."""

from typing import Any

from allauth.account.views import ReauthenticateView
from allauth.mfa.adapter import get_adapter
from allauth.mfa.base.views import AuthenticateView, IndexView
from allauth.mfa.base.views import ReauthenticateView as CodeReauthenticateView
from allauth.mfa.models import Authenticator
from allauth.mfa.recovery_codes.views import (
    DownloadRecoveryCodesView,
    GenerateRecoveryCodesView,
    ViewRecoveryCodesView,
)
from allauth.mfa.totp.views import ActivateTOTPView, DeactivateTOTPView
from allauth.mfa.webauthn.forms import LoginWebAuthnForm
from allauth.mfa.webauthn.internal.auth import get_state
from allauth.mfa.webauthn.views import (
    AddWebAuthnView,
    LoginWebAuthnView,
    ReauthenticateWebAuthnView,
    RemoveWebAuthnView,
)
from axes.handlers.proxy import AxesProxyHandler
from django.contrib import messages
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from storage_admin.accounts import lockouts, second_factor


class SecondStepView(AuthenticateView):  # type: ignore[misc]
    """After a right password: the code or the passkey. Wrong ones count as wrong passwords do."""

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        credentials = {"username": self.stage.login.user.username}
        if not AxesProxyHandler.is_allowed(request, credentials):
            request.axes_credentials = credentials  # type: ignore[attr-defined]
            return lockouts.answer(request)
        answer: HttpResponse = super().post(request, *args, **kwargs)
        return answer

    def form_invalid(self, form: Any) -> HttpResponse:
        lockouts.second_factor_wrong(self.request, self.stage.login.user)
        answer: HttpResponse = super().form_invalid(form)
        return answer


class ConfirmView(ReauthenticateView):  # type: ignore[misc]
    """The password again, before a second factor is changed."""

    def form_invalid(self, form: Any) -> HttpResponse:
        # Where axes has locked the name out, its middleware answers, and records that.
        if not getattr(self.request, "axes_locked_out", False):
            lockouts.password_wrong(self.request, self.request.user, "to confirm it")
        answer: HttpResponse = super().form_invalid(form)
        return answer


class ConfirmByCodeView(CodeReauthenticateView):  # type: ignore[misc]
    """A code in place of the password."""

    def form_invalid(self, form: Any) -> HttpResponse:
        lockouts.code_wrong(self.request, self.request.user)
        answer: HttpResponse = super().form_invalid(form)
        return answer


class PasskeyAloneForm(LoginWebAuthnForm):  # type: ignore[misc]
    """Only of a passkey that was added for that, and only by a challenge for which it had to know its owner."""

    def clean_credential(self) -> Authenticator:
        state = get_state() or {}  # one for all pages, and gone once it is answered
        found = super().clean_credential()
        if state.get("user_verification") != "required" or not found.wrap().is_passwordless:
            raise get_adapter().validation_error("incorrect_code")
        return found


class PasskeySignInView(LoginWebAuthnView):  # type: ignore[misc]
    """Signing in with a passkey alone, which asks for a fingerprint or a PIN itself."""

    form_class = PasskeyAloneForm

    def form_invalid(self, form: Any) -> HttpResponse:
        lockouts.passkey_wrong(self.request)
        answer: HttpResponse = super().form_invalid(form)
        return answer


class AddPasskeyView(AddWebAuthnView):  # type: ignore[misc]
    """Whether it opens alone is what its owner has chosen: browsers report other things of a key, or nothing."""

    def form_valid(self, form: Any) -> HttpResponse:
        chosen = form.cleaned_data["passwordless"]
        form.cleaned_data["credential"]["clientExtensionResults"] = {"credProps": {"rk": chosen}}
        answer: HttpResponse = super().form_valid(form)
        return answer


class RemovePasskeyView(RemoveWebAuthnView):  # type: ignore[misc]
    """Not the last second factor of a role that has to have one."""

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        # What is not there is asked no password for.
        get_object_or_404(Authenticator, pk=kwargs["pk"], user=request.user, type=Authenticator.Type.WEBAUTHN)
        answer: HttpResponseBase = super().dispatch(request, *args, **kwargs)
        return answer

    def form_valid(self, form: Any) -> HttpResponse:
        if not second_factor.may_remove(self.object):
            messages.error(self.request, _("Your role requires a second factor. Set up another one first."))
            return redirect("mfa_index")
        answer: HttpResponse = super().form_valid(form)
        return answer


def _page(route: str, view: Any, name: str, *, methods: str = "GET HEAD POST", is_open: bool = False) -> URLPattern:
    function = require_http_methods(methods.split())(never_cache(view.as_view(extra_context={"section": "account"})))
    found: URLPattern = path(route, login_not_required(function) if is_open else function, name=name)
    return found


_OWN = "account/second-factor/"
#: By the names that django-allauth knows its pages by.
urlpatterns = [
    _page("login/second-step/", SecondStepView, "mfa_authenticate", is_open=True),
    _page("login/passkey/", PasskeySignInView, "mfa_login_webauthn", is_open=True),
    _page(_OWN, IndexView, "mfa_index", methods="GET HEAD"),
    _page(_OWN, IndexView, "mfa_list_webauthn", methods="GET HEAD"),
    _page(f"{_OWN}app/", ActivateTOTPView, "mfa_activate_totp"),
    _page(f"{_OWN}app/remove/", DeactivateTOTPView, "mfa_deactivate_totp"),
    _page(f"{_OWN}passkeys/add/", AddPasskeyView, "mfa_add_webauthn"),
    _page(f"{_OWN}passkeys/<int:pk>/remove/", RemovePasskeyView, "mfa_remove_webauthn"),
    _page(f"{_OWN}codes/", ViewRecoveryCodesView, "mfa_view_recovery_codes", methods="GET HEAD"),
    _page(f"{_OWN}codes/new/", GenerateRecoveryCodesView, "mfa_generate_recovery_codes"),
    _page(f"{_OWN}codes/download/", DownloadRecoveryCodesView, "mfa_download_recovery_codes", methods="GET HEAD"),
    _page(f"{_OWN}confirm/", ConfirmView, "account_reauthenticate"),
    _page(f"{_OWN}confirm/code/", ConfirmByCodeView, "mfa_reauthenticate"),
    _page(f"{_OWN}confirm/passkey/", ReauthenticateWebAuthnView, "mfa_reauthenticate_webauthn"),
]
