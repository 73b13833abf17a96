"""Signing in and out, and changing one's password."""

from typing import Any

from django.contrib import messages
from django.contrib.auth import views
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import PasswordChangeForm
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import reverse_lazy
from django.utils.decorators import method_decorator

from storage_admin.accounts import lockouts, sessions
from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.models import User
from storage_admin.accounts.services import audit
from storage_admin.accounts.users import password_chosen


@method_decorator(login_not_required, name="dispatch")
class LoginView(views.LoginView):
    """The login page. A fragment that asks for it, because the session has ended, reloads its whole page instead."""

    template_name = "accounts/login.html"
    redirect_authenticated_user = True

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if getattr(request, "htmx", False):
            return HttpResponse(headers={"HX-Refresh": "true"})
        return super().dispatch(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        answer = super().form_valid(form)
        sessions.begin(self.request)
        audit(actor_of(self.request), "signed in", after={"browser": sessions.about(self.request)["browser"]})
        return answer

    def form_invalid(self, form: Any) -> HttpResponse:
        # Where axes has locked the name out, its middleware answers, and records that.
        if not getattr(self.request, "axes_locked_out", False):
            lockouts.sign_in_failed(self.request, str(form.data.get("username", "")))
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

    def clean_new_password1(self) -> str:
        """The new one; raises ValidationError where it is the one of now."""
        wanted: str = self.cleaned_data.get("new_password1", "")
        if wanted and self.user.check_password(wanted):
            raise ValidationError("That is the password that you have now: choose another one.")
        return wanted


class PasswordView(views.PasswordChangeView):
    """Changes one's own password; other sessions of the user end with it."""

    form_class = OwnPasswordForm
    template_name = "accounts/password.html"
    success_url = reverse_lazy("password")
    extra_context = {"section": "account"}

    def form_valid(self, form: Any) -> HttpResponse:
        user: Any = self.request.user  # signed in: the view requires it
        was_one_time = user.must_change_password
        answer = super().form_valid(form)
        password_chosen(actor_of(self.request), user, stays=self.request.session.session_key or "")
        messages.success(
            self.request, "Your password is changed. Other browsers where you were signed in are signed out."
        )
        if was_one_time:
            answer["Location"] = str(reverse_lazy("overview"))
        return answer
