"""Refused attempts in the audit trail, without letting anybody flood it.

The first attempt of somebody at something from somewhere is written at once. Those that follow within ten minutes are
counted, and their number is written when that time has passed. Where very many different ones come, as from a scanner
that makes up addresses, they share one entry for each kind of attempt.
"""

from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone

from storage_admin.accounts.addresses import address_of
from storage_admin.accounts.models import Actor, AuditEntry, RefusedAttempts

WINDOW = timedelta(minutes=10)
#: So many different ones are told apart at a time.
MOST_AT_ONCE = 200
#: Counting costs a write; beyond this it is enough to know that there were so many.
MOST_COUNTED = 10_000
#: Who it was, where nobody is signed in.
NOBODY = "nobody"


def forbidden(request: Any, actor: Actor, why: str) -> None:
    """Records that somebody tried what their role or their hosts do not allow."""
    found = getattr(request, "resolver_match", None)
    route = found.route if found is not None else request.path
    target = f"{request.method} {request.path}"[:500]
    refused(actor.name, "forbidden", target, address=actor.address, why=why, per=f"{request.method} {route}")


def token_refused(request: Any, name: str | None) -> None:
    """Records that a token was sent that opens nothing.

    Args:
        name: of a token that has expired; ``None`` where there is no such token.
    """
    why = "no such token" if name is None else "expired"
    refused(
        NOBODY if name is None else f"token {name}", "token refused", request.path[:500], address=address_of(request),
        why=why, per=why,
    )  # fmt: skip


def refused(who: str, what: str, target: str, *, address: str | None, why: str, per: str = "") -> None:
    """Records an attempt that was refused, or counts it where it is a repetition.

    Args:
        why: a sentence or a few words.
        per: what makes two attempts of the same kind the same; the target, unless given.
    """
    now = timezone.now()
    who, target, why = _plain(who), _plain(target), _plain(why)
    key = _key(who, what, address or "", per or target)
    known = RefusedAttempts.objects.filter(since__gt=now - WINDOW)
    if _counted(key, now):
        return
    if known.count() >= MOST_AT_ONCE:
        who, target, address, why = NOBODY, "", None, "too many different ones to be told apart"
        key = _key(what)
        if _counted(key, now):
            return
    settle(now)
    try:
        with transaction.atomic():
            RefusedAttempts.objects.create(key=key, who=who, what=what, target=target, address=address, since=now)
            _write(who, what, target, address, {"why": why})
    except IntegrityError:
        _counted(key, now)  # another request was first


def settle(now: datetime) -> None:
    """Writes how often what was refused came again, for all whose ten minutes have passed."""
    over = RefusedAttempts.objects.filter(since__lte=now - WINDOW).order_by("pk")
    for row in over:
        with transaction.atomic():
            if RefusedAttempts.objects.filter(pk=row.pk).delete()[0] and row.more:
                times = {"times": row.more, "since": row.since.isoformat(timespec="seconds")}
                _write(row.who, row.what, row.target, row.address, times)


def _counted(key: str, now: datetime) -> bool:
    """Counts a repetition; whether it is one."""
    fresh = RefusedAttempts.objects.filter(key=key, since__gt=now - WINDOW)
    more = fresh.values_list("more", flat=True).first()
    if more is None:
        return False
    return more >= MOST_COUNTED or fresh.update(more=F("more") + 1) == 1


def _plain(text: str) -> str:
    """What strangers send may hold characters that nobody sees, and a NUL, which PostgreSQL does not take."""
    return "".join(character for character in text if character.isprintable())


def _write(who: str, what: str, target: str, address: str | None, after: object) -> None:
    AuditEntry.objects.create(who=who, what=what, target=target, address=address, after=after, refused=True)


def _key(*parts: str) -> str:
    return sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
