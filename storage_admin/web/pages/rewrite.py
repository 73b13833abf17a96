"""Rewriting an image, step by step: what it costs now, options, plan, confirmation; for a reclaim with guidance."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from django.contrib import messages
from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods

from images.kinds.move import Move
from images.kinds.relink import candidates
from images.models import Image
from images.rewrite import planning
from images.rewrite.kind import Rewriting
from images.rewrite.neighbours import ancestors
from images.rewrite.refusals import RESERVE_BYTES, RESERVE_PERCENT
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.plan_and_progress import Plan
from storage_admin.web.forms import refusal_message
from storage_admin.web.page import (
    NotShownError,
    PageRequest,
    looked_plan,
    page,
    plan_digest,
    shown_as,
    wants_fragment,
    was_planned,
)
from storage_admin.web.pages.image import image_of
from storage_admin.web.pages.option_words import CHOICES, OPTIONS, SPARING, STARTING, SWITCHES, TEXTS
from storage_admin.words import Translatable

MIB, GIB, SECTOR = 1 << 20, 1 << 30, 512
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
    more = max(image.virtual_size - image.occupied_bytes, 0)
    if capacity is None or available is None:
        return Growth(image.virtual_size, more, available, None)
    reserve = max(capacity * RESERVE_PERCENT // 100, RESERVE_BYTES)
    return Growth(image.virtual_size, more, available, available - reserve >= more)


def options_from(kind: JobKind, form: QueryDict) -> dict[str, Any]:
    """The job's options from the form. What is not in it has the kind's default.

    Raises:
        InvalidError: fields hold something else than they should; it names all of them, as the form does.
    """
    options, wrong = _read(kind, form)
    try:
        options = kind.clean(options)
    except InvalidError as error:
        wrong = _by_field(kind, error.fields) | wrong
    if wrong:
        raise InvalidError(gettext("Some options are invalid."), wrong)
    return options


def _by_field(kind: JobKind, wrong: dict[str, str]) -> dict[str, str]:
    """The same with the form's names: creation options of a format are written into one field, a rate in MiB."""
    names = {option: name for name, option in OPTIONS.items()}
    found: dict[str, str] = {}
    for name, text in wrong.items():
        if name in kind.properties:
            found[names.get(name, name)] = text
        else:
            found["format_options"] = f"{found.get('format_options', '')} {name}: {text}".strip()
    return found


def _read(kind: JobKind, form: QueryDict) -> tuple[dict[str, Any], dict[str, str]]:
    """What the form says, and of what it says no number can be made."""
    fields: dict[str, str] = {}
    options: dict[str, Any] = {name: form[name] for name in CHOICES if form.get(name) and name in kind.properties}
    numbers: list[tuple[str, str, Callable[[str], float]]] = [
        ("bandwidth_mib", "bandwidth_bytes_sec", lambda text: _finite(text, MIB)),
        ("undo_hours", "undo_hours", _finite), ("wait_hours", "wait_hours", _finite),
        ("down_to", "down_to", int), ("target_pool", "target_pool", int), ("slot", "slot", int),
        ("size_gib", "size_bytes", _sectors), ("part_mib", "part_bytes", lambda text: _finite(text, MIB)),
        ("cpus", "cpus", int), ("memory_mib", "memory_bytes", lambda text: _finite(text, MIB)),
    ]  # fmt: skip
    for name, wanted, read in numbers:
        text = form.get(name, "").strip()
        if text and wanted in kind.properties:
            try:
                options[wanted] = read(text)
            except (ValueError, OverflowError):
                fields[name] = gettext("Enter a number.")
    wished = str(form.get("format_options", "")).strip()
    if wished and "format_options" in kind.properties:
        pairs = [part.partition("=") for part in wished.split(",")]
        options["format_options"] = {name.strip(): value.strip() for name, __, value in pairs}
    for name in ("target_name", "base", "device"):
        if name in kind.properties and form.get(name):
            options[name] = str(form[name]).strip()
    for name in ("idle_io", "start_after", *SWITCHES):
        if form.get(name) and name in kind.properties:
            options[name] = form[name] == "true"
    return options, fields


def _sectors(gibibytes: str) -> int:
    """Bytes in whole sectors; raises ValueError and OverflowError as :func:`_finite`."""
    return -(-int(_finite(gibibytes, GIB)) // SECTOR) * SECTOR


def _finite(text: str, factor: int = 1) -> int | float:
    value = float(text) * factor
    return int(value) if value == int(value) else value


@dataclass(frozen=True)
class Shown:
    """What the form holds, and the plan for it or why there is none."""

    plan: Plan | None
    error: InvalidError | None
    options: dict[str, Any]


def _planned(request: PageRequest, image: Image, kind: Rewriting, form: QueryDict) -> Shown:
    try:
        options = options_from(kind, form)
        return Shown(services.plan(request.actor, kind.name, image.pk, options), None, options)
    except InvalidError as error:
        return Shown(None, error, kind.clean({}) | _read(kind, form)[0])


@dataclass(frozen=True)
class Field:
    """An option that is one of a few: its name, its word, and value, word and whether it is chosen for each."""

    name: str
    word: Translatable
    choices: list[tuple[str, str, bool]]


@dataclass(frozen=True)
class Text:
    """An option that is written."""

    name: str
    word: Translatable
    hint: Translatable
    value: str


def _fields(kind: Rewriting, image: Image, options: dict[str, Any]) -> list[Field]:
    fields = []
    properties = kind.properties
    if image.is_volume:
        properties = {name: kind.properties[name] for name in kind.volume_options}
    for name, (word, words) in CHOICES.items():
        if name in properties:
            values = properties[name]["enum"]
            shown = {value: kind.method_word(value) if name == "method" else value for value in values} | words
            fields.append(Field(name, word, [(value, str(shown[value]), value == options[name]) for value in values]))
    if "down_to" in properties:
        bases = _bases(image)
        choices = [("", gettext("no backing file"), options["down_to"] is None)]
        choices += [
            (str(base.pk), gettext("keep {base} as backing file").format(base=base.name), base.pk == options["down_to"])
            for base in bases
        ]
        fields.append(Field("down_to", gettext("Flatten down to"), choices))
    if "slot" in properties:
        held = image.from_header("key_slots") or ()
        choices = [("", gettext("add a passphrase"), options["slot"] is None)]
        choices += [
            (str(one), gettext("empty key slot {slot}").format(slot=one), one == options["slot"]) for one in held
        ]
        fields.append(Field("slot", gettext("Change"), choices))
    for name, (word, words) in SWITCHES.items():
        if name in properties:
            values = [(value, str(shown_as), (value == "true") == options[name]) for value, shown_as in words.items()]
            fields.append(Field(name, word, values))
    if "target_pool" in properties:
        if isinstance(kind, Move):
            pools, none = kind.target_pools(image), gettext("Choose a pool")
        else:
            pools = StoragePool.objects.filter(host=image.host_id).exclude(pk=image.pool_id)
            none = gettext("{pool} (current pool)").format(pool=image.pool.name)
        choices = [("", none, options["target_pool"] is None)]
        choices += [
            (str(pool.pk), f"{pool.name}: {pool.path}", pool.pk == options["target_pool"])
            for pool in pools.order_by("name", "id")
        ]
        fields.append(Field("target_pool", gettext("Target pool"), choices))
    sparing = {None: "", True: "true", False: "false"}[options["idle_io"]]
    choices = [(value, str(word), value == sparing) for value, word in SPARING.items()]
    fields.append(Field("idle_io", gettext("Idle I/O priority"), choices))
    choices = [(value, str(word), (value == "true") == options["start_after"]) for value, word in STARTING.items()]
    return [*fields, Field("start_after", gettext("Afterwards"), choices)]


def _bases(image: Image) -> list[Image]:
    """What can stay its base: all below the immediate one."""
    try:
        return ancestors(image)[1:]
    except RefusedError:
        return []


def _until(options: dict[str, Any]) -> datetime | None:
    hours = options.get("undo_hours")
    return timezone.now() + timedelta(hours=float(hours)) if hours else None


def _space_in(image: Image, plan: Plan | None) -> StoragePool | None:
    """The pool that the job takes its scratch space of."""
    if plan is None or plan.scratch_pool in {None, image.pool_id}:
        return image.pool
    return StoragePool.objects.filter(pk=plan.scratch_pool).first()


def _context(
    request: PageRequest, image: Image, kind: Rewriting, form: QueryDict, refused: InvalidError | None = None
) -> dict[str, Any]:
    shown = _planned(request, image, kind, form)
    plan = shown.plan
    fields = _fields(kind, image, shown.options)
    bandwidth = shown.options.get("bandwidth_bytes_sec")
    bandwidth_mib = form.get("bandwidth_mib", f"{bandwidth / MIB:g}" if bandwidth else "")
    possible = planning.works_on(kind, image)
    written = [one for one in TEXTS if OPTIONS.get(one[0], one[0]) in kind.properties]
    texts = [Text(name, word, hint, form.get(name, "")) for name, word, hint in written]
    return {
        "section": "images",
        "image": image,
        "kind": kind,
        "address": reverse(kind.name, args=[image.pk]),
        "plan": plan,
        "error": shown.error or refused,
        "fields": fields,
        "texts": texts,
        "has_undo": "undo_hours" in kind.properties and not image.is_volume,
        "undo_hours": form.get("undo_hours", shown.options.get("undo_hours")),
        "space_in": _space_in(image, plan),
        "planned": plan_digest(*confirmed(plan, shown.options)),
        "shown": shown_as(request, plan),
        "bandwidth_mib": bandwidth_mib,
        "possible": possible,
        "wants_zeros": possible and kind.wants_zeros,
        "method": kind.method_word(plan.method) if plan else "",
        "promise": kind.promise(plan.method, shown.options) if plan else "",
        "replaces": plan is not None and kind.replaces(plan.method, shown.options),
        "undo_until": _until(shown.options) if plan is None or plan.undo_bytes else None,
        "won_bytes": plan.won_bytes if plan else None,
        "growth": growth_of(image),
        "affected_images": plan.affected_images[:NAMED] if plan else (),
        "more_images": max(len(plan.affected_images) - NAMED, 0) if plan else 0,
        "affected_guests": plan.affected_guests[:NAMED] if plan else (),
        "more_guests": max(len(plan.affected_guests) - NAMED, 0) if plan else 0,
        "candidates": candidates(image) if "accept_unproven" in kind.properties else (),
        "to_type": kind.to_type(image.name, shown.options) if plan else "",
        "confirm_typed": form.get("confirm_name", ""),
        "key": uuid4().hex,
    }


def confirmed(plan: Plan | None, options: dict[str, Any]) -> tuple[object, ...]:
    """What Confirm is for: options, the method that they come to by now, and whether the original is kept."""
    return (options, plan.method, bool(plan.undo_bytes)) if plan else (options,)


@require_http_methods(["GET", "HEAD", "POST"])
@page()
def rewrite(request: PageRequest, image_id: int, kind: Rewriting) -> HttpResponseBase:
    """The steps; for htmx the plan alone, as the options change. POST starts the job that the plan showed;
    with ``show``, or where the page had shown another one, it is the plan again.
    """
    image = image_of(request, image_id)
    if request.method == "POST" and "show" not in request.POST:
        return _start(request, image, kind)
    if wants_fragment(request) and "look" in request.GET:
        return _looked(request, image, kind)
    context = _context(request, image, kind, request.POST if request.method == "POST" else request.GET)
    if wants_fragment(request):
        return render(request, "images/rewrite.html#plan", context)
    return render(request, "images/rewrite.html", context)


def _looked(request: PageRequest, image: Image, kind: Rewriting) -> HttpResponseBase:
    """The plan after a look at the image on its host; where it is the same, only the age of its facts."""
    kind.look(image.pk)
    context = _context(request, image_of(request, image.pk), kind, request.GET)
    return looked_plan(request, "images/rewrite.html", context)


def _start(request: PageRequest, image: Image, kind: Rewriting) -> HttpResponseBase:
    request.actor.require(kind.role, image.host.slug)
    refused, status = None, 409

    def check(plan: Plan) -> None:
        if plan.refusals:
            return
        if not was_planned(request, *confirmed(plan, options)):
            raise NotShownError
        if kind.replaces(plan.method, options) and not plan.undo_bytes and "without_undo" not in request.POST:
            sentence = gettext("Confirm that {image} is replaced without an undo copy.").format(image=image.name)
            raise InvalidError(sentence, {"without_undo": sentence})
        typed = kind.to_type(image.name, options)
        if typed and request.POST.get("confirm_name") != typed:
            sentence = gettext("Type {text} to confirm.").format(text=typed)
            raise InvalidError(sentence, {"confirm_name": sentence})

    try:
        options = options_from(kind, request.POST)
        key = "".join(filter(str.isalnum, request.POST.get("key", "")))[:64]
        job = services.submit(request.actor, kind.name, image.pk, options, idempotency_key=key, check=check)
    except RefusedError as error:
        messages.error(request, refusal_message(error))
    except InvalidError as error:
        refused = error
    except NotShownError:
        status = 200
    else:
        return redirect("job", job.pk)
    context = _context(request, image_of(request, image.pk), kind, request.POST, refused)
    return render(request, "images/rewrite.html", context, status=status)
