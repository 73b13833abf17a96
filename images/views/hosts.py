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
from images.selectors.undo_copies import undo_copies
from images.templatetags.storage import bar_scale
from images.views.access import PageRequest, attempt, live, live_body, live_context, number, page, wants_fragment
from storage_admin.accounts.roles import Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts import libvirt_alone, proxmox_alone, registration, services
from storage_admin.hosts.errors import InvalidError, NotFoundError
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.services import UNCHANGED, Unchanged
from storage_admin.jobs.models import Job
from storage_admin.jobs.services import submit

MIB = 1 << 20


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


def _shown(request: PageRequest) -> list[Host]:
    pools = Prefetch("pools", StoragePool.objects.order_by("name"))
    return [host for host in Host.objects.prefetch_related(pools) if request.actor.sees(host.slug)]


def _context(request: PageRequest) -> dict[str, Any]:
    shown = _shown(request)
    scans = {job.host_id: job for job in Job.objects.filter(kind="scan", state__in=Job.ACTIVE).order_by("-id")}
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
    return {"rows": rows, "scanning": bool(scans)}


@require_safe
@page()
def hosts(request: PageRequest) -> HttpResponseBase:
    """Every host; its state and pools refresh while a scan is at work there."""
    context = _context(request)
    url, every = reverse("hosts"), "2s" if context["scanning"] else "20s"
    if wants_fragment(request):
        return live(request, "hosts/hosts.html#hosts", context, url=url, every=every)
    body, version = live_body(request, "hosts/hosts.html#hosts", context)
    context |= {"section": "hosts"} | live_context(body, version, url=url, every=every)
    return render(request, "hosts/hosts.html", context)


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
        context = _context(request) | {"section": "hosts", "path": path, "path_error": error.detail}
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
    return render(request, "hosts/pool.html", context)


def _chart(row: StoragePool) -> dict[str, Any] | None:
    samples = list(row.samples.order_by("-at")[:500])[::-1]
    if len(samples) < 2:
        return None
    used = [{"x": round(at.at.timestamp()), "y": at.capacity_bytes - at.available_bytes} for at in samples]
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
            all_hosts_registered="all_hosts_registered" in request.POST if row.network else None,
        )

    attempt(request, change, f"{row.name} is changed.")
    return redirect("pool", row.pk)


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
