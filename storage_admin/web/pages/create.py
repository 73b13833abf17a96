"""Creating an image in a pool: options with what each means here, the plan, and the button that starts it."""

import json
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import uuid4

from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from benchmarks import advice, results
from benchmarks import selectors as benchmarks
from benchmarks.models import BenchmarkKind
from images.kinds.create import Create
from images.kinds.grow import SECTOR
from images.models import Image
from storage_admin.agent.measure.new_image import room
from storage_admin.agent.rewrite.conversion import OPTIONS
from storage_admin.errors import InvalidError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.web.page import PageRequest, attempt, page, plan_digest, was_planned
from storage_admin.web.pages.pools import pool_of
from storage_admin.words import size

GIB = 1 << 30
#: Creation options of qcow2 with a field of their own, and the values that it proposes.
CHOICES = {
    "cluster_size": ("4K", "16K", "64K", "128K", "256K", "512K", "1M", "2M"),
    "preallocation": ("off", "metadata", "falloc", "full"),
    "compression_type": ("zlib", "zstd"),
    "lazy_refcounts": ("off", "on"),
    "extended_l2": ("off", "on"),
    "compat": ("1.1", "0.10"),
}
#: Images that the form proposes as a base; others are named by their numbers.
MOST_PROPOSED = 300
FIELDS = ("name", "format", "size_gib", "base", "more_options", "encryption", "libvirt_secret", *CHOICES)


@require_http_methods(["GET", "HEAD", "POST"])
@page()
def create(request: PageRequest, pool_id: int) -> HttpResponseBase:
    pool = pool_of(request, pool_id)
    given = request.POST if request.method == "POST" else request.GET
    measured = _measured(pool)
    values = {name: given.get(name, "") for name in FIELDS}
    if request.method != "POST" and "cluster_size" not in given:
        values |= {name: measured["best"].get(name, "") for name in ("cluster_size", "extended_l2")}
    bases = Image.objects.filter(host=pool.host_id, declared_format__in=OPTIONS, state=Image.State.OK)
    return form_and_plan(
        request, pool, Create(), values, lambda: _options(given), _in_the_form,
        measured=measured, choices=[(name, words, values[name]) for name, words in CHOICES.items()],
        bases=bases.order_by("name", "pk").values_list("pk", "name")[:MOST_PROPOSED],
    )  # fmt: skip


def form_and_plan(
    request: PageRequest,
    pool: StoragePool,
    kind: Create,
    values: dict[str, str],
    options: Callable[[], dict[str, Any]] | None = None,
    in_the_form: Callable[[InvalidError], InvalidError] | None = None,
    **context: Any,
) -> HttpResponseBase:
    """The form of a job that makes a file in a pool, and its plan. POST starts what the page had shown; with ``show``,
    or where it had shown another plan, it is the plan again.

    Args:
        values: what the form holds.
        options: the job's options of that, where they are not the values that are given; may raise InvalidError.
        in_the_form: an error in the words and by the fields of the form, where those are not the options.
        context: what the template needs besides.
    """
    chosen: dict[str, Any] = {name: text for name, text in values.items() if text} if options is None else {}
    error, plan = None, None
    try:
        chosen = options() if options is not None else chosen
        if request.method == "POST" and "show" not in request.POST:
            request.actor.require(kind.role, pool.host.slug)
            if was_planned(request, chosen):
                return _start(request, kind.name, pool, chosen)
        if request.method == "POST" or chosen.keys() & set(kind.options_schema["required"]):
            plan = services.plan(request.actor, kind.name, pool.pk, chosen)
    except InvalidError as invalid:
        error = in_the_form(invalid) if in_the_form is not None else invalid
    shown = {
        "section": "hosts", "pool": pool, "title": kind.title, "plan": plan, "error": error, "on": pool.name,
        "back": reverse("pool", args=[pool.pk]), "address": reverse(kind.name, args=[pool.pk]), "key": uuid4().hex,
        "planned": plan_digest(chosen), "values": values, "formats": list(OPTIONS),
    }  # fmt: skip
    return render(request, f"hosts/pool/{kind.name}.html", shown | context)


def values_of(request: PageRequest, fields: tuple[str, ...]) -> dict[str, str]:
    """What a form holds, without spaces around it."""
    given = request.POST if request.method == "POST" else request.GET
    return {name: str(given.get(name, "")).strip() for name in fields}


#: Options that have another name in the form.
_FIELD = {"virtual_size": "size_gib", "format_options": "more_options"}


def _in_the_form(invalid: InvalidError) -> InvalidError:
    return InvalidError(invalid.detail, {_FIELD.get(name, name): text for name, text in invalid.fields.items()})


def _options(form: QueryDict) -> dict[str, Any]:
    """The job's options, as far as the form is filled in.

    Raises:
        InvalidError: a field holds no number; it names each.
    """
    text = {name: str(form.get(name, "")).strip() for name in FIELDS}
    options: dict[str, Any] = {name: text[name] for name in ("name", "format") if text[name]}
    # What another format alone knows, as what the form began with, is none of its options.
    known = OPTIONS.get(text["format"] or "qcow2", frozenset(CHOICES))
    given = {name: text[name].lower() for name in CHOICES if text[name] and name in known}
    pairs = [part.partition("=") for part in text["more_options"].split(",") if part.strip()]
    given |= {name.strip(): value.strip() for name, __, value in pairs}
    if given:
        options["format_options"] = given
    wrong = {}
    if text["size_gib"]:
        try:
            wanted = Decimal(text["size_gib"]) * GIB
            if not wanted.is_finite() or not 0 < wanted < 1 << 62:
                raise InvalidOperation
            options["virtual_size"] = -(-int(wanted) // SECTOR) * SECTOR
        except InvalidOperation:
            wrong["size_gib"] = _("Enter a number above 0.")
    if text["encryption"]:
        options["encryption"] = text["encryption"]
    if text["libvirt_secret"] in {"true", "false"}:
        options["libvirt_secret"] = json.loads(text["libvirt_secret"])
    if text["base"]:
        if not text["base"].isascii() or not text["base"].isdigit() or len(text["base"]) > 18:
            wrong["base"] = _("Enter the number of an image.")
        else:
            options["base"] = int(text["base"])
    if wrong:
        raise InvalidError(_("Some options are invalid."), wrong)
    return options


def _measured(pool: StoragePool) -> dict[str, Any]:
    """What this pool's own benchmarks say of the choices, and what a new image takes: sentences, and the best."""
    sentences, best = [], dict[str, str]()
    for kind in (BenchmarkKind.CLUSTER_SIZE, BenchmarkKind.PREALLOCATION):
        run = benchmarks.last_of(kind, pool.pk)
        for one in advice.of(kind, results.of(run), pool.name) if run is not None else ():
            if one.measurable:
                sentences.append(one.sentence)
                best |= {name: str(value) for name, value in one.best.items() if name in CHOICES}
    takes = [(words, size(room("qcow2", {"cluster_size": words}, 10 * GIB).after)) for words in ("64K", "2M")]
    return {"sentences": sentences, "best": best, "takes": takes}


def _start(request: PageRequest, kind: str, pool: StoragePool, options: dict[str, Any]) -> HttpResponseBase:
    """Starts a job on a pool, whose page it leads to; back to the pool where it is refused."""
    key = "".join(filter(str.isalnum, request.POST.get("key", "")))[:40]
    job = attempt(request, lambda: services.submit(request.actor, kind, pool.pk, options, idempotency_key=key))
    return redirect("pool", pool.pk) if job is None else redirect("job", job.pk)
