"""Hosts: whether they answer, what is installed there and for what, their pools."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from django.contrib import messages
from django.db.models import Prefetch
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from images import refusals, selectors
from images.orphans.rows import bytes_aside
from images.selectors.undo_copies import undo_copies
from images.templatetags.storage import bar_scale
from images.views.access import (
    PageRequest,
    attempt,
    live,
    live_body,
    live_context,
    number,
    page,
    paginated,
    wants_fragment,
)
from images.views.lists import Filtered, as_choices, filtered
from storage_admin.accounts.roles import Role
from storage_admin.accounts.saved_views import list_page
from storage_admin.agent.protocol import RefusedError
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.hosts import libvirt_alone, proxmox_alone, registration, services
from storage_admin.hosts.errors import InvalidError, NotFoundError
from storage_admin.hosts.host_filters import HostFilters
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.selectors import hosts_for, pools_for
from storage_admin.hosts.services import UNCHANGED, Unchanged
from storage_admin.jobs.models import Job
from storage_admin.jobs.services import submit

MIB = 1 << 20
PER_PAGE = 50
PAGE = list_page("hosts", "Hosts", HostFilters.base_filters)
ORDERINGS = (
    ("name", "name"),
    ("-status", "state, unreachable first"),
    ("last_seen", "last seen, longest ago first"),
    ("-last_seen", "last seen, latest first"),
)


@dataclass(frozen=True)
class Tool:
    """A program on the host and what cannot be done without it; or a feature of the API, and what is lacking for it."""

    name: str
    purpose: str
    package: str
    #: ``True`` or a version: there; ``False``: missing; ``None``: nobody has looked yet.
    found: str | bool | None


#: Name in the capabilities, what it is called, what it is for, the Debian package that brings it.
TOOLS = (
    ("qemu_img", "qemu-img", "every job on an image: analyze, reclaim, flatten, convert, check", "qemu-utils"),
    ("zstd", "zstd in qemu-img", "compress faster and smaller than zlib", "qemu-utils 5.1 or newer"),
    ("setpriv", "setpriv", "every rewriting job: tools die with the agent", "util-linux"),
    ("ionice", "ionice", "jobs that give way to guests", "util-linux"),
    ("virt-sparsify", "virt-sparsify", "finding deleted files inside an image", "guestfs-tools"),
)


@dataclass(frozen=True)
class Abilities:
    """What a host offers, or lacks, and for which feature.

    Args:
        heading: what the list is of.
        rights: what is done by the API of Proxmox VE, and what its token lacks for that.
        sentence: why there is no list, or what holds for all of it; may be empty.
    """

    heading: str
    tools: tuple[Tool, ...] = ()
    rights: tuple[Tool, ...] = ()
    sentence: str = ""


def abilities_of(host: Host) -> Abilities:
    """What the last scan found, by the way that the host is reached."""
    if proxmox_alone.is_alone(host):
        return Abilities("What the API token may do", rights=_rights(host), sentence=proxmox_alone.why_not(host))
    if libvirt_alone.is_alone(host):
        return Abilities("What can be done here", sentence=libvirt_alone.why_not(host))
    if host.transport == Host.Transport.PLAIN:
        return Abilities("What can be done here", sentence=_PLAIN)
    return Abilities("Tools", tuple(tools_of(host)), _rights(host) if host.token_id else ())


_PLAIN = (
    "There is no Python 3 on it, so that no agent can run: its containers are listed, and their I/O priority is set by "
    "plain commands. Its images are not looked at."
)


def _rights(host: Host) -> tuple[Tool, ...]:
    """What is done by the API of Proxmox VE, and whether the token may."""
    looked = "missing_rights" in host.capabilities
    return tuple(
        Tool(one.title, one.lacking, "", not one.lacking if looked else None) for one in proxmox_alone.features(host)
    )


def tools_of(host: Host) -> list[Tool]:
    """What the last scan found of each tool."""
    known: dict[str, Any] = (host.capabilities.get("tools") or {}) | host.capabilities
    return [
        Tool(name, purpose, package, known[key] or False if key in known else None)
        for key, name, purpose, package in TOOLS
    ]


def _in_mib(bytes_sec: int | None) -> str:
    return "" if bytes_sec is None else str(bytes_sec // MIB)


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
            "has_agent": refusals.without_agent(host) == [] and host.transport != Host.Transport.PLAIN,
            "bandwidth_mib": _in_mib(host.bandwidth_bytes_sec),
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
        "kinds": as_choices(Host.Kind.choices, values.get("kind", "")),
        "statuses": as_choices(Host.Status.choices, values.get("status", "")),
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
        return live(request, "hosts/hosts.html#hosts", context, url=url, every=every)
    body, version = live_body(request, "hosts/hosts.html#hosts", context)
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
    "warn_percent": "warn_percent",
    "images": lambda pool: pool.images_count if pool.last_scanned else None,
    "allocated_bytes": "allocated_bytes",
    "virtual_bytes": "virtual_bytes",
    "overcommit_ratio": "overcommit_ratio",
    "reclaimable_bytes": "reclaimable_bytes",
    "undo_bytes": lambda pool: pool.undo_bytes if pool.last_scanned else None,
    "last_scanned": "last_scanned",
}


@require_safe
@page()
def hosts_csv(request: PageRequest) -> HttpResponseBase:
    """The hosts as they are filtered and ordered."""
    return csv_answer("hosts", CSV_COLUMNS, _listed(request).rows)


@require_safe
@page()
def pools_csv(request: PageRequest) -> HttpResponseBase:
    """The pools of the hosts as those are filtered."""
    chosen = _listed(request).rows.order_by().values("pk")
    rows = pools_for(request.actor).filter(host__in=chosen).order_by("host__name", "name", "id")
    return csv_answer("pools", POOL_CSV_COLUMNS, rows)


def _host(request: PageRequest, host_id: int) -> Host:
    host = Host.objects.filter(pk=host_id).first()
    if host is None or not request.actor.sees(host.slug):
        raise NotFoundError(f"There is no host {host_id}.")
    return host


def _pool(request: PageRequest, pool_id: int) -> StoragePool:
    pool = StoragePool.objects.select_related("host").filter(pk=pool_id).first()
    if pool is None or not request.actor.sees(pool.host.slug):
        raise NotFoundError(f"There is no pool {pool_id}.")
    return pool


@require_POST
@page(Role.OPERATOR)
def host_scan(request: PageRequest, host_id: int) -> HttpResponseBase:
    """Scans now."""
    host = _host(request, host_id)
    attempt(request, partial(submit, request.actor, "scan", host.pk, {}), f"A scan of {host.name} is queued.")
    return redirect("hosts")


@require_POST
@page(Role.ADMIN)
def host_remove(request: PageRequest, host_id: int) -> HttpResponseBase:
    """Forgets a host; who does it types its name."""
    host = _host(request, host_id)

    def remove() -> None:
        if request.POST.get("confirm", "") != host.name:
            raise InvalidError(f"Type the name {host.name} to remove the host.")
        registration.remove_host(request.actor, host)

    attempt(request, remove, f"{host.name} is forgotten. Nothing on it was touched.")
    return redirect("hosts")


@require_POST
@page(Role.ADMIN)
def folder_add(request: PageRequest, host_id: int) -> HttpResponseBase:
    """Registers a folder and scans it; what is wrong with the path stands beside it."""
    host = _host(request, host_id)
    path = request.POST.get("path", "")
    try:
        pool = services.register_folder(request.actor, host, path)
    except (InvalidError, RefusedError) as error:
        alone = Filtered(rows=hosts_for(request.actor).filter(pk=host.pk), values={}, ignored=[])
        context = _context(request, alone) | {"section": "hosts", "path": path, "path_error": error.detail}
        body, version = live_body(request, "hosts/hosts.html#hosts", context)
        context |= live_context(body, version, url=reverse("hosts"), every="20s") | {"at_host": host.pk}
        return render(request, "hosts/hosts.html", context, status=400)
    messages.success(request, f"{pool.path} is registered; a scan of it is queued.")
    attempt(request, partial(submit, request.actor, "scan", host.pk, {}))
    return redirect("hosts")


@require_safe
@page()
def pool(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """One pool: how full it is and was, its largest images, and what an admin decides of it."""
    row = _pool(request, pool_id)
    largest = selectors.images_for(request.actor).filter(pool=row).order_by("-allocated_size", "-id")[:15]
    context = {"section": "hosts", "pool": row, "largest": largest, "chart": _chart(row)}
    context["scale"] = bar_scale((image.virtual_size, image.allocated_size) for image in largest)
    context["copies"] = undo_copies(row)
    context["forecast"] = selectors.forecasts([row]).get(row.pk)
    context["aside"] = bytes_aside([row]).get(row.pk)
    return render(request, "hosts/pool.html", context)


def _chart(row: StoragePool) -> dict[str, Any] | None:
    samples = list(row.samples.order_by("-at")[:500])[::-1]
    if len(samples) < 2:
        return None
    used = [{"x": round(at.at.timestamp()), "y": at.used_bytes} for at in samples]
    whole = [{"x": round(at.at.timestamp()), "y": at.capacity_bytes} for at in samples]
    return {
        "type": "line",
        "data": {
            "datasets": [
                {"label": "used", "data": used, "colour": "--sa-fill", "fill": True, "pointRadius": 0},
                {"label": "capacity", "data": whole, "colour": "--sa-muted", "borderDash": [4, 4], "pointRadius": 0},
            ]
        },
        "options": {"scales": {"x": {"type": "linear"}, "y": {"beginAtZero": True}}},
    }


@require_POST
@page(Role.ADMIN)
def pool_change(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """What an admin decides of a pool: its name, its threshold, whether all hosts that use it are registered."""
    row = _pool(request, pool_id)

    def change() -> StoragePool:
        return services.update_pool(
            request.actor,
            row,
            name=request.POST.get("name", "").replace("\0", ""),
            warn_percent=number(request.POST.get("warn_percent")),
            **_thresholds(request),
            all_hosts_registered="all_hosts_registered" in request.POST if row.network else None,
        )

    attempt(request, change, f"{row.name} is changed.")
    return redirect("pool", row.pk)


def _thresholds(request: PageRequest) -> dict[str, Any]:
    """Optional thresholds as a form gives them: empty for none, left alone where the form has them not."""
    post = request.POST
    found: dict[str, Any] = {name: number(post[name]) for name in ("warn_days", "warn_undo_percent") if name in post}
    if "warn_overcommit" in post:
        text = post["warn_overcommit"].strip().replace(",", ".")
        try:
            found["warn_overcommit"] = float(text) if text else None
        except ValueError:
            raise InvalidError(f"{text[:40]!r} is no number.") from None
    return found


@require_POST
@page(Role.ADMIN)
def pool_remove(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """Forgets a folder, when its name is confirmed. Nothing on the host is touched."""
    row = _pool(request, pool_id)
    if request.POST.get("confirm", "").strip() != row.name.strip():
        messages.error(request, f"Not confirmed: type the pool's name, {row.name}. Nothing was changed.")
        return redirect("pool", row.pk)
    try:
        services.remove_pool(request.actor, row)
    except InvalidError as error:
        messages.error(request, f"{error.detail} Nothing was changed.")
        return redirect("pool", row.pk)
    messages.success(request, f"{row.path} is forgotten. Its files are untouched.")
    return redirect("hosts")


@require_POST
@page(Role.ADMIN)
def host_change(request: PageRequest, host_id: int) -> HttpResponseBase:
    """What an admin decides of a host: its name, how many rewriting jobs run there at once, and how fast they go."""
    host = _host(request, host_id)

    def change() -> Host:
        bandwidth: int | Unchanged | None = UNCHANGED
        text = request.POST.get("bandwidth_mib", "").strip()
        # The field rounds: what it showed and nobody touched stays what it is.
        if "bandwidth_mib" in request.POST and text != _in_mib(host.bandwidth_bytes_sec):
            mib = number(text)
            bandwidth = None if mib is None else mib * MIB
        return services.update_host(
            request.actor,
            host,
            name=request.POST.get("name", "").replace("\0", ""),
            max_jobs=number(request.POST.get("max_jobs")),
            bandwidth_bytes_sec=bandwidth,
            # An empty checkbox sends nothing: only together with the field beside it does that mean no.
            idle_io="idle_io" in request.POST if "bandwidth_mib" in request.POST else None,
        )

    attempt(request, change, f"{host.name} is changed.")
    return redirect("hosts")
