"""For admins: the tokens that scripts and automation sign in with."""

from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from storage_admin.accounts.models import ROLE_CHOICES, Role, Token
from storage_admin.accounts.services import create_token, delete_token
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.errors import NotFoundError
from storage_admin.hosts.models import Host
from storage_admin.web.forms import Form, status_of, typed
from storage_admin.web.page import PageRequest, page

#: A token lives at most so long: ten years.
MOST_DAYS = 3650
#: What the form of a new one begins with.
NEW = {"name": "", "role": "", "expires_days": "90", "hosts": list[str]()}
#: Of a token's secret there is nothing in it, neither its digest.
CSV_COLUMNS: Columns = {
    "id": "id",
    "name": "name",
    "role": "role",
    "hosts": lambda token: token.hosts or "all",
    "expires": "expires",
    "expired": "expired",
    "last_used": "last_used",
    "created": "created",
    "created_by": "created_by",
}


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN, everywhere=True)
def tokens(request: PageRequest) -> HttpResponseBase:
    """All tokens; POST makes one and shows its secret, this once."""
    context: dict[str, Any] = {"section": "tokens", "roles": ROLE_CHOICES, "hosts": Host.objects.all()}
    made = _made(request) if request.method == "POST" else None
    if made is not None:
        context["made"], context["secret"] = made
    context["form"] = typed(request, request.path, NEW)
    context["tokens"] = Token.objects.all()
    answer = render(request, "accounts/tokens.html", context, status=status_of(request))
    answer["Cache-Control"] = "no-store"
    return answer


@require_safe
@page(Role.ADMIN, everywhere=True)
def tokens_csv(_request: PageRequest) -> HttpResponseBase:
    """The whole list."""
    return csv_answer("tokens", CSV_COLUMNS, Token.objects.defer("digest"))


def _made(request: PageRequest) -> tuple[Token, str] | None:
    form = Form(request, {"expires": "expires_days"})
    days, role, expires = form.whole("expires_days"), form.role(), None
    if days is not None:
        if 1 <= days <= MOST_DAYS:
            expires = timezone.now() + timedelta(days=days)
        else:
            form.wrong(
                "expires_days",
                _("Enter 1 to {most} days, or leave the field empty for a token that never expires.").format(
                    most=MOST_DAYS
                ),
            )
    hosts = request.POST.getlist("hosts")
    return form.save(lambda: create_token(request.actor, form.text("name"), role, hosts=hosts, expires=expires))


@require_POST
@page(Role.ADMIN, everywhere=True)
def token_delete(request: PageRequest, token_id: int) -> HttpResponseBase:
    """Takes a token away."""
    token = Token.objects.filter(pk=token_id).first()
    if token is None:
        raise NotFoundError(_("There is no token {token}.").format(token=token_id))
    delete_token(request.actor, token)
    messages.success(
        request, _("The token {token} is deleted. Requests that use it are refused.").format(token=token.name)
    )
    return redirect("tokens")
