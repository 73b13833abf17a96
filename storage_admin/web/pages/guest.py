"""A guest: its disks, and what Proxmox VE itself does with them, with a plan before anything happens."""

from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import uuid4

from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_safe

from images import selectors
from images.models import Image
from storage_admin.accounts.models import Role
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.guests import proxmox_vms
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.selectors import in_scope
from storage_admin.jobs import kinds, services
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan
from storage_admin.web.page import PageRequest, attempt, page, plan_digest, was_planned
from storage_admin.web.pages.guests import cache_advice, discard_advice

GIB = 1 << 30
MIB = 1 << 20
#: A size is a whole number of these.
BLOCK = 1024


def _guest(request: PageRequest, guest_id: int) -> Guest:
    found = selectors.guests_for(request.actor).filter(pk=guest_id).first()
    if found is None:
        raise NotFoundError(_("There is no guest {guest}.").format(guest=guest_id))
    return found


def _own_disks(guest: Guest) -> list[GuestDisk]:
    return [
        disk
        for disk in guest.disks.all()
        if disk.device == "disk" and not disk.only_in and not disk.target.startswith(proxmox_vms.BESIDE)
    ]


@require_safe
@page()
def guest(request: PageRequest, guest_id: int) -> HttpResponseBase:
    """One guest."""
    shown = _guest(request, guest_id)
    against = [sentence for __, sentence in proxmox_vms.offline(shown)] if shown.kind == Guest.Kind.VM else []
    jobs = Job.objects.filter(target_kind="guest", target_id=shown.pk)
    context = {
        "section": "guests", "guest": shown, "against": against, "may_change": shown.kind == Guest.Kind.VM,
        "images": {image.pk: image for image in in_scope(Image.objects.filter(uses__disk__guest=shown), request.actor)},
        "disks": [(disk, cache_advice(disk), discard_advice(disk)) for disk in shown.disks.all()],
        "own": {disk.target for disk in _own_disks(shown)},
        "jobs": jobs[:10], "job_now": jobs.filter(state__in=Job.ACTIVE).last(),
    }  # fmt: skip
    return render(request, "guests/guest.html", context)


def options_from(kind: str, form: QueryDict) -> dict[str, Any]:
    """The job's options from the form.

    Raises:
        InvalidError: a field holds something else than it should; it names each.
    """
    if kind == "trim":
        return {}
    options: dict[str, Any] = {"disk": form.get("disk", "")}
    if form.get("accept_hidden_lines"):
        options["accept_hidden_lines"] = form["accept_hidden_lines"]
    if kind == "resize":
        size = _number(form.get("size_gib", ""), "size_gib", GIB)
        return options | ({} if size is None else {"size_bytes": -(-size // BLOCK) * BLOCK})
    options |= {"storage": form.get("storage", "").strip(), "delete_source": form.get("delete_source") == "true"}
    if form.get("format"):
        options["format"] = form["format"]
    speed = _number(form.get("bandwidth_mib", ""), "bandwidth_mib", MIB)
    return options | ({} if speed is None else {"bandwidth_bytes_sec": speed})


def _number(text: str, name: str, factor: int) -> int | None:
    if not text.strip():
        return None
    try:
        value = Decimal(text.strip()) * factor
        if value.is_finite() and 0 < value < 1 << 62:
            return int(value)
    except InvalidOperation:
        pass
    raise InvalidError(_("Some numbers are invalid."), {name: _("Enter a number above 0.")})


@require_http_methods(["GET", "HEAD", "POST"])
@page()
def guest_job(request: PageRequest, guest_id: int, kind_name: str) -> HttpResponseBase:
    """A move, an enlargement or a trim: the form, the plan, and the button that starts it.

    POST starts what the page had shown; with ``show``, or where it had shown another plan, it is the plan again.
    """
    shown, kind = _guest(request, guest_id), kinds.get(kind_name)
    given = request.POST if request.method == "POST" else request.GET
    error, plan, options = None, None, dict[str, Any]()
    asked = kind_name == "trim" or bool(given.get("storage") or given.get("size_gib"))
    try:
        options = options_from(kind_name, given)
        if request.method == "POST" and "show" not in given:
            request.actor.require(Role.OPERATOR, shown.host.slug)
            if was_planned(request, options):
                return _start(request, shown, kind_name, options)
        if asked:
            plan = services.plan(request.actor, kind_name, shown.pk, options)
    except InvalidError as invalid:
        error = invalid
    context = _context(shown, given, str(kind.title), kind_name, plan, error)
    return render(request, "guests/job.html", context | {"planned": plan_digest(options)})


def acceptance(shown: Guest, plan: Plan | None, given: QueryDict) -> str:
    """The query of the same plan with what an admin may accept; empty where that is not what is in the way."""
    codes = {refusal.code for refusal in plan.refusals} if plan is not None else set()
    if "hidden_lines" not in codes or not shown.host.by_api_alone or not shown.digest:
        return ""
    query = given.copy()
    for name in ("csrfmiddlewaretoken", "key", "planned", "show"):
        query.pop(name, None)
    query["accept_hidden_lines"] = shown.digest
    return "" if given.get("accept_hidden_lines") == shown.digest else query.urlencode()


def _start(request: PageRequest, shown: Guest, kind_name: str, options: dict[str, Any]) -> HttpResponseBase:
    key = "".join(filter(str.isalnum, request.POST.get("key", "")))[:40]
    job = attempt(
        request, lambda: services.submit(request.actor, kind_name, shown.pk, options, idempotency_key=key)
    )  # fmt: skip
    return redirect("guest", shown.pk) if job is None else redirect("job", job.pk)


def _context(
    shown: Guest, given: QueryDict, title: str, kind_name: str, plan: Plan | None, error: InvalidError | None
) -> dict[str, Any]:
    names = ("disk", "storage", "format", "size_gib", "bandwidth_mib", "delete_source", "accept_hidden_lines")
    pools = StoragePool.objects.filter(host=shown.host_id, source=StoragePool.Source.PROXMOX)
    return {
        "section": "guests", "guest": shown, "title": title, "kind_name": kind_name, "plan": plan, "error": error,
        "accept": acceptance(shown, plan, given),
        "values": {name: given.get(name, "") for name in names}, "disks": _own_disks(shown), "key": uuid4().hex,
        "storages": sorted(set(pools.values_list("name", flat=True))), "formats": ("raw", "qcow2", "vmdk"),
        "address": reverse(kind_name, args=[shown.pk]),
    }  # fmt: skip
