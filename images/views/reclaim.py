"""Reclaim, step by step: method, zero-fill guidance, options, plan, confirmation."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from django.contrib import messages
from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from images.models import Image
from images.refusals import RESERVE_BYTES, RESERVE_PERCENT
from images.verbs import VERBS, verb_of
from images.views.access import PageRequest, page, wants_fragment
from images.views.image import image_of
from storage_admin.accounts.roles import Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.hosts.errors import InvalidError
from storage_admin.jobs import kinds, services
from storage_admin.jobs.plans import Plan

KIND = "reclaim"
MIB = 1 << 20
#: A plan lists so many images and guests by name; the others are counted.
NAMED = 12


@dataclass(frozen=True)
class Growth:
    """What filling the guest's free space with zeros does to the image before anything is won.

    Args:
        up_to_bytes: how large the image can become, ``None`` where its virtual size is not known.
        more_bytes: by how much it grows then.
        fits: whether the pool has room for that beside its reserve, ``None`` where that is not known.
    """

    up_to_bytes: int | None
    more_bytes: int | None
    available_bytes: int | None
    fits: bool | None


def growth_of(image: Image) -> Growth:
    """How much room zero-filling needs on the pool."""
    capacity, available = image.pool.capacity_bytes, image.pool.available_bytes
    if image.virtual_size is None:
        return Growth(None, None, available, None)
    more = max(image.virtual_size - image.allocated_size, 0)
    if capacity is None or available is None:
        return Growth(image.virtual_size, more, available, None)
    reserve = max(capacity * RESERVE_PERCENT // 100, RESERVE_BYTES)
    return Growth(image.virtual_size, more, available, available - reserve >= more)


def options_from(form: QueryDict) -> dict[str, Any]:
    """The job's options from the form. What is not in it keeps the kind's default.

    Raises:
        InvalidError: a field holds something else than it should; it names each.
    """
    fields: dict[str, str] = {}
    options: dict[str, Any] = {name: form[name] for name in ("method", "compression") if form.get(name)}
    for name, wanted, factor in (("undo_hours", "undo_hours", 1), ("bandwidth_mib", "bandwidth_bytes_sec", MIB)):
        text = form.get(name, "").strip()
        if text:
            try:
                options[wanted] = _finite(text, factor)
            except (ValueError, OverflowError):
                fields[name] = "Give a number."
    if "given" in form:  # an empty checkbox sends nothing
        options["idle_io"] = "idle_io" in form
    if fields:
        raise InvalidError("Some of the options cannot be used.", fields)
    return options


def _finite(text: str, factor: int) -> int | float:
    value = float(text) * factor
    return int(value) if value == int(value) else value


@dataclass(frozen=True)
class Shown:
    """What the form holds, and the plan for it or why there is none."""

    plan: Plan | None
    error: InvalidError | None
    options: dict[str, Any]


def _planned(request: PageRequest, image: Image, form: QueryDict) -> Shown:
    kind = kinds.get(KIND)
    defaults = kind.clean({})
    try:
        options = defaults | options_from(form)
        return Shown(services.plan(request.actor, KIND, image.pk, options), None, options)
    except InvalidError as error:
        return Shown(None, error, defaults)


def _until(options: dict[str, Any]) -> datetime | None:
    hours = options.get("undo_hours")
    return timezone.now() + timedelta(hours=float(hours)) if hours else None


def _context(request: PageRequest, image: Image, form: QueryDict) -> dict[str, Any]:
    shown = _planned(request, image, form)
    properties = kinds.get(KIND).properties
    plan = shown.plan
    methods = [(name, VERBS[name].title if name in VERBS else name) for name in properties["method"]["enum"]]
    bandwidth = shown.options.get("bandwidth_bytes_sec")
    return {
        "section": "images",
        "image": image,
        "plan": plan,
        "error": shown.error,
        "options": shown.options,
        "methods": methods,
        "compressions": properties["compression"]["enum"],
        "bandwidth_mib": form.get("bandwidth_mib", f"{bandwidth / MIB:g}" if bandwidth else ""),
        "verb": verb_of(plan.method if plan else ""),
        "undo_until": _until(shown.options),
        "won_bytes": _difference(plan),
        "growth": growth_of(image),
        "affected_images": plan.affected_images[:NAMED] if plan else (),
        "more_images": max(len(plan.affected_images) - NAMED, 0) if plan else 0,
        "affected_guests": plan.affected_guests[:NAMED] if plan else (),
        "more_guests": max(len(plan.affected_guests) - NAMED, 0) if plan else 0,
        "key": uuid4().hex,
    }


def _difference(plan: Plan | None) -> int | None:
    if plan is None or plan.before_bytes is None or plan.predicted_after_bytes is None:
        return None
    return plan.before_bytes - plan.predicted_after_bytes


@require_http_methods(["GET", "HEAD", "POST"])
@page()
def reclaim(request: PageRequest, image_id: int) -> HttpResponseBase:
    """The steps; for htmx the plan alone, as the options change. POST starts the job that the plan showed."""
    image = image_of(request, image_id)
    if request.method == "POST":
        return _start(request, image)
    context = _context(request, image, request.GET)
    if wants_fragment(request):
        return render(request, "images/reclaim.html#plan", context)
    return render(request, "images/reclaim.html", context)


def _start(request: PageRequest, image: Image) -> HttpResponseBase:
    request.actor.require(Role.OPERATOR, image.host.slug)
    try:
        options = options_from(request.POST)
        if not options.get("undo_hours", 1) and "without_undo" not in request.POST:
            sentence = f"Confirm that {image.name} is replaced without an undo copy."
            raise InvalidError(sentence, {"without_undo": sentence})
        key = "".join(filter(str.isalnum, request.POST.get("key", "")))[:64]
        job = services.submit(request.actor, KIND, image.pk, options, idempotency_key=key)
    except RefusedError as error:
        messages.error(request, f"Refused ({error.code}): {error.detail} Nothing was changed.")
    except InvalidError as error:
        messages.error(request, f"{error.detail} Nothing was changed.")
    else:
        return redirect("job", job.pk)
    return render(request, "images/reclaim.html", _context(request, image, request.POST), status=409)
