"""One pool: how full it is and was, its largest images, and what an admin decides of it."""

from functools import partial
from typing import Any

from django.contrib import messages
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from images import leftovers, selectors
from images.orphans.rows import bytes_aside
from images.selectors.undo_copies import undo_copies
from images.templatetags.storage import bar_scale
from images.views.access import PageRequest, attempt, number, page
from storage_admin.accounts.roles import Role
from storage_admin.hosts import folders, services
from storage_admin.hosts.errors import InvalidError, NotFoundError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.services import submit


def _pool(request: PageRequest, pool_id: int) -> StoragePool:
    pool = StoragePool.objects.select_related("host").filter(pk=pool_id).first()
    if pool is None or not request.actor.sees(pool.host.slug):
        raise NotFoundError(f"There is no pool {pool_id}.")
    return pool


@require_safe
@page()
def pool(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """One pool: how full it is and was, its largest images, and what an admin decides of it."""
    row = _pool(request, pool_id)
    largest = selectors.images_for(request.actor).filter(pool=row).order_by("-allocated_size", "-id")[:15]
    context = {"section": "hosts", "pool": row, "largest": largest, "chart": _chart(row)}
    context["scale"] = bar_scale((image.virtual_size, image.allocated_size) for image in largest)
    context["copies"] = undo_copies(row)
    context["leftovers"] = leftovers.of_pool(row)
    context["forecast"] = selectors.forecasts([row]).get(row.pk)
    context["aside"] = bytes_aside([row]).get(row.pk)
    context["may_list"] = folders.may_list(request.actor, row.host)
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
            name=request.POST.get("name", ""),
            warn_percent=number(request.POST.get("warn_percent")),
            **_thresholds(request),
            all_hosts_registered="all_hosts_registered" in request.POST if row.network else None,
            share_bases="share_bases" in request.POST,
        )

    attempt(request, change, f"{row.name} is changed.")
    return redirect("pool", row.pk)


@require_POST
@page(Role.ADMIN)
def pool_confirm_folder(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """Takes the folder for the pool's that its path leads to now, and scans it."""
    row = _pool(request, pool_id)
    confirm = partial(services.confirm_folder, request.actor, row, add_to_list="add_to_list" in request.POST)
    if attempt(request, confirm, f"The folder of {row.name} is confirmed; a scan is queued."):
        attempt(request, partial(submit, request.actor, "scan", row.host.pk, {}))
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
def pool_leftover(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """Puts an undo copy of another dashboard back, or removes it, when its job is named."""
    row = _pool(request, pool_id)
    name, action = request.POST.get("job", ""), request.POST.get("action", "")
    if request.POST.get("confirm", "").strip() != name:
        messages.error(request, f"Not confirmed: type “{name}” to confirm. Nothing was changed.")
        return redirect("pool", row.pk)
    options = {"job": name, "action": action, "force": "force" in request.POST}
    job = attempt(request, lambda: submit(request.actor, "settle_leftover", row.pk, options))
    return redirect("job", job.pk) if job else redirect("pool", row.pk)


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
