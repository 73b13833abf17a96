"""Many images reclaimed at once: one page with the plan of each and the sums, then one job each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from django.contrib import messages
from django.http import QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.utils.translation import gettext
from django.views.decorators.http import require_POST

from images import backups, selectors
from images.models import Image
from images.rewrite import neighbours, planning, space
from images.scan import look
from storage_admin.accounts.models import Actor, Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.plan_and_progress import Plan, Refusal
from storage_admin.jobs.selectors import answered_keys
from storage_admin.web.page import NOT_PLANNED, PageRequest, page, plan_digest, wants_fragment
from storage_admin.web.pages.rewrite import options_from

KIND = next(kind for kind in planning.rewriting_kinds() if kind.name == "reclaim")
METHODS = ("auto", *space.METHODS)
#: The key of each image's job by the image's id, and those of them that have their job.
Keys = tuple[dict[int, str], set[str]]
#: At most so many images are planned on one page.
AT_ONCE = 100


@dataclass(frozen=True)
class Line:
    """One image with its plan, and its method in words."""

    image: Image
    plan: Plan

    @property
    def refusal(self) -> Refusal | None:
        return self.plan.refusals[0] if self.plan.refusals else None

    @property
    def method(self) -> str:
        return KIND.method_word(self.plan.method)

    @property
    def won_bytes(self) -> int | None:
        """What it would win, where that is known."""
        return None if self.plan.won_bytes is None else max(self.plan.won_bytes, 0)


@dataclass(frozen=True)
class Need:
    """What the jobs take on one filesystem in the worst moment, in bytes.

    Args:
        pool: one of the pools on it; it has the most of the jobs.
        scratch_bytes: these jobs.
        others_bytes: what those that are queued or at work already add to it.
    """

    pool: StoragePool
    scratch_bytes: int
    others_bytes: int


@dataclass(frozen=True)
class Sums:
    """Over all images that are not refused, in bytes.

    Args:
        unknown: of how many images it is not known what they would win.
        freed_bytes: becomes free as the jobs end.
        held_bytes: is held by undo copies until their windows close.
        later_bytes: becomes free when these go.
    """

    accepted: int
    refused: int
    unknown: int
    won_bytes: int
    freed_bytes: int
    held_bytes: int
    later_bytes: int


def sums_of(lines: Sequence[Line]) -> Sums:
    """Adds the plans up."""
    accepted = [line for line in lines if line.refusal is None]
    at_once = [line for line in accepted if not line.plan.undo_bytes]
    won = sum(line.won_bytes or 0 for line in accepted)
    freed = sum(line.won_bytes or 0 for line in at_once)
    return Sums(
        accepted=len(accepted), refused=len(lines) - len(accepted),
        unknown=sum(line.won_bytes is None for line in accepted), won_bytes=won, freed_bytes=freed,
        held_bytes=sum(line.plan.undo_bytes or 0 for line in accepted), later_bytes=won - freed,
    )  # fmt: skip


def needs_of(lines: Iterable[Line], admitted: space.Admitted) -> list[Need]:
    """What each filesystem has to hold in the worst moment.

    Args:
        admitted: what all jobs need, these included.
    """
    there: dict[str, list[Line]] = {}
    for line in lines:
        if line.refusal is None:
            there.setdefault(space.filesystem_of(line.image.pool), []).append(line)
    needs = []
    for found in there.values():
        pools = [line.image.pool for line in found]
        pool = max(pools, key=pools.count)
        slots = {line.image.host_id: space.slots_of(line.image.host) for line in found}
        scratch = space.worst_moment([space.planned_need(line.plan, line.image.host) for line in found], slots)
        needs.append(Need(pool, scratch, max(admitted.worst(pool) - scratch, 0)))
    return sorted(needs, key=lambda need: need.pool.name)


def _chosen(request: PageRequest) -> list[Image]:
    """The images that were selected and exist for who asks, in the order of what they would win."""
    given = request.POST.getlist("image")
    if wants_fragment(request):  # it follows jobs: what is unticked stays on the page
        given += request.POST.getlist("listed")
    given = list(dict.fromkeys(given))[:AT_ONCE]
    ids = [int(text) for text in given if text.isascii() and text.isdecimal() and len(text) < 19]
    rows = selectors.images_for(request.actor).defer(None).filter(pk__in=ids)
    return sorted(rows, key=lambda image: (-(image.reclaimable_bytes or 0), image.name))


def planned(actor: Actor, images: Sequence[Image], options: dict[str, Any], admitted: space.Admitted) -> list[Line]:
    """A plan for each, one after the other: for each counts what those before it need, as if they were queued.

    Args:
        admitted: what jobs need; the planned ones are added.
    """
    neighbours.share(images, admitted)
    lines, last = [], backups.of_images(images)
    for image in images:
        plan = planning.plan_for(actor, KIND, image, options)
        line = Line(image, replace(plan, backups=tuple(last.get(image.pk, ()))))
        if line.refusal is None:
            admitted.add(image.pool, image.host, space.planned_need(line.plan, image.host))
        lines.append(line)
    return lines


@require_POST
@page(Role.OPERATOR)
def images_reclaim(request: PageRequest) -> HttpResponseBase:
    """The plan of all selected images; with ``confirmed`` the jobs are queued, if just these plans had been shown."""
    images = _chosen(request)
    if look.at(images):
        images = _chosen(request)
    if not images:
        messages.warning(request, gettext("No image was selected."))
        return redirect("images")
    form: QueryDict = request.POST
    admitted, wrong = space.Admitted(), None
    try:
        options = options_from(KIND, form)
        lines = planned(request.actor, images, options, admitted)
    except InvalidError as error:
        wrong, options, admitted = error, KIND.clean({}), space.Admitted()
        lines = planned(request.actor, images, options, admitted)
    loses = _loses(lines, options)
    if "confirmed" in form and wrong is None:
        keys = _keys(request, lines)
        if not _was_shown(form, lines, options, keys):
            messages.warning(request, gettext(NOT_PLANNED))
        elif not loses or "without_undo" in form:
            return _submit(request, lines, options, keys)
        else:
            sentence = gettext("Confirm that images are replaced without an undo copy: {loses}.").format(loses=loses)
            wrong = InvalidError(sentence, {"without_undo": sentence})
    context = {
        "section": "images",
        "lines": lines,
        "error": wrong,
        "loses": loses,
        "planned": " ".join([_digest(lines, options), *(_as_shown(one.image, one.plan) for one in _accepted(lines))]),
        "sums": sums_of(lines),
        "needs": needs_of(lines, admitted),
        "methods": [(name, _method_word(name), name == form.get("method", options["method"])) for name in METHODS],
        "kept_hours": options["undo_hours"],
        "undo_hours": form.get("undo_hours", options["undo_hours"]),
        "key": uuid4().hex,
    }  # fmt: skip
    return render(request, "images/bulk.html", context)


def _method_word(name: str) -> str:
    return gettext("auto (recommended)") if name == "auto" else KIND.method_word(name)


def _accepted(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if line.refusal is None]


def _loses(lines: Iterable[Line], options: dict[str, Any]) -> int:
    """How many originals would be gone as soon as their copies stand verified."""
    return sum(KIND.replaces(line.plan.method, options) and not line.plan.undo_bytes for line in _accepted(lines))


def _digest(lines: Iterable[Line], options: dict[str, Any]) -> str:
    return plan_digest(sorted(line.image.pk for line in lines), options)


def _as_shown(image: Image, plan: Plan) -> str:
    """What Confirm is for of one image: its method, and whether its original is kept."""
    return f"{image.pk}:{plan_digest(plan.method, bool(plan.undo_bytes))}"


def _was_shown(form: QueryDict, lines: Sequence[Line], options: dict[str, Any], keys: Keys) -> bool:
    """Whether the page had shown what would be started now."""
    digest, *shown = form.get("planned", "").split() or [""]
    own, answered = keys
    new = [line for line in _accepted(lines) if own[line.image.pk] not in answered]
    return digest == _digest(lines, options) and all(_as_shown(line.image, line.plan) in shown for line in new)


def _keys(request: PageRequest, lines: Sequence[Line]) -> Keys:
    key = "".join(filter(str.isalnum, request.POST.get("key", "")))[:64]
    own = {line.image.pk: f"{key}-{line.image.pk}" if key else "" for line in lines}
    return own, answered_keys(request.actor, own.values())


def _submit(request: PageRequest, lines: Sequence[Line], options: dict[str, Any], keys: Keys) -> HttpResponseBase:
    own, answered = keys
    queued, refused = len(answered), []
    shown = request.POST.get("planned", "").split()
    for line in _accepted(lines):
        image, key = line.image, own[line.image.pk]
        if key in answered:
            continue

        def check(plan: Plan, image: Image = image) -> None:
            if not plan.refusals and _as_shown(image, plan) not in shown:
                raise InvalidError(gettext("The plan has changed."))

        try:
            services.submit(request.actor, KIND.name, image.pk, options, idempotency_key=key, look=False, check=check)
            queued += 1
        except (RefusedError, InvalidError, NotFoundError) as error:
            refused.append(f"{image.name}: {error.detail}")
    if queued:
        messages.success(
            request,
            gettext("{queued} queued. Each host runs as many at a time as its job limit allows.").format(queued=queued),
        )
    if refused:
        messages.warning(
            request,
            gettext("{count} refused in the meantime. The first one: {refused}").format(
                count=len(refused), refused=refused[0]
            ),
        )
    return redirect("jobs")
