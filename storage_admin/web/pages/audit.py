"""For admins: who did what, and what was refused."""

from typing import Any

from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_safe

from storage_admin.accounts import selectors
from storage_admin.accounts.filters import AuditFilters
from storage_admin.accounts.models import AuditEntry, Role
from storage_admin.accounts.saved_views import list_page
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.web.lists import filtered
from storage_admin.web.page import PageRequest, page, paginated

PER_PAGE = 100
PAGE = list_page("audit", gettext_noop("Audit trail"), AuditFilters.base_filters, Role.ADMIN, everywhere=True)
#: So much of a value stands on the page; the CSV and the API have all of it.
LONGEST = 300
#: Of these, an empty list is no limit.
UNLIMITED = frozenset({"hosts", "pools", "formats", "events"})

CSV_COLUMNS: Columns = {
    "id": "pk",
    "at": "at",
    "who": "who",
    "what": "what",
    "target": "target",
    "refused": "refused",
    "address": "address",
    "before": "before",
    "after": "after",
}


@require_safe
@page(Role.ADMIN, everywhere=True)
def audit(request: PageRequest) -> HttpResponseBase:
    """The trail by filters, the latest first."""
    found = filtered(request, AuditFilters, selectors.entries())
    rows = paginated(request, found.rows, PER_PAGE)
    context = {"section": "audit", "rows": rows, "values": found.values, "ignored": found.ignored}
    return render(request, "accounts/audit.html", context | {"listed": [(row, changes(row)) for row in rows]})


@require_safe
@page(Role.ADMIN, everywhere=True)
def audit_csv(request: PageRequest) -> HttpResponseBase:
    """The whole trail as it is filtered."""
    return csv_answer("audit", CSV_COLUMNS, filtered(request, AuditFilters, selectors.entries()).exact())


def changes(row: AuditEntry) -> list[tuple[str, str, str]]:
    """What an entry says of before and after, by the name of each value; a value that was not there is empty."""
    before, after = _named(row.before), _named(row.after)
    if isinstance(before.get("options"), dict) and isinstance(after.get("options"), dict):
        before, after = _opened(before), _opened(after)
    changed = [name for name in {**before, **after} if not (name in before and before[name] == after.get(name, ...))]
    return [(name, _short(before.get(name), name), _short(after.get(name), name)) for name in changed]


def _named(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    return {name: one for name, one in value.items() if one != {}} if isinstance(value, dict) else {"": value}


def _opened(values: dict[str, Any]) -> dict[str, Any]:
    """Values with those of a job's options beside them, so that what changed among these is seen."""
    given = {f"option {name}": one for name, one in values["options"].items()}
    return {name: one for name, one in values.items() if name != "options"} | given


def _short(value: Any, name: str = "") -> str:
    if value is None:
        return ""
    if value == [] and name in UNLIMITED:
        return "all"
    if isinstance(value, dict):
        text = ", ".join(f"{key} {_short(one)}" for key, one in value.items() if one is not None)
    elif isinstance(value, list) and all(isinstance(one, str) for one in value):
        text = ", ".join(value) or "none"
    else:
        text = {True: "yes", False: "no", "": "empty"}.get(value, str(value)) if _plain(value) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _plain(value: Any) -> bool:
    return isinstance(value, bool | str)
