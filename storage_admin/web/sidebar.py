"""What every page's frame needs: who is here, what they may do, and how many jobs are at work."""

import zlib
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from storage_admin.accounts.models import Actor, Role, User
from storage_admin.events.selectors import open_alerts
from storage_admin.hosts.selectors import in_scope
from storage_admin.jobs import automation
from storage_admin.jobs.models import Job

#: The sidebar: name of the page's URL, its word, its icon, the lowest role that sees it, and its group's title.
ENTRIES = (
    ("overview", _("Overview"), "overview", Role.VIEWER, ""),
    ("alerts", _("Alerts"), "alert", Role.VIEWER, ""),
    ("images", _("Images"), "image", Role.VIEWER, _("Storage")),
    ("orphans", _("Orphans"), "orphan", Role.VIEWER, _("Storage")),
    ("guests", _("Guests"), "guest", Role.VIEWER, _("Storage")),
    ("hosts", _("Hosts"), "host", Role.VIEWER, _("Storage")),
    ("jobs", _("Jobs"), "job", Role.VIEWER, _("Work")),
    ("policies", _("Policies"), "clock", Role.VIEWER, _("Work")),
    ("ledger", _("Ledger"), "ledger", Role.VIEWER, _("Work")),
    ("benchmarks", _("Benchmarks"), "gauge", Role.VIEWER, _("Work")),
    ("users", _("Users"), "user", Role.ADMIN, _("Administration")),
    ("tokens", _("Tokens"), "token", Role.ADMIN, _("Administration")),
    ("webhooks", _("Webhooks"), "bell", Role.ADMIN, _("Administration")),
    ("audit", _("Audit"), "audit", Role.ADMIN, _("Administration")),
)


#: Where a request keeps its frame.
_KEPT = "_frame"
#: Where it keeps the ids of jobs that are queued or at work.
_ACTIVE = "_active_jobs"
#: What concerns every host: not for those who are limited to some.
EVERYWHERE = frozenset({"tokens", "users", "audit", "webhooks"})


def active_ids(request: HttpRequest, actor: Actor) -> list[int]:
    """Ids of the jobs that are queued or at work, of those that exist for ``actor``; asked once for a request."""
    if not hasattr(request, _ACTIVE):
        active = in_scope(Job.objects.filter(state__in=Job.ACTIVE), actor).order_by("pk")
        setattr(request, _ACTIVE, list(active.values_list("pk", flat=True)))
    ids: list[int] = getattr(request, _ACTIVE)
    return ids


def active_jobs(request: HttpRequest, actor: Actor) -> dict[str, Any]:
    """How many jobs are queued or at work, of those that exist for ``actor``, and a word for which these are."""
    ids = active_ids(request, actor)
    return {"active_jobs": len(ids), "active_jobs_are": f"{zlib.crc32(repr(ids).encode()):x}"}


def sidebar(request: HttpRequest) -> dict[str, Any]:
    """The frame's entries and rights; nothing where nobody is signed in or only a fragment is asked for."""
    user = getattr(request, "user", None)
    if not isinstance(user, User):
        return {}
    actor = user.actor
    role = actor.role
    rights = {
        "can_operate": role >= Role.OPERATOR,
        "can_admin": role >= Role.ADMIN,
        "can_admin_all": role >= Role.ADMIN and actor.hosts is None,
    }
    if getattr(request, "htmx", False):
        return rights
    if (known := getattr(request, _KEPT, None)) is not None:  # a page and its live part have one frame
        kept: dict[str, Any] = known
        return kept
    entries = [entry for entry in ENTRIES if role >= entry[3] and (actor.hosts is None or entry[0] not in EVERYWHERE)]
    counts = active_jobs(request, actor) | {"open_alerts": open_alerts(actor)}
    frame = rights | counts | {"sidebar_entries": entries, "automation": automation.state()}
    setattr(request, _KEPT, frame)
    return frame
