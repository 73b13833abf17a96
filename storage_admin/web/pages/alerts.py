"""Alerts: what is wrong now, who sees to it, and what was."""

from typing import Any

from django.http import HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_POST, require_safe

from images.selectors.what_frees import what_frees
from storage_admin.accounts.models import Role
from storage_admin.accounts.saved_views import list_page
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.errors import NotFoundError
from storage_admin.events import services
from storage_admin.events.filters import AlertFilters
from storage_admin.events.models import Alert
from storage_admin.events.selectors import alerts_for, open_alerts, open_first
from storage_admin.hosts.selectors import pools_for
from storage_admin.web.lists import Filtered, filtered
from storage_admin.web.page import (
    PageRequest,
    attempt,
    live,
    live_body,
    live_context,
    local,
    page,
    paginated,
    wants_fragment,
)

PER_PAGE = 50
PAGE = list_page("alerts", gettext_noop("Alerts"), AlertFilters.base_filters)
CSV_COLUMNS: Columns = {
    name: name
    for name in (
        "id", "kind", "severity", "title", "detail", "host", "target_kind", "target_id", "target_label", "opened",
        "updated", "closed", "acknowledged", "acknowledged_by",
    )
}  # fmt: skip
STATES = (("", "all"), ("new", "new"), ("acknowledged", "acknowledged"), ("closed", "over"))
#: The page of what an alert is about: the name of its URL, and whether it takes an id.
PAGES = {"image": True, "pool": True, "job": True, "policy": True, "webhook": True, "hosts": False, "guest": True}

#: Kinds of alerts that a pool has too little space, and pages of plans that are not called as their kinds of jobs.
OF_SPACE = (services.POOL_OVER_THRESHOLD, services.POOL_DAYS_UNTIL_FULL, services.UNDO_HELD)
PLANS = {"discard_undo": "job", "delete_snapshot": "guest_snapshots"}


def link_of(alert: Alert) -> str:
    """Where an alert leads to; empty where that is nowhere."""
    name = "hosts" if alert.target_kind == "host" else alert.target_kind
    if name not in PAGES or alert.target_id is None:
        return ""
    try:
        return reverse(name, args=[alert.target_id] if PAGES[name] else [])
    except NoReverseMatch:
        return ""


def _listed(request: PageRequest) -> Filtered[Alert]:
    return filtered(request, AlertFilters, open_first(alerts_for(request.actor)))


@require_safe
@page()
def alerts(request: PageRequest) -> HttpResponseBase:
    """All alerts, what is open and new first. The rows look for changes by themselves."""
    found = _listed(request)
    values, rows = found.values, paginated(request, found.rows, PER_PAGE)
    query = request.GET.copy()
    query.pop("v", None)
    url = f"{reverse('alerts')}?{query.urlencode()}"
    shown = [
        {"alert": alert, "link": link_of(alert), "kind": services.KINDS.get(alert.kind, alert.kind)} for alert in rows
    ]
    context: dict[str, Any] = {"rows": rows, "shown": shown, "here": url, "narrowed": bool(values)}
    context["ignored"] = found.ignored
    if wants_fragment(request):
        return live(request, "alerts/list.html#rows", context, url=url, every="10s")
    body, version = live_body(request, "alerts/list.html#rows", context)
    kinds = [
        {"value": kind, "word": word, "chosen": kind == values.get("kind")} for kind, word in services.KINDS.items()
    ]
    kept = [(name, values[name]) for name in ("state", "severity", "host", "ordering") if name in values]
    context |= {"section": "alerts", "states": STATES, "kinds": kinds, "values": values, "kept": kept}
    return render(request, "alerts/list.html", context | live_context(body, version, url=url, every="10s"))


@require_safe
@page()
def alerts_csv(request: PageRequest) -> HttpResponseBase:
    """The whole list as it is filtered."""
    return csv_answer("alerts", CSV_COLUMNS, _listed(request).exact())


@require_safe
@page()
def alerts_count(request: PageRequest) -> HttpResponseBase:
    """How many alerts are new, for the sidebar; 204 as long as it is what the page has (``n``)."""
    count = open_alerts(request.actor)
    if request.GET.get("n") == str(count):
        return HttpResponse(status=204)
    return render(request, "alerts/count.html", {"open_alerts": count})


def _alert(request: PageRequest, alert_id: int) -> Alert:
    alert = alerts_for(request.actor).filter(pk=alert_id).first()
    if alert is None:
        raise NotFoundError(_("There is no alert {alert}.").format(alert=alert_id))
    return alert


@require_safe
@page()
def alert(request: PageRequest, alert_id: int) -> HttpResponseBase:
    """One alert: what it rests on, since when, who sees to it, how often it was there before."""
    row = _alert(request, alert_id)
    before = alerts_for(request.actor).filter(key=row.key, pk__lt=row.pk)[:20]
    context = {"section": "alerts", "alert": row, "link": link_of(row), "before": before, "here": request.path}
    context["frees"] = _frees(request, row)
    return render(request, "alerts/alert.html", context | {"kind": services.KINDS.get(row.kind, row.kind)})


def _frees(request: PageRequest, row: Alert) -> list[dict[str, Any]]:
    """What would free most space in the pool that an open alert is about, with the page of each plan."""
    if row.closed is not None or row.kind not in OF_SPACE or row.target_id is None:
        return []
    pool = pools_for(request.actor).filter(pk=row.target_id).first()
    found = what_frees(request.actor, pool) if pool is not None else []
    return [{"plan": one, "link": reverse(PLANS.get(one.kind, one.kind), args=[one.target_id])} for one in found]


@require_POST
@page(Role.OPERATOR)
def alert_ack(request: PageRequest, alert_id: int) -> HttpResponseBase:
    """Somebody sees to it."""
    row = _alert(request, alert_id)
    attempt(
        request, lambda: services.acknowledge(request.actor, row), _("Acknowledged: {title}.").format(title=row.title)
    )
    where = request.POST.get("next", "")
    return HttpResponseRedirect(local(where, reverse("alerts")))
