"""For admins: the tokens that scripts and automation sign in with."""

from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from images.views.access import PageRequest, number, page
from storage_admin.accounts.models import Token
from storage_admin.accounts.roles import ROLE_CHOICES, Role
from storage_admin.accounts.services import create_token, delete_token
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.hosts.errors import InvalidError, NotFoundError
from storage_admin.hosts.models import Host

#: A token lives at most so long: ten years.
MOST_DAYS = 3650
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
    status = 200
    if request.method == "POST":
        context |= {"given": request.POST}
        try:
            context["made"], context["secret"] = _made(request)
        except (InvalidError, ValueError) as error:
            context["error"], status = str(error), 400
    answer = render(request, "accounts/tokens.html", context | {"tokens": Token.objects.all()}, status=status)
    answer["Cache-Control"] = "no-store"
    return answer


@require_safe
@page(Role.ADMIN, everywhere=True)
def tokens_csv(_request: PageRequest) -> HttpResponseBase:
    """The whole list."""
    return csv_answer("tokens", CSV_COLUMNS, Token.objects.defer("digest"))


def _made(request: PageRequest) -> tuple[Token, str]:
    days = number(request.POST.get("expires_days"))
    if days is not None and not 1 <= days <= MOST_DAYS:
        raise InvalidError(f"A token lives from 1 to {MOST_DAYS} days, or without an end.")
    expires = timezone.now() + timedelta(days=days) if days else None
    hosts = request.POST.getlist("hosts")
    role = Role.named(request.POST.get("role", ""))
    return create_token(request.actor, request.POST.get("name", ""), role, hosts=hosts, expires=expires)


@require_POST
@page(Role.ADMIN, everywhere=True)
def token_delete(request: PageRequest, token_id: int) -> HttpResponseBase:
    """Takes a token away."""
    token = Token.objects.filter(pk=token_id).first()
    if token is None:
        raise NotFoundError(f"There is no token {token_id}.")
    delete_token(request.actor, token)
    messages.success(request, f"The token {token.name} is deleted: what uses it is refused from now on.")
    return redirect("tokens")
