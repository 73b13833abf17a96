"""One's own account: where one is signed in, and in which time zone."""

from uuid import UUID

from django.contrib import messages
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from storage_admin.accounts import scopes, second_factor, selectors, sessions, users
from storage_admin.accounts.models import User
from storage_admin.errors import NotFoundError
from storage_admin.moments import zones
from storage_admin.web.lists import as_choices
from storage_admin.web.page import PageRequest, attempt, page


@require_safe
@page()
def account(request: PageRequest) -> HttpResponseBase:
    """Who one is here, and in which browsers one is signed in."""
    user = _own(request)
    names = scopes.names()
    context = {
        "section": "account", "sessions": list(selectors.sessions_of(user)), "here": sessions.about(request).get("uid"),
        "second_factor": second_factor.kinds_of(user),
        "scope": [names.get(slug, slug) for slug in user.hosts],
        "zones": as_choices(((name, name) for name in zones()), user.time_zone),
    }  # fmt: skip
    return render(request, "accounts/account.html", context)


@require_POST
@page()
def account_zone(request: PageRequest) -> HttpResponseBase:
    """Chooses the time zone that pages show times in."""
    name = request.POST.get("time_zone", "")
    attempt(request, lambda: users.choose_zone(request.actor, _own(request), name), _("Your time zone is saved."))
    return redirect("account")


@require_POST
@page()
def account_sign_out(request: PageRequest) -> HttpResponseBase:
    """Ends all sessions of one's own but this one."""
    ended = users.end_sessions(request.actor, _own(request), stays=sessions.about(request).get("uid", ""))
    messages.success(
        request, _("You are signed out of all other browsers. Sessions ended: {ended}.").format(ended=ended)
    )
    return redirect("account")


@require_POST
@page()
def account_session_end(request: PageRequest, uid: UUID) -> HttpResponseBase:
    """Ends one session of one's own."""
    if not users.end_session(request.actor, _own(request), uid):
        raise NotFoundError(_("This session has already ended."))
    messages.success(request, _("The session has ended."))
    return redirect("account")


def _own(request: PageRequest) -> User:
    user = request.user
    if not isinstance(user, User):
        raise NotFoundError(_("Tokens have no account page."))
    return user
