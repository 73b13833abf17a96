"""Hosts: whether they answer, what is installed there and for what, their pools; each of these has its own page."""

from functools import partial
from typing import Any

from django.contrib import messages
from django.db.models import Prefetch
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST, require_safe

from images.rewrite import refusals
from storage_admin.accounts.models import Role
from storage_admin.accounts.saved_views import list_page
from storage_admin.agent.protocol import RefusedError
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts import folders, qemu_bugs, registration, services
from storage_admin.hosts.filters import HostFilters
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.selectors import hosts_for, pools_for
from storage_admin.hosts.services import UNCHANGED, Unchanged
from storage_admin.jobs.models import Job
from storage_admin.jobs.services import submit
from storage_admin.web.forms import Form, status_of, typed
from storage_admin.web.lists import Filtered, as_choices, filtered
from storage_admin.web.page import (
    PageRequest,
    attempt,
    live,
    live_body,
    live_context,
    page,
    paginated,
    wants_fragment,
)
from storage_admin.web.pages.host_tools import abilities_of

MIB = 1 << 20
PER_PAGE = 50
PAGE = list_page("hosts", gettext_noop("Hosts"), HostFilters.base_filters)
ORDERINGS = (
    ("name", _("name")),
    ("-status", _("state, unreachable first")),
    ("last_seen", _("last seen, oldest first")),
    ("-last_seen", _("last seen, newest first")),
)


def _settings(host: Host) -> dict[str, Any]:
    """What an admin decides of a host, by the names of the form's fields."""
    limit = host.bandwidth_bytes_sec
    return {
        "name": host.name, "max_jobs": host.max_jobs, "bandwidth_mib": "" if limit is None else str(limit // MIB),
        "idle_io": host.idle_io,
    }  # fmt: skip


def _listed(request: PageRequest) -> Filtered[Host]:
    """The hosts that the query string asks for, by name unless it says otherwise."""
    return filtered(request, HostFilters, hosts_for(request.actor).order_by("name", "id"))


def _context(request: PageRequest, found: Filtered[Host]) -> dict[str, Any]:
    pools = Prefetch("pools", StoragePool.objects.order_by("name"))
    page_of = paginated(request, found.rows.prefetch_related(pools), PER_PAGE)
    shown = list(page_of)
    at_work = Job.objects.filter(kind="scan", state__in=Job.ACTIVE, host__in=shown)
    scans = {job.host_id: job for job in at_work.order_by("-id")}
    rows = [
        {
            "host": host,
            "scan": scans.get(host.pk),
            "abilities": abilities_of(host),
            "qemu_bugs": qemu_bugs.of_host(host),
            "has_agent": refusals.without_agent(host) == [] and host.transport != Host.Transport.PLAIN,
            "form": typed(request, reverse("host_change", args=[host.pk]), _settings(host)),
            "path": typed(request, reverse("folder_add", args=[host.pk]), {"path": ""})["path"],
        }
        for host in shown
    ]
    values = found.values
    return {
        "rows": rows,
        "page_of": page_of,
        "scanning": bool(scans),
        "values": values,
        "ignored": found.ignored,
        "kinds": as_choices(((one, one) for one in Host.Kind.values), values.get("kind", "")),
        "statuses": as_choices(((one, one) for one in Host.Status.values), values.get("status", "")),
        "orderings": as_choices(ORDERINGS, values.get("ordering", "name")),
    }


@require_safe
@page()
def hosts(request: PageRequest) -> HttpResponseBase:
    """Hosts by filters; their state and pools refresh while a scan is at work there."""
    context = _context(request, _listed(request))
    query = request.GET.copy()
    query.pop("v", None)
    url = f"{reverse('hosts')}?{query.urlencode()}" if query else reverse("hosts")
    every = "2s" if context["scanning"] else "20s"
    if wants_fragment(request):
        return live(request, "hosts/cards.html", context, url=url, every=every)
    body, version = live_body(request, "hosts/cards.html", context)
    context |= {"section": "hosts"} | live_context(body, version, url=url, every=every)
    return render(request, "hosts/hosts.html", context)


#: A line of the list of hosts as CSV.
CSV_COLUMNS: Columns = {
    "id": "pk",
    "slug": "slug",
    "name": "name",
    "kind": "kind",
    "address": "address",
    "port": "port",
    "user": "user",
    "transport": "transport",
    "cluster": "cluster",
    "status": "status",
    "status_detail": "status_detail",
    "owners_unknown": "owners_unknown",
    "last_seen": "last_seen",
    "qemu_img": lambda host: host.capabilities.get("qemu_img"),
    "max_jobs": "max_jobs",
    "bandwidth_bytes_sec": "bandwidth_bytes_sec",
    "idle_io": "idle_io",
}

#: A line of the list of their pools; what a scan counts is not known before the first one.
POOL_CSV_COLUMNS: Columns = {
    "id": "pk",
    "host": "host.name",
    "name": "name",
    "kind": "kind",
    "path": "path",
    "filesystem": "filesystem",
    "network": "network",
    "state": "state",
    "state_detail": "state_detail",
    "capacity_bytes": "capacity_bytes",
    "used_bytes": "used_bytes",
    "available_bytes": "available_bytes",
    "reserved_bytes": "reserved_bytes",
    "metadata_bytes": "metadata_bytes",
    "metadata_percent": "metadata_percent",
    "warn_percent": "warn_percent",
    "images": lambda pool: pool.images_count if pool.last_scanned else None,
    "allocated_bytes": "allocated_bytes",
    "virtual_bytes": "virtual_bytes",
    "overcommit_ratio": "overcommit_ratio",
    "reclaimable_bytes": "reclaimable_bytes",
    "undo_bytes": "known_undo_bytes",
    "last_scanned": "last_scanned",
}


@require_safe
@page()
def hosts_csv(request: PageRequest) -> HttpResponseBase:
    """The hosts as they are filtered and ordered."""
    return csv_answer("hosts", CSV_COLUMNS, _listed(request).exact())


@require_safe
@page()
def pools_csv(request: PageRequest) -> HttpResponseBase:
    """The pools of the hosts as those are filtered."""
    chosen = _listed(request).exact().order_by().values("pk")
    rows = pools_for(request.actor).filter(host__in=chosen).order_by("host__name", "name", "id")
    return csv_answer("pools", POOL_CSV_COLUMNS, rows)


def _host(request: PageRequest, host_id: int) -> Host:
    host = Host.objects.filter(pk=host_id).first()
    if host is None or not request.actor.sees(host.slug):
        raise NotFoundError(gettext("There is no host {host}.").format(host=host_id))
    return host


@require_POST
@page(Role.OPERATOR)
def host_scan(request: PageRequest, host_id: int) -> HttpResponseBase:
    """Scans now."""
    host = _host(request, host_id)
    attempt(
        request,
        partial(submit, request.actor, "scan", host.pk, {}),
        gettext("A scan of {host} is queued.").format(host=host.name),
    )
    return redirect("hosts")


def _alone(request: PageRequest, host: Host, **more: Any) -> HttpResponseBase:
    """The page with one host alone, one of whose forms was refused."""
    host.refresh_from_db()
    alone = Filtered(rows=hosts_for(request.actor).filter(pk=host.pk), values={}, ignored=[])
    context = _context(request, alone) | {"section": "hosts"} | more
    body, version = live_body(request, "hosts/cards.html", context)
    context |= live_context(body, version, url=reverse("hosts"), every="20s")
    return render(request, "hosts/hosts.html", context, status=status_of(request))


@require_POST
@page(Role.ADMIN)
def host_remove(request: PageRequest, host_id: int) -> HttpResponseBase:
    """Forgets a host; who does it types its name."""
    host, form = _host(request, host_id), Form(request)

    def remove() -> bool:
        form.confirmed(host.name.strip())
        registration.remove_host(request.actor, host)
        return True

    done = form.save(remove, gettext("{host} was removed. Nothing on it was changed.").format(host=host.name))
    return redirect("hosts") if done else _alone(request, host)


@require_POST
@page(Role.ADMIN)
def folder_add(request: PageRequest, host_id: int) -> HttpResponseBase:
    """Registers a folder and scans it; what is wrong with the path stands beside it."""
    host = _host(request, host_id)
    form, unlisted = Form(request), False

    def register() -> StoragePool:
        nonlocal unlisted
        try:
            add_to_list = "add_to_list" in request.POST
            return services.register_folder(request.actor, host, form.text("path"), add_to_list=add_to_list)
        except RefusedError as error:
            unlisted = error.code == "folder_not_listed"
            raise InvalidError(error.detail, {"path": error.detail}) from None

    pool = form.save(register)
    if pool is None:
        return _alone(request, host, may_list=unlisted and folders.may_list(request.actor, host))
    messages.success(request, gettext("{path} is registered; a scan of it is queued.").format(path=pool.path))
    attempt(request, partial(submit, request.actor, "scan", host.pk, {}))
    return redirect("hosts")


@require_POST
@page(Role.ADMIN)
def host_change(request: PageRequest, host_id: int) -> HttpResponseBase:
    """What an admin decides of a host: its name, how many rewriting jobs run there at once, and how fast they go."""
    host = _host(request, host_id)
    form = Form(request, {"bandwidth_bytes_sec": "bandwidth_mib"})
    bandwidth: int | Unchanged | None = UNCHANGED
    # The field rounds: what it showed and nobody touched stays what it is.
    if "bandwidth_mib" in request.POST and form.text("bandwidth_mib").strip() != _settings(host)["bandwidth_mib"]:
        mib = form.whole("bandwidth_mib")
        bandwidth = None if mib is None else mib * MIB
    max_jobs = form.whole("max_jobs", required=True)
    changed = form.save(
        lambda: services.update_host(
            request.actor, host, name=form.text("name"), max_jobs=max_jobs, bandwidth_bytes_sec=bandwidth,
            # An empty checkbox sends nothing: only together with the field beside it does that mean no.
            idle_io="idle_io" in request.POST if "bandwidth_mib" in request.POST else None,
        ),
        gettext("{host} was saved.").format(host=host.name),
    )  # fmt: skip
    return _alone(request, host) if changed is None else redirect("hosts")
