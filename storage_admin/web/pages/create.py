"""Creating an image in a pool: options with what each means here, the plan, and the button that starts it."""

import json
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import uuid4

from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from benchmarks import advice
from benchmarks import selectors as benchmarks
from benchmarks.models import BenchmarkKind
from images.kinds.create import SECTOR, Create
from images.models import Image
from storage_admin.accounts.models import Role
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
    """The form and the plan. POST starts what the page had shown; with ``show``, or where it had shown another plan, it
    is the plan again.
    """
    pool = pool_of(request, pool_id)
    given = request.POST if request.method == "POST" else request.GET
    error, plan, options = None, None, dict[str, Any]()
    try:
        options = _options(given)
        if request.method == "POST" and "show" not in given:
            request.actor.require(Role.OPERATOR, pool.host.slug)
            if was_planned(request, options):
                return start(request, Create.name, pool, options)
        if "name" in options:
            plan = services.plan(request.actor, Create.name, pool.pk, options)
    except InvalidError as invalid:
        error = InvalidError(invalid.detail, {_FIELD.get(name, name): text for name, text in invalid.fields.items()})
    measured = _measured(pool)
    values = {name: given.get(name, "") for name in FIELDS}
    if request.method != "POST" and "cluster_size" not in given:
        values |= {name: measured["best"].get(name, "") for name in ("cluster_size", "extended_l2")}
    bases = Image.objects.filter(host=pool.host_id, declared_format__in=OPTIONS, state=Image.State.OK)
    context = {
        "section": "hosts", "pool": pool, "title": Create.title, "plan": plan, "error": error, "on": pool.name,
        "back": reverse("pool", args=[pool.pk]), "address": reverse("create", args=[pool.pk]), "key": uuid4().hex,
        "planned": plan_digest(options), "values": values, "formats": list(OPTIONS), "measured": measured,
        "choices": [(name, words, values[name]) for name, words in CHOICES.items()],
        "bases": bases.order_by("name", "pk").values_list("pk", "name")[:MOST_PROPOSED],
    }  # fmt: skip
    return render(request, "hosts/pool/create.html", context)


#: Options that have another name in the form.
_FIELD = {"virtual_size": "size_gib", "format_options": "more_options"}


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
        for one in advice.of(kind, benchmarks.results_of(run), pool.name) if run is not None else ():
            if one.measurable:
                sentences.append(one.sentence)
                best |= {name: str(value) for name, value in one.best.items() if name in CHOICES}
    takes = [(words, size(room("qcow2", {"cluster_size": words}, 10 * GIB).after)) for words in ("64K", "2M")]
    return {"sentences": sentences, "best": best, "takes": takes}


def start(request: PageRequest, kind: str, pool: StoragePool, options: dict[str, Any]) -> HttpResponseBase:
    """Starts a job on a pool, whose page it leads to; back to the pool where it is refused."""
    key = "".join(filter(str.isalnum, request.POST.get("key", "")))[:40]
    job = attempt(
        request, lambda: services.submit(request.actor, kind, pool.pk, options, idempotency_key=key)
    )  # fmt: skip
    return redirect("pool", pool.pk) if job is None else redirect("job", job.pk)
