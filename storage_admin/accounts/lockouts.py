"""Who is locked out of signing in, until when, and how that ends.

django-axes counts wrong passwords by user name and address, and locks that pair out; here its counts are read.
"""

import unicodedata
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from axes.models import AccessAttempt
from django.conf import settings
from django.contrib.auth.signals import user_login_failed
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from storage_admin.accounts import refusals
from storage_admin.accounts.addresses import address_of, tries_of
from storage_admin.accounts.models import Actor, Role, User, audit

TOO_MANY_REQUESTS = 429
_LONGEST = AccessAttempt._meta.get_field("username").max_length


@dataclass(frozen=True)
class Lockout:
    """A user name that cannot sign in from an address, whatever the password.

    Args:
        id: of the first of its rows.
        username: as it is counted.
        address: of IPv6 that of its network.
        until: when it ends by itself.
    """

    id: int
    username: str
    address: str | None
    failures: int
    until: datetime


def counted_as(username: str) -> str:
    """What a name's tries are counted under. Directories compare names without case, and some without accents: all
    spellings that one takes for the same have their tries together.
    """
    plain = unicodedata.normalize("NFKD", username)
    return "".join(sign for sign in plain if not unicodedata.combining(sign)).lower()[:_LONGEST]


def username_of(request: HttpRequest, credentials: dict[str, Any] | None = None) -> str | None:
    """The same of who signs in, for django-axes."""
    username = (credentials or request.POST).get("username")
    return None if username is None else counted_as(username)


def lockouts(now: datetime | None = None) -> list[Lockout]:
    """Everybody who is locked out, the one that lasts longest first."""
    return _lockouts(AccessAttempt.objects.all(), now or timezone.now())


def unlock(actor: Actor, lockout: Lockout) -> None:
    """Lets a user name sign in from an address again.

    Raises:
        ForbiddenError: the actor is no admin, or limited to some hosts.
    """
    actor.require_everywhere(Role.ADMIN)
    with transaction.atomic():
        AccessAttempt.objects.filter(username=lockout.username, ip_address=lockout.address).delete()
        before = {"address": lockout.address, "failures": lockout.failures}
        audit(actor, "lockout lifted", lockout.username, before=before)


def sign_in_failed(request: HttpRequest, username: str) -> None:
    """Records a wrong password."""
    who = _known(username)
    refusals.refused(refusals.NOBODY, "sign-in failed", who, address=address_of(request), why="wrong name or password")


def password_wrong(request: HttpRequest, user: User, purpose: str = "to change it") -> None:
    """Records that somebody who is signed in gave a wrong password as the one that they have."""
    why = f"wrong password, given {purpose}"
    refusals.refused(user.username, "sign-in failed", user.username, address=address_of(request), why=why)


def second_factor_wrong(request: HttpRequest, user: User) -> None:
    """Records a wrong code or passkey after a right password, and counts it as a wrong password."""
    why = "right password, wrong second factor"
    refusals.refused(refusals.NOBODY, "sign-in failed", user.username, address=address_of(request), why=why)
    user_login_failed.send(__name__, credentials={"username": user.username}, request=request)


def code_wrong(request: HttpRequest, user: User) -> None:
    """Records that somebody who is signed in gave a wrong code to confirm that it is them; it counts as well."""
    refusals.refused(user.username, "sign-in failed", user.username, address=address_of(request), why="wrong code")
    user_login_failed.send(__name__, credentials={"username": user.username}, request=request)


def passkey_wrong(request: HttpRequest) -> None:
    """Records a passkey that opens nothing; whose it is, it did not prove."""
    refusals.refused(refusals.NOBODY, "sign-in failed", "", address=address_of(request), why="passkey not known")


def password_right(request: HttpRequest, user: User) -> None:
    """Forgets the wrong passwords before a right one, as signing in does."""
    AccessAttempt.objects.filter(username=counted_as(user.username), ip_address=tries_of(request)).delete()


def answer(request: HttpRequest, *_about: Any) -> HttpResponse:
    """What whoever is locked out gets: a page that says until when."""
    credentials: dict[str, str] = getattr(request, "axes_credentials", None) or {}
    username = credentials.get("username") or ""
    address = address_of(request)
    now = timezone.now()
    found = _lockouts(AccessAttempt.objects.filter(username=counted_as(username), ip_address=tries_of(request)), now)
    until = found[0].until if found else now + _cool_off()
    why = f"{settings.AXES_FAILURE_LIMIT} wrong passwords"
    refusals.refused(refusals.NOBODY, "locked out", _known(username), address=address, why=why)
    context = {
        "username": username, "until": until, "minutes": max(1, -(-(until - now) // timedelta(minutes=1))),
    }  # fmt: skip
    page = render(request, "accounts/locked_out.html", context, status=TOO_MANY_REQUESTS)
    page["Retry-After"] = str(max(1, int((until - now).total_seconds())))
    return page


def _known(username: str) -> str:
    """The name, where a user has it. What else is typed there may be somebody's password."""
    return username if User.objects.filter(username=username).exists() else "(no such user)"


def _cool_off() -> timedelta:
    found: timedelta = settings.AXES_COOLOFF_TIME
    return found


def _lockouts(attempts: Any, now: datetime) -> list[Lockout]:
    """By the attempts of lately; a browser has one row, and all of a name and an address count together."""
    pairs: dict[tuple[str, str | None], list[AccessAttempt]] = defaultdict(list)
    for attempt in attempts.filter(attempt_time__gte=now - _cool_off()).order_by("attempt_time"):
        pairs[attempt.username or "", attempt.ip_address].append(attempt)
    found = []
    for (username, address), rows in pairs.items():
        failures = left = sum(row.failures_since_start for row in rows)
        until = None
        for row in rows:
            if left < settings.AXES_FAILURE_LIMIT:
                break
            left -= row.failures_since_start
            until = row.attempt_time + _cool_off()
        if until is not None:
            found.append(Lockout(min(row.pk for row in rows), username, address, failures, until))
    return sorted(found, key=lambda one: one.until, reverse=True)
