"""Signing in and out, and changing one's password."""

from typing import Any

from django.contrib import messages
from django.contrib.auth import views
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import reverse_lazy
from django.utils.decorators import method_decorator

from storage_admin.accounts.services import password_changed


@method_decorator(login_not_required, name="dispatch")
class LoginView(views.LoginView):
    """The login page. A fragment that asks for it, because the session has ended, reloads its whole page instead."""

    template_name = "accounts/login.html"
    redirect_authenticated_user = True

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if getattr(request, "htmx", False):
            return HttpResponse(headers={"HX-Refresh": "true"})
        return super().dispatch(request, *args, **kwargs)


class PasswordView(views.PasswordChangeView):
    """Changes one's own password; other sessions of the user end with it."""

    template_name = "accounts/password.html"
    success_url = reverse_lazy("password")
    extra_context = {"section": "password"}

    def form_valid(self, form: Any) -> HttpResponse:
        answer = super().form_valid(form)
        password_changed(self.request.user.actor)  # type: ignore[union-attr] # (signed in: the view requires it)
        messages.success(
            self.request, "Your password is changed. Other browsers where you were signed in are signed out."
        )
        return answer
