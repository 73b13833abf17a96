"""One image: its facts, its chain, what can be done with it and what cannot, and why not."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from images import backups, selectors
from images.kinds.inside import last_look
from images.kinds.move import Move
from images.kinds.relink import is_lost
from images.models import Image
from images.orphans import rows
from images.orphans.selectors import evidence
from images.rewrite import attached, neighbours, planning
from images.scan import look, vanished
from images.selectors.snapshots import held_by_each
from images.services import DECLARABLE, declare_format
from storage_admin.accounts.models import Role
from storage_admin.agent.protocol import INVALID
from storage_admin.errors import NotFoundError
from storage_admin.hosts.live_facts import since_1970
from storage_admin.jobs import kinds, services
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal
from storage_admin.jobs.selectors import jobs_for
from storage_admin.web.page import PageRequest, attempt, page, plan_digest, shown_as, wants_fragment
from storage_admin.web.pages.chain_tree import tree_of

JOBS_SHOWN = 10
SAMPLES_SHOWN = 1000
#: The virtual size is drawn beside the physical one where it is at most so many times as large.
HIGHEST_LINE = 4
#: In these states an image has lost its way to its base: nothing can be done with it until that is repaired.
BROKEN = (Image.State.CHAIN_BROKEN, Image.State.CHAIN_CYCLE)


#: What only admins do, and others need not read of.
ATTACHING = frozenset({"attach", "detach"})
#: What has a button at the head of the page; the others have a link among the actions.
IN_HEAD = frozenset({"reclaim", "flatten", "convert", "check", "grow"})


@dataclass(frozen=True)
class Action:
    """Something that could be done with an image. ``plan.refusals`` say why it cannot be, and what to do about it."""

    image_id: int
    kind: JobKind
    plan: Plan

    @property
    def rewrites(self) -> bool:
        return self.kind.rewrites

    @property
    def refusals(self) -> list[Refusal]:
        """What stands against it, but for options that its page asks for."""
        return [refusal for refusal in self.plan.refusals if refusal.code != INVALID]

    @property
    def address(self) -> str:
        """The page of its plan; of one that changes nothing, what starts it."""
        return reverse(self.kind.name, args=[self.image_id])

    @property
    def offered(self) -> bool:
        """Whether a button makes sense: what the image's format or place rules out has none."""
        return not {refusal.code for refusal in self.plan.refusals} & {"unsupported_subformat", "stale_plan"}

    @property
    def in_head(self) -> bool:
        """Whether its button is at the head of the page."""
        return not self.rewrites or self.kind.name in IN_HEAD or self.kind.name in rows.KINDS

    @property
    def method(self) -> str:
        """The word of what it would do."""
        return self.kind.method_word(self.plan.method)

    @property
    def won_bytes(self) -> int | None:
        """What it would win, as far as that is known."""
        return self.plan.won_bytes


def image_of(request: PageRequest, image_id: int) -> Image:
    """The image of that id, with host, pool, base and guests.

    Raises:
        NotFoundError: there is none, or not for who asks.
    """
    rows = selectors.images_for(request.actor).defer(None).select_related("backing")
    row = rows.annotate(beside_volumes=Move.beside_volumes).filter(pk=image_id).first()
    if row is None:
        raise NotFoundError(_("There is no image {image}.").format(image=image_id))
    return row


def _actions(request: PageRequest, image: Image) -> list[Action]:
    """Every kind of job for images, with its plan. Plans come from the database alone."""
    actions = []
    for kind in planning.image_kinds():
        if (kind.name in rows.KINDS and not _is_for(request, image, kind.name)) or _lacks(image, kind.name):
            continue
        if not planning.works_on(kind, image):
            continue
        if kind.role > request.actor.role and kind.name in ATTACHING:
            continue
        actions.append(Action(image.pk, kind, planning.plan_for(request.actor, kind, image, {})))
    return sorted(actions, key=lambda action: not action.rewrites)


def _shown(request: PageRequest, image: Image, actions: list[Action]) -> str:
    """A digest of what the page shows of what may pass."""
    facts = (image.state, image.state_detail, image.in_use, image.in_use_detail, image.orphan, image.allocated_size)
    guests = [disk.guest.state for disk in image.disks]
    return plan_digest(facts, guests, [shown_as(request, action.plan) for action in actions])


def _is_for(request: PageRequest, image: Image, kind: str) -> bool:
    """Whether setting aside and what follows is worth a word: to admins, of orphans and of what is set aside."""
    fits = image.orphan is True if kind == "set_aside" else image.state == Image.State.SET_ASIDE
    return fits and request.actor.role >= Role.ADMIN


def _lacks(image: Image, kind: str) -> bool:
    """Whether the image has nothing of what the kind is for, so that it is not worth a word."""
    if kind == Move.name:
        return not Move.is_of_use(image, beside_volumes=getattr(image, "beside_volumes", False))
    lacks = {
        "bitmaps": not image.bitmaps,
        "keys": not image.encrypted,
        "commit": image.backing_id is None,
        "relink": not is_lost(image),
        "attach": image.attached is not None,
        "detach": image.attached is None,
    }
    lacks["inside"] = not image.pool.look_inside
    return lacks.get(kind, False)


def _chart(image: Image) -> dict[str, Any] | None:
    """Sizes over time: each sample holds until the next one, and the last one until the last scan."""
    samples = list(selectors.history_of(image).order_by("-at", "-id")[:SAMPLES_SHOWN])[::-1]
    points: list[tuple[datetime, int | None, int | None]] = [
        (sample.at, sample.allocated_size, sample.virtual_size) for sample in samples
    ]
    if points and image.last_scanned and image.last_scanned > points[-1][0]:
        points.append((image.last_scanned, image.allocated_size, image.virtual_size))
    if len(points) < 2:
        return None
    physical = [{"x": round(at.timestamp()), "y": allocated} for at, allocated, __ in points if allocated is not None]
    virtual = [{"x": round(at.timestamp()), "y": size} for at, __, size in points if size is not None]
    shape = {"stepped": "before", "pointRadius": 0}
    lines = [{"label": "physical", "data": physical, "colour": "--sa-fill", "fill": True} | shape]
    # Far above the physical size, the virtual one would press it flat onto the axis.
    if not physical:
        return None
    if virtual and max(point["y"] for point in virtual) <= HIGHEST_LINE * max(point["y"] for point in physical):
        lines.append({"label": "virtual", "data": virtual, "colour": "--sa-muted", "borderDash": [4, 4]} | shape)
    return {
        "type": "line",
        "data": {"datasets": lines},
        "options": {"scales": {"x": {"type": "linear"}, "y": {"beginAtZero": True}}},
    }


def _snapshots(image: Image) -> list[dict[str, Any]]:
    """The internal snapshots, with the time that their headers give, and what each alone holds."""
    return [
        snapshot | {"at": since_1970(snapshot.get("created")), "held": held}
        for snapshot, held in zip(image.snapshots, held_by_each(image), strict=True)
    ]


def _rebase(image: Image) -> list[str]:
    """The command that has an image's header name another backing file, without a look at what is in either."""
    own, base = image.declared_format or image.format, image.backing_format or "FORMAT"
    return ["qemu-img", "rebase", "-u", "-f", own, "-F", base, "-b", "NEW_PATH", image.path]


@require_safe
@page()
def image(request: PageRequest, image_id: int) -> HttpResponseBase:
    """All that is known of one image; for htmx the age of that after a look at it on its host, and whether the page has
    to be fetched anew.
    """
    row = image_of(request, image_id)
    if wants_fragment(request):
        look.at([row])
        row = image_of(request, image_id)
        if request.GET.get("shown") == _shown(request, row, _actions(request, row)):
            return render(request, "images/image.html#age", {"image": row, "beside": True})
        return HttpResponse(status=204, headers={"HX-Trigger": "facts-changed"})
    actions = _actions(request, row)
    chain = selectors.chain_of(row, request.actor)
    jobs = jobs_for(request.actor).filter(target_kind="image", target_id=row.pk)
    tree = tree_of(chain, row.pk)
    shown = Image.objects.filter(pk__in=[line.node.id for line in tree.lines])
    context = {
        "section": "images",
        "image": row,
        "chain": chain,
        "tree": tree,
        "part": neighbours.snapshot_part(row),
        "reclaimable": {one.pk: one.offered_bytes for one in shown.only("state", "reclaimable_bytes")},
        "actions": actions,
        "shown": _shown(request, row, actions),
        "jobs": jobs[:JOBS_SHOWN],
        "undoable": jobs.filter(undo_state=Job.UndoState.AVAILABLE).first(),
        "titles": kinds.titles(),
        "chart": _chart(row),
        "snapshots": _snapshots(row),
        "evidence": evidence(row),
        "backups": backups.of(row) if row.host.runs_proxmox else (),
        "declarable": DECLARABLE,
        "broken": row.state in BROKEN,
        "lost_base": is_lost(row),
        "inside": last_look(row),
        "attached": attached.of_image(row),
        "repair": _rebase(row),
    }
    return render(request, "images/image.html", context)


@require_POST
@page(Role.OPERATOR)
def image_analyze(request: PageRequest, image_id: int) -> HttpResponseBase:
    """Samples the image now."""
    row = image_of(request, image_id)
    job = attempt(request, lambda: services.submit(request.actor, "analyze", row.pk, {}))
    return redirect("job", job.pk) if job else redirect("image", row.pk)


@require_POST
@page(Role.OPERATOR)
def image_inside(request: PageRequest, image_id: int) -> HttpResponseBase:
    """Looks at the image's partitions and filesystems now."""
    row = image_of(request, image_id)
    job = attempt(request, lambda: services.submit(request.actor, "inside", row.pk, {}))
    return redirect("job", job.pk) if job else redirect("image", row.pk)


@require_POST
@page(Role.ADMIN)
def image_format(request: PageRequest, image_id: int) -> HttpResponseBase:
    """Declares the format, or takes the declaration back."""
    row = image_of(request, image_id)
    chosen = request.POST.get("format", "")
    done = (
        _("The format of {row} is now declared as {chosen}.").format(row=row.name, chosen=chosen)
        if chosen
        else _("The format of {row} is no longer declared.").format(row=row.name)
    )
    attempt(request, lambda: declare_format(request.actor, row, chosen), done)
    return redirect("image", row.pk)


@require_POST
@page(Role.ADMIN)
def image_forget(request: PageRequest, image_id: int) -> HttpResponseBase:
    """Removes the row of an image that is gone."""
    row = image_of(request, image_id)

    def forget() -> bool:
        vanished.forget(request.actor, row)
        return True

    done = attempt(request, forget, _("{row} is removed from the inventory.").format(row=row.name))
    return redirect("images") if done else redirect("image", row.pk)
