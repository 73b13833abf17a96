"""A guest: its disks, and what Proxmox VE itself does with them, with a plan before anything happens."""

from collections import defaultdict
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_safe

from benchmarks import advice, results
from benchmarks import selectors as benchmarks
from benchmarks.figures import figure
from benchmarks.models import BenchmarkKind
from images import selectors
from images.models import Image, ImageUse
from images.rewrite.neighbours import ancestors
from storage_admin.accounts.models import Role
from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.guests import backups, proxmox_vms, snapshots
from storage_admin.guests.kinds.disk_settings import VALUES, SetDisk, restore_options
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.live_facts import Snapshot
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.selectors import in_scope
from storage_admin.jobs import kinds, services
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan
from storage_admin.web.page import PageRequest, attempt, page, plan_digest, was_planned
from storage_admin.web.pages.guests import cache_advice, discard_advice

GIB = 1 << 30
MIB = 1 << 20
#: Settings of a disk.
SETTINGS = tuple(VALUES)
#: Settings that do away with a cause for which a trim frees less, as the query of their form.
MENDABLE = {"discard_ignored": "discard=unmap", "zeroes_kept": "discard=unmap&detect_zeroes=unmap"}
#: Options that are texts.
TEXTS = (
    *SETTINGS,
    "disk",
    "storage",
    "format",
    "accept_hidden_lines",
    "down_to",
    "layer",
    "into",
    "name",
    "created",
    "target_name",
)
#: Options that are on or off.
SWITCHES = ("delete_source", "quiesce", "delete_merged")
#: Options that are ids.
IDS = ("target_pool", "job")
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


def _layers(guest: Guest, target: str) -> list[str]:
    """Paths of the images of a disk from above, as the last scan saw them; of the first disk where none is chosen."""
    disks = [disk for disk in _own_disks(guest) if disk.target == target] or _own_disks(guest)
    used = Image.objects.filter(uses__disk__in=[disk.pk for disk in disks[:1]])
    image = used.filter(host=guest.host_id).first()  # those of another host may not exist for whoever asks
    try:
        return [] if image is None else [image.path, *(base.path for base in ancestors(image))]
    except RefusedError:
        return []


def _restore(guest: Guest, kind: JobKind) -> str:
    """The query by which the form asks for what the last change of a disk's settings found there; empty without."""
    jobs = Job.objects.filter(kind=SetDisk.name, target_kind="guest", target_id=guest.pk, state=Job.State.SUCCEEDED)
    last = jobs.order_by("pk").last() if kind.name == SetDisk.name else None
    found = (last.result or {}) if last is not None else {}
    return urlencode({"disk": found["disk"], **restore_options(found)}) if found else ""


def _measured(guest: Guest, target: str) -> dict[str, Any]:
    """What was measured of cache and io on the pool of a disk; of the first disk where none is chosen."""
    disks = [disk for disk in _own_disks(guest) if disk.target == target] or _own_disks(guest)
    used = StoragePool.objects.filter(images__uses__disk__in=[disk.pk for disk in disks[:1]])
    pool = used.filter(host=guest.host_id).first()  # that of another host may not exist for whoever asks
    run = None if pool is None else benchmarks.last_of(BenchmarkKind.MODES, pool.pk)
    if pool is None or run is None:
        return {"pool": pool}
    by_setting = defaultdict[str, dict[str, str]](dict)
    rows = results.of(run)
    for row in rows:
        by_setting[row.name][row.metric] = figure(row)
    sentences = [one.sentence for one in advice.of(run.kind, rows, pool.name) if one.measurable]
    return {"pool": pool, "run": run, "rows": by_setting.items(), "sentences": sentences}


def _copied(guest: Guest) -> dict[str, int]:
    """Ids of the live copies that the disks of a guest are, by target: those that it can be switched back from."""
    jobs = Job.objects.filter(kind="live_copy", target_kind="guest", target_id=guest.pk, state=Job.State.SUCCEEDED)
    paths = {disk.target: disk.path for disk in _own_disks(guest)}
    found = {}
    for job in jobs.order_by("pk"):
        result = job.result or {}
        disk = result.get("disk", "")
        if result.get("left") and paths.get(disk) == result["now"]["chain"][0]:
            found[disk] = job.pk
    return found


@require_safe
@page()
def guest(request: PageRequest, guest_id: int) -> HttpResponseBase:
    """One guest."""
    shown = _guest(request, guest_id)
    against = [one.detail for one in proxmox_vms.offline(shown)] if shown.kind == Guest.Kind.VM else []
    jobs = Job.objects.filter(target_kind="guest", target_id=shown.pk)
    context = {
        "section": "guests", "guest": shown, "against": against, "may_change": shown.kind == Guest.Kind.VM,
        "is_managed": shown.kind != Guest.Kind.CONTAINER or shown.host.runs_proxmox,
        "is_live": shown.kind == Guest.Kind.DOMAIN and shown.state == "running",
        "images": {image.pk: image for image in in_scope(Image.objects.filter(uses__disk__guest=shown), request.actor)},
        "disks": [(disk, cache_advice(disk), discard_advice(disk)) for disk in shown.disks.all()],
        "chained": {use.disk.target for use in ImageUse.objects.filter(disk__guest=shown, image__chain_depth__gt=1)
                    .select_related("disk")},
        "own": {disk.target for disk in _own_disks(shown)}, "copied": _copied(shown),
        "backups": list(backups.of_guests([shown]).values()),
        "jobs": jobs[:10], "job_now": jobs.filter(state__in=Job.ACTIVE).last(),
    }  # fmt: skip
    return render(request, "guests/guest.html", context)


@require_safe
@page()
def guest_snapshots(request: PageRequest, guest_id: int) -> HttpResponseBase:
    """The snapshots of a guest, as they are now: a part of its page, which asks for it when it is there."""
    shown, why = _guest(request, guest_id), ""
    known: tuple[Snapshot, ...] = ()
    try:
        known = snapshots.of(shown)
    except (RefusedError, HostError) as error:
        why = error.detail
    return render(request, "guests/snapshots.html", {"guest": shown, "known": known, "why": why})


def options_from(kind: JobKind, form: QueryDict) -> dict[str, Any]:
    """The job's options from the form: those that its kind has, as far as they are filled in.

    Raises:
        InvalidError: a field holds something else than it should; it names each.
    """
    options: dict[str, Any] = {name: text for name in TEXTS if (text := str(form.get(name, "")).strip())}
    options |= {name: form[name] == "true" for name in SWITCHES if name in form}
    for name in IDS:
        if text := str(form.get(name, "")).strip():
            options[name] = _number(text, name, 1)
    size = _number(form.get("size_gib", ""), "size_gib", GIB)
    if size is not None:
        options["size_bytes"] = -(-size // BLOCK) * BLOCK
    days = _number(form.get("older_than_days", ""), "older_than_days", 1)
    if days is not None:
        options["older_than_days"] = days
    speed = _number(form.get("bandwidth_mib", ""), "bandwidth_mib", MIB)
    if speed is not None:
        options["bandwidth_bytes_sec"] = speed
    return {name: value for name, value in options.items() if name in kind.properties}


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
    """A job on a guest: the form, the plan, and the button that starts it.

    POST starts what the page had shown; with ``show``, or where it had shown another plan, it is the plan again.
    """
    shown, kind = _guest(request, guest_id), kinds.get(kind_name)
    given: QueryDict = request.POST if request.method == "POST" else request.GET
    error, plan, options = None, None, dict[str, Any]()
    try:
        options = options_from(kind, given)
        if request.method == "POST" and "show" not in given:
            request.actor.require(Role.OPERATOR, shown.host.slug)
            confirmed = not kind.no_way_back or given.get("confirm_name") == shown.name
            if confirmed and was_planned(request, options):
                return _start(request, shown, kind_name, options)
            if not confirmed:
                sentence = _("Type the guest's name to confirm.")
                error = InvalidError(sentence, {"confirm_name": sentence})
        # The form names a disk, also where the job would choose one.
        if options.keys() >= {*kind.options_schema.get("required", ()), *({"disk"} & kind.properties.keys())}:
            plan = services.plan(request.actor, kind_name, shown.pk, options)
            if created := plan.options.get("created"):  # of the snapshot: what is confirmed is no later one of its name
                options["created"] = created
    except InvalidError as invalid:
        error = invalid
    if "created" in options:  # also in the link by which an admin accepts what stands against it
        pinned = given.copy()
        pinned["created"] = options["created"]
        given = pinned
    context = _context(shown, given, kind, plan, error)
    return render(request, f"guests/job/{kind.name}.html", context | {"planned": plan_digest(options)})


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
    shown: Guest, given: QueryDict, kind: JobKind, plan: Plan | None, error: InvalidError | None
) -> dict[str, Any]:
    names = (*TEXTS, *IDS, *SWITCHES, "size_gib", "older_than_days", "bandwidth_mib", "confirm_name")
    pools = StoragePool.objects.filter(host=shown.host_id, source=StoragePool.Source.PROXMOX)
    return {
        "section": "guests", "guest": shown, "title": kind.title, "plan": plan, "error": error,
        "on": shown.name, "back": reverse("guest", args=[shown.pk]),
        "accept": acceptance(shown, plan, given),
        "values": {name: given.get(name, "") for name in names}, "disks": _own_disks(shown), "key": uuid4().hex,
        "storages": sorted(set(pools.values_list("name", flat=True))), "formats": ("raw", "qcow2", "vmdk"),
        "address": reverse(kind.name, args=[shown.pk]), "layers": _layers(shown, given.get("disk", "")),
        "confirm_name": shown.name if kind.no_way_back else "",
        "settings": [(name, values.items(), given.get(name, "")) for name, values in VALUES.items()],
        "restore": _restore(shown, kind), "mendable": MENDABLE,
        "measured": _measured(shown, given.get("disk", "")) if kind.name == SetDisk.name else {},
        "pools": StoragePool.objects.filter(host=shown.host_id).order_by("name"),
    }  # fmt: skip
