"""The ledger: what jobs won and lost, added up and line by line; what undo copies hold stands apart."""

from typing import Any

from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_safe

from images import selectors
from images.api.ledger import host_of, policy_of, pool_of, seconds_of
from images.ledger.chart import charts_of
from images.ledger.filters import LedgerFilters, SumFilters
from images.ledger.selectors import DEFAULT_ORDERING, HELD, lines_for
from images.ledger.sums import summary
from storage_admin.accounts.saved_views import list_page
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.hosts.selectors import hosts_for, pool_names
from storage_admin.jobs import kinds
from storage_admin.web.lists import as_choices, columns, filtered
from storage_admin.web.page import PageRequest, page, paginated, wants_fragment

PER_PAGE = 50
PAGE = list_page("ledger", gettext_noop("Ledger"), LedgerFilters.base_filters)

#: Columns: what they are ordered by, their word, the order that a first click gives.
COLUMNS = (
    ("id", gettext_noop("Job"), "-"),
    (None, gettext_noop("Image"), ""),
    (None, gettext_noop("Pool"), ""),
    ("before_bytes", gettext_noop("Before"), "-"),
    ("after_bytes", gettext_noop("After"), "-"),
    ("predicted_bytes", gettext_noop("Predicted"), "-"),
    ("freed_bytes", gettext_noop("Freed"), "-"),
    ("at", gettext_noop("When"), "-"),
    ("by", gettext_noop("By"), ""),
    (None, gettext_noop("Duration"), ""),
)
#: Of lines that are held, instead of what was freed: what is.
HELD_COLUMNS = tuple(
    {"freed_bytes": ("held_bytes", gettext_noop("Held"), "-"), "at": (None, gettext_noop("Until"), "")}.get(
        str(one[0]), one
    )
    for one in COLUMNS
)


@require_safe
@page()
def ledger(request: PageRequest) -> HttpResponseBase:
    """Sums, charts and lines by filters. Without ``held`` the lines are of what is free or taken for good."""
    found = filtered(request, SumFilters, lines_for(request.actor))
    held = request.GET.get("held") == "true"
    values = found.values | ({"held": "true"} if held else {})
    told = summary(found.rows)
    rows = paginated(request, selectors.Matches(found.rows.filter(HELD if held else ~HELD)), PER_PAGE)
    context: dict[str, Any] = {
        "rows": rows,
        "lines": [_shown(line) for line in rows],
        "held": held,
        "columns": columns(HELD_COLUMNS if held else COLUMNS, values.get("ordering", DEFAULT_ORDERING)),
        "values": values,
        "ignored": found.ignored,
        "filtered": bool(values.keys() - {"ordering", "held"}),
        "total": told.total,
        "pending": abs(told.total.pending_bytes),
        "charts": charts_of(told),
        "titles": kinds.titles(),
    }
    if wants_fragment(request):
        return render(request, "ledger/ledger.html#found", context)
    kept = ("image", "policy", "held", "ordering")
    context |= {
        "section": "ledger",
        "hosts": as_choices(hosts_for(request.actor).values_list("pk", "name"), values.get("host", "")),
        "pools": as_choices(pool_names(request.actor), values.get("pool", "")),
        "kinds": as_choices(_kinds(), values.get("kind", "")),
        "kept": [(name, values[name]) for name in kept if name in values],
    }
    return render(request, "ledger/ledger.html", context)


def _kinds() -> list[tuple[str, str]]:
    """The kinds that change space."""
    return [(kind.name, str(kind.title)) for kind in kinds.every() if kind.rewrites]


def _shown(line: Any) -> dict[str, Any]:
    return {"job": line, "host": host_of(line), "pool": pool_of(line), "policy": policy_of(line)}


#: A line as CSV.
CSV_COLUMNS: Columns = {
    "job": "pk",
    "kind": "kind",
    "state": "state",
    "host": host_of,
    "pool": pool_of,
    "image_id": "image_number",
    "image": "target_label",
    "by": "created_by",
    "predicted_bytes": "predicted_bytes",
    "before_bytes": "before_bytes",
    "after_bytes": "after_bytes",
    "held_bytes": "undo_bytes",
    "freed_bytes": "freed_bytes",
    "freed_at": "freed_at",
    "undo": "undo_state",
    "started": "started",
    "finished": "finished",
    "seconds": seconds_of,
}


@require_safe
@page()
def ledger_csv(request: PageRequest) -> HttpResponseBase:
    """All lines as they are filtered and ordered, those that are held among them."""
    return csv_answer("ledger", CSV_COLUMNS, filtered(request, LedgerFilters, lines_for(request.actor)).exact())
