"""For admins: who did what, and what was refused."""

from typing import Any

from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_safe

from images.views.access import PageRequest, page, paginated
from images.views.lists import filtered
from storage_admin.accounts import selectors
from storage_admin.accounts.filters import AuditFilters
from storage_admin.accounts.models import AuditEntry
from storage_admin.accounts.roles import Role
from storage_admin.csv_export import Columns, csv_answer

PER_PAGE = 100
#: So much of a value stands on the page; the CSV and the API have all of it.
LONGEST = 300

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
    return csv_answer("audit", CSV_COLUMNS, filtered(request, AuditFilters, selectors.entries()).rows)


def changes(row: AuditEntry) -> list[tuple[str, str, str]]:
    """What an entry says of before and after, by the name of each value; a value that was not there is empty."""
    before, after = _named(row.before), _named(row.after)
    return [(name, _short(before.get(name)), _short(after.get(name))) for name in {**before, **after}]


def _named(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"": value}


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        text = ", ".join(value) or "none"
    else:
        text = {True: "yes", False: "no", "": "empty"}.get(value, str(value)) if _plain(value) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _plain(value: Any) -> bool:
    return isinstance(value, bool | str)
