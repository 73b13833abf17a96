"""One pool: how full it is and was, its largest images, and what an admin decides of it."""

from functools import partial
from typing import Any

from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from images import selectors
from images.models import Image
from images.orphans.rows import bytes_aside
from images.rewrite import mount
from images.scan import known
from images.scan.shared_storages import listed_in
from images.selectors.undo_copies import undo_copies
from storage_admin.accounts.models import Role
from storage_admin.errors import NotFoundError
from storage_admin.hosts import folders, services
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs.models import Job
from storage_admin.jobs.services import submit
from storage_admin.web.forms import Form, status_of, typed
from storage_admin.web.page import PageRequest, attempt, page
from storage_admin.web.templatetags.storage import bar_scale

#: What an admin decides of a pool, as the form calls it.
SETTINGS = (
    "name", "warn_percent", "warn_days", "warn_overcommit", "warn_undo_percent", "all_hosts_registered", "share_bases",
    "look_inside",
)  # fmt: skip


def pool_of(request: PageRequest, pool_id: int) -> StoragePool:
    """A pool of a host that exists for the user; raises NotFoundError."""
    pool = StoragePool.objects.select_related("host").filter(pk=pool_id).first()
    if pool is None or not request.actor.sees(pool.host.slug):
        raise NotFoundError(_("There is no pool {pool}.").format(pool=pool_id))
    return pool


@require_safe
@page()
def pool(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """One pool: how full it is and was, its largest images, and what an admin decides of it."""
    return _shown(request, pool_of(request, pool_id))


def _shown(request: PageRequest, row: StoragePool) -> HttpResponseBase:
    there = selectors.images_for(request.actor).filter(pool=listed_in(row)).exclude(state__in=Image.NOT_THERE)
    largest = selectors.ordered(there, "-allocated_size")[:15]
    context = {"section": "hosts", "pool": row, "largest": largest, "chart": _chart(row)}
    context["scale"] = bar_scale((image.virtual_size, image.allocated_size) for image in largest)
    context["copies"] = undo_copies(row)
    context["leftovers"] = known.leftovers_of(row)
    context["forecast"] = selectors.forecasts([row]).get(row.pk)
    context["mount"] = mount.facts(row)
    context["may_be"] = bool(row.may_be)
    context["aside"] = bytes_aside([row]).get(row.pk)
    context["may_list"] = folders.may_list(request.actor, row.host)
    kept = {name: getattr(row, name) for name in SETTINGS}
    context["form"] = typed(request, reverse("pool_change", args=[row.pk]), kept)
    return render(request, "hosts/pool.html", context, status=status_of(request))


def _chart(row: StoragePool) -> dict[str, Any] | None:
    samples = list(row.samples.order_by("-at")[:500])[::-1]
    if len(samples) < 2:
        return None
    since = row.minutes.filter(at__gt=samples[-1].at).order_by("at")
    looks = [*((at.at, at.used_bytes) for at in samples), *((at.at, at.used_bytes) for at in since)]
    used = [{"x": round(at.timestamp()), "y": bytes_used} for at, bytes_used in looks]
    sizes = [*((at.at, at.capacity_bytes) for at in samples), (looks[-1][0], row.capacity_bytes)]
    whole = [{"x": round(at.timestamp()), "y": capacity} for at, capacity in sizes]
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
    row, form = pool_of(request, pool_id), Form(request)
    # Optional thresholds: empty for none, left alone where the form has them not.
    thresholds: dict[str, Any] = {
        name: read(name)
        for name, read in (
            ("warn_days", form.whole), ("warn_undo_percent", form.whole), ("warn_overcommit", form.number),
        )
        if name in request.POST
    }  # fmt: skip
    warn_percent = form.whole("warn_percent", required=True)
    is_asked = row.network and request.actor.hosts is None
    changed = form.save(
        lambda: services.update_pool(
            request.actor, row, name=form.text("name"), warn_percent=warn_percent, **thresholds,
            all_hosts_registered="all_hosts_registered" in request.POST if is_asked else None,
            share_bases="share_bases" in request.POST, look_inside="look_inside" in request.POST,
        ),
        _("{row} was saved.").format(row=row.name),
    )  # fmt: skip
    return _shown(request, pool_of(request, pool_id)) if changed is None else redirect("pool", row.pk)


@require_POST
@page(Role.ADMIN)
def pool_confirm_folder(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """Takes the folder for the pool's that its path leads to now, and scans it."""
    row = pool_of(request, pool_id)
    confirm = partial(services.confirm_folder, request.actor, row, add_to_list="add_to_list" in request.POST)
    if attempt(request, confirm, _("The folder of {row} is confirmed.").format(row=row.name)):
        attempt(request, partial(submit, request.actor, "scan", row.host.pk, {}), _("A scan is queued."))
    return redirect("pool", row.pk)


@require_POST
@page(Role.ADMIN)
def pool_leftover(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """Puts an undo copy of another dashboard back, or removes it, when its job is named."""
    row = pool_of(request, pool_id)
    name, action = request.POST.get("job", ""), request.POST.get("action", "")
    options = {"job": name, "action": action, "force": "force" in request.POST}
    form = Form(request)

    def settle() -> Job:
        form.confirmed(name)
        return submit(request.actor, "settle_leftover", row.pk, options)

    job = form.save(settle)
    return redirect("job", job.pk) if job else _shown(request, row)


@require_POST
@page(Role.ADMIN)
def pool_remove(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """Forgets a folder, when its name is confirmed. Nothing on the host is touched."""
    row, form = pool_of(request, pool_id), Form(request)

    def remove() -> bool:
        form.confirmed(row.name.strip())
        services.remove_pool(request.actor, row)
        return True

    done = form.save(remove, _("The pool {path} was removed. Its files are unchanged.").format(path=row.path))
    return redirect("hosts") if done else _shown(request, row)
