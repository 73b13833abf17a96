"""What guests may take of the disks: one or many, with a plan for each before anything happens."""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from django.contrib import messages
from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_http_methods

from images import selectors
from storage_admin.accounts.models import Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt.limits import SETTABLE
from storage_admin.jobs import services
from storage_admin.jobs.plan_and_progress import Plan
from storage_admin.web.page import PageRequest, page, plan_digest, was_planned
from storage_admin.web.pages.guest import acceptance

KIND = "set_io_priority"
#: At most so many guests on one page.
AT_ONCE = 100
MIB = 1 << 20
#: Name of a limit's field, its word, and what its number is multiplied with.
LIMIT_FIELDS = (
    ("read_bytes_sec", _("Read (MiB/s)"), MIB),
    ("write_bytes_sec", _("Write (MiB/s)"), MIB),
    ("read_iops_sec", _("Read IOPS"), 1),
    ("write_iops_sec", _("Write IOPS"), 1),
)


@dataclass(frozen=True)
class Line:
    """One guest with its plan, or why there is none."""

    guest: Guest
    plan: Plan | None
    error: str = ""

    @property
    def refusal(self) -> str:
        """Why it is not done; empty where nothing speaks against it."""
        if self.plan is None:
            return self.error
        return self.plan.refusals[0].detail if self.plan.refusals else ""


def options_from(form: QueryDict) -> dict[str, Any]:
    """The job's options from the form; an empty field leaves its setting as it is.

    Raises:
        InvalidError: a field holds something else than it should; it names each.
    """
    fields: dict[str, str] = {}
    options: dict[str, Any] = {}
    for name in ("priority", "weight"):
        if text := form.get(name, "").strip():
            options[name] = _whole(text, 1, name, fields)
    limits = {}
    for name, __, factor in LIMIT_FIELDS:
        if text := form.get(name, "").strip():
            limits[name] = _whole(text, factor, name, fields)
    if limits:
        options["limits"] = limits
    if fields:
        raise InvalidError(gettext("Some numbers are invalid."), fields)
    if options and form.get("accept_hidden_lines"):
        options["accept_hidden_lines"] = form["accept_hidden_lines"]
    return options


def _whole(text: str, factor: int, name: str, fields: dict[str, str]) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        fields[name] = gettext("Enter a whole number, or leave the field empty to keep the current value.")
        return 0
    return int(text) * factor


@require_http_methods(["GET", "HEAD", "POST"])
@page()
def guest_io(request: PageRequest) -> HttpResponseBase:
    """The guests that were chosen, with the form and the plan of each.

    POST starts one job each; with ``show``, or where the page had shown other plans, it is the plans again.
    """
    given = request.POST if request.method == "POST" else request.GET
    ids = [int(text) for text in given.getlist("guest") if text.isascii() and text.isdigit() and len(text) < 19]
    guests = list(selectors.guests_for(request.actor).filter(pk__in=ids[:AT_ONCE]).order_by("name", "id"))
    if not guests:
        messages.error(request, gettext("Select guests first."))
        return redirect("guests")
    error, options = None, {}
    try:
        options = options_from(given)
    except InvalidError as invalid:
        error = invalid
    lines = [_line(request, guest, options) for guest in guests] if options else []
    sent = (sorted(guest.pk for guest in guests), options)
    confirmed = request.method == "POST" and "show" not in given and options and error is None
    if confirmed:
        request.actor.require(Role.OPERATOR)
    if confirmed and was_planned(request, *sent):
        return _start(request, lines, options, given.get("key", ""))
    context = {
        "section": "guests", "guests": guests, "lines": lines, "error": error, "key": uuid4().hex,
        "planned": plan_digest(*sent),
        "values": {name: given.get(name, "") for name in ("priority", "weight", *SETTABLE, "accept_hidden_lines")},
        "limit_fields": [(name, word, given.get(name, "")) for name, word, __ in LIMIT_FIELDS],
        "has_containers": any(guest.kind == Guest.Kind.CONTAINER and guest.takes_io for guest in guests),
        "has_machines": any(guest.kind != Guest.Kind.CONTAINER for guest in guests),
        "accepted": sum(not line.refusal for line in lines),
        "accept": acceptance(guests[0], lines[0].plan, given) if len(lines) == 1 else "",
    }  # fmt: skip
    return render(request, "guests/io.html", context)


def _line(request: PageRequest, guest: Guest, options: dict[str, Any]) -> Line:
    try:
        return Line(guest, services.plan(request.actor, KIND, guest.pk, options))
    except InvalidError as error:
        return Line(guest, None, error.detail)


def _start(request: PageRequest, lines: list[Line], options: dict[str, Any], key: str) -> HttpResponseBase:
    key = "".join(filter(str.isalnum, key))[:40]
    queued, jobs, since = 0, [], timezone.now()
    for line in lines:
        if line.refusal:
            continue
        try:
            job = services.submit(
                request.actor, KIND, line.guest.pk, options, idempotency_key=f"{key}{line.guest.pk}" if key else ""
            )
        except (RefusedError, InvalidError) as error:
            messages.error(request, f"{line.guest.name}: {error.detail}")
        else:
            queued += job.created >= since
            jobs.append(job)
    if not jobs:
        messages.error(request, gettext("Nothing was queued."))
        return redirect("guests")
    if queued:
        messages.success(request, gettext("{queued} queued.").format(queued=queued))
    if old := len(jobs) - queued:
        before = ngettext(
            "{count} was already queued by this form. Nothing new was queued.",
            "{count} were already queued by this form. Nothing new was queued.",
            old,
        )
        messages.info(request, before.format(count=old))
    return redirect("job", jobs[0].pk) if len(jobs) == 1 else redirect("jobs")
