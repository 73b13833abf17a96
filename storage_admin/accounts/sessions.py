"""Sessions as rows that say whose they are, since when, from where and in which browser."""

import re
import uuid
from datetime import datetime, timedelta
from typing import Any

from allauth.account.internal.stagekit import LOGIN_SESSION_KEY
from allauth.account.utils import url_str_to_user_pk
from django.conf import settings
from django.contrib.auth import SESSION_KEY
from django.contrib.sessions.backends import db
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin.accounts.addresses import address_of
from storage_admin.accounts.models import Session

#: When somebody was seen last is written at most this often.
SEEN_EVERY = timedelta(minutes=1)
#: What a session keeps of itself, under this name.
ABOUT = "about"

_BROWSERS = (
    ("Edg", "Edge"), ("OPR", "Opera"), ("Firefox", "Firefox"), ("HeadlessChrome", "Chromium"), ("Chrome", "Chrome"),
    ("Safari", "Safari"), ("curl", "curl"), ("python", "Python"),
)  # fmt: skip
_SYSTEMS = (
    ("Windows", "Windows"), ("Android", "Android"), ("iPhone", "iOS"), ("iPad", "iOS"), ("Mac OS", "macOS"),
    ("CrOS", "ChromeOS"), ("Linux", "Linux"), ("BSD", "BSD"),
)  # fmt: skip


class SessionStore(db.SessionStore):
    """Django's sessions in the database, with columns for what lists of them show."""

    @classmethod
    def get_model_class(cls) -> type[Session]:
        return Session

    def create_model_instance(self, data: dict[str, Any]) -> Session:
        row: Any = super().create_model_instance(data)
        if SESSION_KEY in data:
            row.user_id = int(data[SESSION_KEY])
        elif waiting := data.get(LOGIN_SESSION_KEY):  # for its second step; it ends with the sessions of that user
            row.user_id = url_str_to_user_pk(waiting["user_pk"])
        if kept := data.get(ABOUT):
            row.uid = uuid.UUID(kept["uid"])
            row.since, row.seen = _time(kept["since"]), _time(kept["seen"])
            row.address, row.browser = kept["address"], kept["browser"]
        made: Session = row
        return made


def begin(request: Any) -> None:
    """Notes whose session begins with this request, from where and in which browser."""
    now = timezone.now().isoformat()
    request.session[ABOUT] = {
        "uid": str(uuid.uuid4()), "since": now, "seen": now, "address": address_of(request),
        "browser": browser_of(request.META.get("HTTP_USER_AGENT", "")),
    }  # fmt: skip


def ended(request: Any, now: datetime) -> str:
    """Why a session is over, in a sentence; empty where it goes on."""
    kept = request.session.get(ABOUT)
    if kept is None:
        return ""
    if now - _time(kept["since"]) > settings.SESSION_LIFETIME:
        return _("Your session has reached its maximum length. Sign in again.")
    if now - _time(kept["seen"]) > settings.SESSION_IDLE:
        return _("Your session expired after inactivity. Sign in again.")
    return ""


def end(rows: QuerySet[Session]) -> int:
    """Ends sessions, and sign-ins that wait for their second step; how many of the former."""
    ended = rows.exclude(since=None).count()
    rows.delete()
    return ended


def seen(request: Any, now: datetime) -> None:
    """Notes that somebody did something in this session."""
    kept = request.session.get(ABOUT)
    if kept is None:
        begin(request)
    elif now - _time(kept["seen"]) > SEEN_EVERY or kept["address"] != address_of(request):
        request.session[ABOUT] = kept | {"seen": now.isoformat(), "address": address_of(request)}


def about(request: Any) -> dict[str, str]:
    """What the session of a request keeps of itself: ``uid``, ``since``, ``seen``, ``address``, ``browser``."""
    found: dict[str, str] = request.session.get(ABOUT, {})
    return found


def browser_of(agent: str) -> str:
    """A browser in short, such as ``Firefox on Linux``."""
    browser = next((word for sign, word in _BROWSERS if re.search(sign, agent, re.IGNORECASE)), "")
    system = next((word for sign, word in _SYSTEMS if sign in agent), "")
    return " on ".join(part for part in (browser or _("another browser"), system) if part)


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
