"""How runs come to be: a profile started on a pool, with its cost before it starts, and old result lines pasted."""

from typing import Any
from uuid import uuid4

from django.contrib import messages
from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from benchmarks import profiles, services
from benchmarks.kind import MOST_REPETITIONS, profile_for
from benchmarks.models import BenchmarkKind
from benchmarks.profiles import Profile
from benchmarks.steps import MADE, MIB
from images.models import Image
from storage_admin.accounts.models import ForbiddenError, Role
from storage_admin.agent.bench.boot import FORMATS
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.selectors import pools_for
from storage_admin.jobs import kinds
from storage_admin.jobs import services as jobs
from storage_admin.web.forms import Form, refusal_message, whole_number
from storage_admin.web.lists import as_choices
from storage_admin.web.page import PageRequest, page, plan_digest, wants_fragment, was_planned
from storage_admin.web.templatetags.figures import kind_title

#: What the form carries from the plan to its confirmation.
CARRIED = (
    *("pool", "kind", "quick", "repetitions", "size_mib", "seconds", "alongside", "boot_image", "boot_kernel"),
    *("boot_initrd", "boot_append", "boot_up", "boot_pattern", "boot_guests", "boot_memory_mib"),
)
#: Kinds whose steps have a time.
TIMED = (BenchmarkKind.FIO, BenchmarkKind.BOOT)
#: Images that the form proposes to boot; others are named by their numbers.
MOST_PROPOSED = 300


@require_http_methods(["GET", "HEAD", "POST"])
@page()
def benchmark_start(request: PageRequest) -> HttpResponseBase:
    """Every profile as it would be on a pool, the chosen one with its cost; for htmx the plan alone.

    POST starts what the page had shown; with ``show``, or where it had shown another plan, it is the plan again.
    """
    if request.method == "POST" and "show" not in request.POST:
        return _start(request)
    context = _context(request, request.POST if request.method == "POST" else request.GET)
    if wants_fragment(request):
        return render(request, "benchmarks/start.html#plan", context)
    return render(request, "benchmarks/start.html", context)


def _start(request: PageRequest) -> HttpResponseBase:
    pool = _pool(request, request.POST)
    if pool is None:
        raise NotFoundError(_("Pool not found, or no access."))
    request.actor.require(Role.OPERATOR, pool.host.slug)
    refused: dict[str, Any] = {}
    try:
        options = _options(request.POST)
        if not was_planned(request, pool.pk, _cleaned(request.POST)):
            return render(request, "benchmarks/start.html", _context(request, request.POST))
        key = "".join(filter(str.isalnum, request.POST.get("key", "")))[:64]
        run = services.submit(request.actor, _kind(request.POST), pool.pk, options, idempotency_key=key)
    except RefusedError as error:
        messages.error(request, refusal_message(error, _("Nothing was written.")))
    except InvalidError as error:
        refused["error"] = error
    except ForbiddenError as error:
        messages.error(request, _("{error} Nothing was written.").format(error=error))
    else:
        return redirect("benchmark", run.pk)
    return render(request, "benchmarks/start.html", refused | _context(request, request.POST), status=409)


def _pool(request: PageRequest, form: QueryDict) -> StoragePool | None:
    """The pool that the form names; without one the first, and ``None`` where it names one that is not there."""
    rows = pools_for(request.actor).order_by("host__name", "name", "id")
    asked = form.get("pool", "")
    if not asked:
        return rows.first()
    return rows.filter(pk=int(asked)).first() if asked.isascii() and asked.isdigit() and len(asked) < 19 else None


def _kind(form: QueryDict) -> str:
    """The kind that the form names, the quickest to understand where it names none."""
    kind = form.get("kind", "")
    return kind if kind in BenchmarkKind.values else BenchmarkKind.CLUSTER_SIZE.value


def _options(form: QueryDict) -> dict[str, Any]:
    """The job's options, without its kind.

    Raises:
        InvalidError: fields hold no number; it names all of them.
    """
    boots, wrong = _kind(form) == BenchmarkKind.BOOT, dict[str, str]()
    names = ["size_mib", "repetitions", *(["seconds"] if _kind(form) in TIMED else [])]
    read = {name: _number(form.get(name), name, wrong) for name in names}
    options = {
        "quick": form.get("quick") != "false",
        "repetitions": read["repetitions"],
        "size_bytes": None if read["size_mib"] is None else read["size_mib"] * MIB,
        "seconds": read.get("seconds"),
        "alongside": form.get("alongside") == "true",
        "boot": _boot(form, wrong) if boots else None,
    }
    if wrong:
        raise InvalidError(_("Some options are invalid."), wrong)
    return options


def _number(text: str | None, name: str, wrong: dict[str, str]) -> int | None:
    try:
        return whole_number(text or "")
    except ValueError:
        wrong[name] = _("Enter a whole number.")
        return None


def _cleaned(form: QueryDict) -> dict[str, Any]:
    """The job's options with its kind and with the defaults of what the form leaves empty.

    Raises:
        InvalidError: a field holds what cannot be used.
    """
    try:
        return kinds.get("benchmark").clean(_options(form) | {"kind": _kind(form)})
    except InvalidError as error:
        names = {"size_bytes": "size_mib", "boot": "boot_image"}
        raise InvalidError(error.detail, {names.get(name, name): text for name, text in error.fields.items()}) from None


def _boot(form: QueryDict, wrong: dict[str, str]) -> dict[str, Any]:
    """What a boot storm boots; what is left empty has its default.

    Args:
        wrong: gets the fields that hold no number.
    """
    words = {name: form.get(f"boot_{name}", "").strip() for name in ("kernel", "initrd", "append", "up", "pattern")}
    counts = [_number(part, "boot_guests", wrong) for part in form.get("boot_guests", "").replace(",", " ").split()]
    mebibytes = _number(form.get("boot_memory_mib"), "boot_memory_mib", wrong)
    return {
        "image": _number(form.get("boot_image"), "boot_image", wrong),
        **{name: word for name, word in words.items() if word},
        **({"guests": counts} if counts else {}),
        **({} if mebibytes is None else {"memory_bytes": mebibytes * MIB}),
    }


def _context(request: PageRequest, form: QueryDict) -> dict[str, Any]:
    pool, kind = _pool(request, form), _kind(form)
    pools = pools_for(request.actor).order_by("host__name", "name", "id")
    places = [(row.pk, f"{row.host.name} / {row.name}") for row in pools]
    context: dict[str, Any] = {
        "section": "benchmarks",
        "pool": pool,
        "pools": as_choices(places, str(pool.pk) if pool else ""),
        "kinds": as_choices(((value, kind_title(value)) for value in BenchmarkKind.values), kind),
        "form": {name: form.get(name, "") for name in CARRIED} | {"kind": kind, "pool": pool.pk if pool else ""},
        "most_repetitions": MOST_REPETITIONS,
        "key": uuid4().hex,
        "unknown_pool": pool is None and bool(places),
    }
    if pool is None:
        return context
    context["profiles"] = _pairs(profiles.every(pool))
    bootable = Image.objects.filter(host=pool.host, declared_format__in=sorted(FORMATS), in_use=False)
    context["bootable"] = bootable.order_by("name", "pk").values_list("pk", "name")[:MOST_PROPOSED]
    try:
        options = _cleaned(form)
        context["planned"] = plan_digest(pool.pk, options)
        plan = jobs.plan(request.actor, "benchmark", pool.pk, options)
        return context | {"plan": plan, "profile": profile_for(pool, options)}
    except InvalidError as error:
        return context | {"error": error}
    except ForbiddenError as error:
        return context | {
            "error": {"detail": _("Only an admin may choose a kernel on a host. {error}").format(error=error)}
        }


def _pairs(every: list[Profile]) -> list[tuple[Profile, Profile]]:
    """Of each kind that there are steps for: the quick and the thorough variant."""
    quick = {profile.kind: profile for profile in every if profile.quick and profile.kind in MADE}
    return [(quick[one.kind], one) for one in every if not one.quick and one.kind in quick]


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.OPERATOR)
def benchmark_paste(request: PageRequest) -> HttpResponseBase:
    """Keeps result lines of bonnie++ as a run of their own; what cannot be read is said, and stays in the form."""
    context: dict[str, Any] = {"section": "benchmarks", "most": services.MOST_LINES}
    if request.method != "POST":
        return render(request, "benchmarks/paste.html", context)
    form = Form(request)
    run = form.save(lambda: services.paste(request.actor, form.text("text")))
    if run is None:
        return render(request, "benchmarks/paste.html", context | {"text": form.text("text")}, status=400)
    return redirect("benchmark", run.pk)
