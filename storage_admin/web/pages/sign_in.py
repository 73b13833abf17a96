"""Signing in and out, and changing one's password."""

from typing import Any

from allauth.account.internal.flows.login import perform_password_login
from allauth.account.models import Login
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import authenticate, views
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import PasswordChangeForm
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse_lazy
from django.utils.decorators import method_decorator
from django.utils.translation import gettext as _

from storage_admin.accounts import lockouts
from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.models import User, audit
from storage_admin.accounts.users import password_chosen


@method_decorator(login_not_required, name="dispatch")
class LoginView(views.LoginView):
    """The login page. A fragment that asks for it, because the session has ended, reloads its whole page instead."""

    template_name = "accounts/login.html"
    redirect_authenticated_user = True

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        sso = settings.OIDC_NAME if settings.OIDC_URL else ""
        return super().get_context_data(**kwargs) | {"sso": sso, "ldap": bool(settings.LDAP_URL)}

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if getattr(request, "htmx", False):
            return HttpResponse(headers={"HX-Refresh": "true"})
        return super().dispatch(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        """The second step, where there is one; else it is done (``AccountAdapter.login``)."""
        user = form.get_user()
        login = Login(user=user, redirect_url=self.get_success_url())
        answer: HttpResponse = perform_password_login(self.request, {"username": user.username}, login)
        return answer

    def form_invalid(self, form: Any) -> HttpResponse:
        # Where axes has locked the name out, its middleware answers, and records that.
        if not getattr(self.request, "axes_locked_out", False):
            lockouts.sign_in_failed(self.request, form.cleaned_data.get("username", ""))
        return super().form_invalid(form)


class LogoutView(views.LogoutView):
    """Signs out of this browser."""

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if isinstance(request.user, User):
            audit(actor_of(request), "signed out")
        answer: HttpResponse = super().post(request, *args, **kwargs)
        return answer


class OwnPasswordForm(PasswordChangeForm):
    """The password of now, and the new one twice."""

    def __init__(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request = request

    def clean_old_password(self) -> str:
        """The one of now; raises ValidationError where it is not. Wrong ones count as they do at the login page."""
        given: str = self.cleaned_data["old_password"]
        if authenticate(self.request, username=self.user.get_username(), password=given) is None:
            raise ValidationError(self.error_messages["password_incorrect"], code="password_incorrect")
        return given

    def clean_new_password1(self) -> str:
        """The new one; raises ValidationError where it is the one of now."""
        wanted: str = self.cleaned_data.get("new_password1", "")
        # Compared with what was given: whoever does not know the password of now is not told that this is it.
        if wanted and wanted == self.cleaned_data.get("old_password"):
            raise ValidationError(_("The new password must differ from the current one."))
        return wanted


class PasswordView(views.PasswordChangeView):
    """Changes one's own password; other sessions of the user end with it."""

    form_class = OwnPasswordForm
    template_name = "accounts/password.html"
    success_url = reverse_lazy("password")
    extra_context = {"section": "account"}

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        user = request.user
        if isinstance(user, User) and user.source != User.Source.LOCAL:
            messages.info(request, _("Your password is stored in the directory. Change it there."))
            return redirect("account")
        return super().dispatch(request, *args, **kwargs)

    def get_form_kwargs(self) -> dict[str, Any]:
        return super().get_form_kwargs() | {"request": self.request}

    def form_invalid(self, form: Any) -> HttpResponse:
        # Where axes has locked the name out, its middleware answers, and records that.
        locked_out = getattr(self.request, "axes_locked_out", False)
        if form.has_error("old_password", "password_incorrect") and not locked_out:
            lockouts.password_wrong(self.request, form.user)
        return super().form_invalid(form)

    def form_valid(self, form: Any) -> HttpResponse:
        user: Any = self.request.user  # signed in: the view requires it
        was_one_time = user.must_change_password
        answer = super().form_valid(form)
        lockouts.password_right(self.request, user)
        password_chosen(actor_of(self.request), user, stays=self.request.session.session_key or "")
        messages.success(self.request, _("Your password is changed. All other sessions were ended."))
        if was_one_time:
            answer["Location"] = str(reverse_lazy("overview"))
        return answer
