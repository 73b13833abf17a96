"""For admins: who may sign in, with which role and for which hosts; who is signed in, who is locked out."""

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from storage_admin.accounts import lockouts, scopes, second_factor, selectors
from storage_admin.accounts import users as services
from storage_admin.accounts.models import ROLE_CHOICES, Role, User
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.web.forms import Form, status_of, typed
from storage_admin.web.page import PageRequest, attempt, page, paginated

PER_PAGE = 100
CSV_COLUMNS: Columns = {
    "id": "id",
    "name": "username",
    "email": "email",
    "role": "role",
    "hosts": lambda row: row.hosts or "all",
    "active": "is_active",
    "one_time_password": "must_change_password",
    "sessions": "open_sessions",
    "last_signed_in": "last_login",
    "created": "date_joined",
}


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN, everywhere=True)
def users(request: PageRequest) -> HttpResponseBase:
    """All users; POST adds one and shows their one-time password, this once."""
    context: dict[str, Any] = {"section": "users", "roles": ROLE_CHOICES, "hosts": scopes.names()}
    if request.method == "POST":
        form = Form(request)
        role, hosts = form.role(), request.POST.getlist("hosts")
        made = form.save(
            lambda: services.add_user(
                request.actor, form.text("username"), role, hosts=hosts, email=form.text("email")
            )
        )  # fmt: skip
        if made is not None:
            context["made"], context["password"] = made
    context |= {
        "form": typed(request, request.path, {"username": "", "role": "", "email": "", "hosts": []}),
        "rows": paginated(request, selectors.users_listed(), PER_PAGE), "lockouts": lockouts.lockouts(),
        "required_roles": second_factor.required_roles(), "fixed_roles": second_factor.fixed_roles(),
    }  # fmt: skip
    return _kept_nowhere(render(request, "accounts/users.html", context, status=status_of(request)))


@require_safe
@page(Role.ADMIN, everywhere=True)
def users_csv(_request: PageRequest) -> HttpResponseBase:
    """The whole list."""
    return csv_answer("users", CSV_COLUMNS, selectors.users_listed().defer("password"))


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN, everywhere=True)
def user(request: PageRequest, user_id: int) -> HttpResponseBase:
    """One user; POST changes role, hosts and address."""
    row = _user(user_id)
    if request.method == "POST":
        form = Form(request)
        role, hosts = form.role(), request.POST.getlist("hosts")
        saved = form.save(
            lambda: services.change_user(request.actor, row, role=role, hosts=hosts, email=form.text("email")),
            _("Saved. The change takes effect with the next request of {row}.").format(row=row.username),
        )
        return _shown(request, row) if saved is None else redirect("user", row.pk)
    return _shown(request, row)


@require_POST
@page(Role.ADMIN, everywhere=True)
def user_active(request: PageRequest, user_id: int) -> HttpResponseBase:
    """Lets somebody sign in again, or no longer."""
    row, active = _user(user_id), request.POST.get("active") == "yes"
    done = _("{row} can sign in again.").format(row=row.username)
    if not active:
        done = _("{row} is signed out everywhere and can no longer sign in.").format(row=row.username)
        if tokens := ", ".join(token.name for token in selectors.tokens_made_by(row)):
            done = f"{done} {_('Tokens they created stay valid: {tokens}.').format(tokens=tokens)}"
    attempt(request, lambda: services.change_user(request.actor, row, is_active=active), done)
    return redirect("user", row.pk)


@require_POST
@page(Role.ADMIN, everywhere=True)
def user_password(request: PageRequest, user_id: int) -> HttpResponseBase:
    """Gives somebody a one-time password and shows it, this once."""
    row = _user(user_id)
    password = attempt(request, lambda: services.reset_password(request.actor, row))
    return redirect("user", row.pk) if password is None else _shown(request, row, password)


@require_POST
@page(Role.ADMIN, everywhere=True)
def users_second_factor(request: PageRequest) -> HttpResponseBase:
    """Decides which roles have to have a second factor."""
    names = request.POST.getlist("roles")
    attempt(request, lambda: second_factor.require_for(request.actor, map(_role, names)), _("Saved."))
    return redirect("users")


@require_POST
@page(Role.ADMIN, everywhere=True)
def user_second_factor(request: PageRequest, user_id: int) -> HttpResponseBase:
    """Takes away somebody's second factor, as their device is lost."""
    row = _user(user_id)
    done = _("{row} no longer has a second factor and is signed out everywhere.").format(row=row.username)
    attempt(request, lambda: second_factor.reset(request.actor, row), done)
    return redirect("user", row.pk)


@require_POST
@page(Role.ADMIN, everywhere=True)
def user_sign_out(request: PageRequest, user_id: int) -> HttpResponseBase:
    """Ends all sessions of somebody."""
    row = _user(user_id)
    ended = services.end_sessions(request.actor, row)
    messages.success(
        request, _("{row} is signed out everywhere; {counted} ended.").format(row=row.username, counted=_counted(ended))
    )
    return redirect("user", row.pk)


@require_POST
@page(Role.ADMIN, everywhere=True)
def user_session_end(request: PageRequest, user_id: int, uid: UUID) -> HttpResponseBase:
    """Ends one session of somebody."""
    row = _user(user_id)
    if not services.end_session(request.actor, row, uid):
        raise NotFoundError(_("This session has already ended."))
    messages.success(request, _("The session has ended."))
    return redirect("user", row.pk)


@require_POST
@page(Role.ADMIN, everywhere=True)
def lockout_end(request: PageRequest, lockout_id: int) -> HttpResponseBase:
    """Lets a name sign in from an address again."""
    found = next((one for one in lockouts.lockouts() if one.id == lockout_id), None)
    if found is None:
        raise NotFoundError(_("This lockout has already ended."))
    lockouts.unlock(request.actor, found)
    messages.success(
        request, _("{found} can sign in from {address} again.").format(found=found.username, address=found.address)
    )
    return redirect("users")


def _user(user_id: int) -> User:
    row = User.objects.filter(pk=user_id).first()
    if row is None:
        raise NotFoundError(_("There is no user {user}.").format(user=user_id))
    return row


def _shown(request: PageRequest, row: User, password: str = "") -> HttpResponse:
    names = scopes.names()
    context = {
        "section": "users", "row": row, "roles": ROLE_CHOICES, "password": password,
        "form": typed(request, request.path, {"role": row.role, "hosts": row.hosts, "email": row.email}),
        "hosts": names | {slug: slug for slug in row.hosts if slug not in names},
        "sessions": list(selectors.sessions_of(row)), "own": row.pk == request.actor.user_id,
        "tokens": selectors.tokens_made_by(row), "second_factor": second_factor.kinds_of(row),
    }  # fmt: skip
    return _kept_nowhere(render(request, "accounts/user.html", context, status=status_of(request)))


def _kept_nowhere(answer: HttpResponse) -> HttpResponse:
    answer["Cache-Control"] = "no-store"
    return answer


def _role(name: str) -> Role:
    """Raises InvalidError where there is no such role."""
    try:
        return Role.named(name)
    except ValueError as error:
        raise InvalidError(str(error), {"role": str(error)}) from None


def _counted(ended: int) -> str:
    return "1 session" if ended == 1 else f"{ended} sessions"
