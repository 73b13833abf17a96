"""The images page: one dense table, all of its state in the address bar."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.contrib import messages
from django.http.response import HttpResponseBase, HttpResponseRedirect
from django.shortcuts import render
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST, require_safe

from images import selectors
from images.filters import FORMATS, ImageFilters
from images.models import Image
from images.rewrite import space
from images.scan import look
from storage_admin.accounts.models import Role
from storage_admin.accounts.saved_views import list_page
from storage_admin.agent.protocol import RefusedError
from storage_admin.csv_export import Columns, csv_answer, known
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.hosts.selectors import hosts_for, pool_names
from storage_admin.jobs.services import submit
from storage_admin.web.lists import Filtered, as_choices, columns, filtered
from storage_admin.web.page import PageRequest, local, page, paginated, wants_fragment
from storage_admin.web.templatetags.busy import job_of, link_to
from storage_admin.web.templatetags.storage import ago, bar_scale
from storage_admin.words import words

PAGE = list_page("images", gettext_noop("Images"), ImageFilters.base_filters)
PER_PAGE = 50
#: The costliest first, until somebody wants another order.
ORDERING = "-allocated_size"
#: At most so many are analyzed by one click.
AT_ONCE = 500

#: What the page offers to filter by; the address bar takes any number of bytes.
RECLAIMABLE = (("1", _("any known")), (str(1 << 30), _("1 GiB or more")), (str(10 << 30), _("10 GiB or more")))

#: Bytes from which on a row offers to win them back.
WORTH_A_BUTTON = 1 << 20

#: Columns: what they are ordered by, their word, the order that a first click gives.
COLUMNS = (
    ("name", gettext_noop("Image"), ""),
    (None, gettext_noop("Guest"), ""),
    ("format", gettext_noop("Format"), ""),
    (None, gettext_noop("Size"), ""),
    ("allocated_size", gettext_noop("Physical"), "-"),
    ("virtual_size", gettext_noop("Virtual"), "-"),
    ("reclaimable_bytes", gettext_noop("Reclaimable"), "-"),
    ("chain_depth", gettext_noop("Depth"), "-"),
    ("last_scanned", gettext_noop("Scanned"), "-"),
)


@dataclass(frozen=True)
class Row:
    """All that a line of the table says. What it looks like follows from this alone, so it is kept (:func:`_drawn`)."""

    may_operate: bool
    pk: int
    name: str
    path: str
    place: str
    state: str
    state_word: str
    orphan: bool | None
    in_use: bool | None
    #: Of each guest's disk the guest's name, its state, and in which of its states alone it is the guest's.
    uses: tuple[tuple[str, str, str], ...]
    declared_format: str
    format: str
    virtual_size: int | None
    allocated_size: int | None
    offered_bytes: int | None
    reclaimable_bytes: int | None
    scale: int
    chain_depth: int
    overlays_count: int
    #: How long ago it was scanned, and the job that has it now, as they are shown.
    scanned: str
    busy: str
    button: str


@lru_cache(maxsize=2000)
def _drawn(row: Row) -> SafeString:
    """A line of the table: most of a list is as it was when somebody looked last."""
    return render_to_string("images/row.html", {"row": row})


def _row(request: PageRequest, image: Image, scale: int) -> Row:
    disks = image.disks
    return Row(
        may_operate=request.actor.role >= Role.OPERATOR,
        pk=image.pk,
        name=image.name,
        path=image.path,
        place=f"{image.host.name} / {image.pool.name}",
        state=image.state,
        state_word=image.get_state_display().lower(),
        orphan=image.orphan,
        in_use=image.in_use,
        uses=tuple((disk.guest.name, disk.guest.state, disk.only_in) for disk in disks),
        declared_format=image.declared_format,
        format=image.format,
        virtual_size=image.virtual_size,
        allocated_size=image.allocated_size,
        offered_bytes=image.offered_bytes,
        reclaimable_bytes=image.reclaimable_bytes,
        scale=scale,
        chain_depth=image.chain_depth,
        overlays_count=image.overlays_count,
        scanned=ago(image.last_scanned),
        busy=link_to(job_of(request, image.pk)),
        button=_button(image),
    )


def _button(image: Image) -> str:
    """What a button would do: by a method that there is, where it is worth one."""
    worth = (image.reclaimable_bytes or 0) >= WORTH_A_BUTTON
    return button_of(image.reclaimable_method) if worth and image.reclaimable_method in space.METHODS else ""


def button_of(method: str) -> str:
    """The word on a button that leads to a reclaim's plan: short enough for a list."""
    return gettext("Punch holes…") if method == "in_place" else f"{words(method).capitalize() or 'Reclaim'}…"


def _listed(request: PageRequest) -> Filtered[Image]:
    return filtered(request, ImageFilters, selectors.ordered(selectors.images_for(request.actor), ORDERING))


def _table(request: PageRequest, listing: Filtered[Image]) -> dict[str, Any]:
    rows = paginated(request, selectors.MatchingImages(listing.rows), PER_PAGE)
    ordering = ORDERING if "ordering" in listing.ignored else listing.values.get("ordering", ORDERING)
    scale = bar_scale((image.virtual_size, image.allocated_size) for image in rows.object_list)
    return {
        "rows": rows,
        "shown": [_drawn(_row(request, image, scale)) for image in rows.object_list],
        "columns": columns(COLUMNS, ordering),
        "ordering": ordering,
        "ignored": listing.ignored,
        "filtered": bool(listing.values.keys() - {"ordering"}),
    }


@require_safe
@page()
def images(request: PageRequest) -> HttpResponseBase:
    """The table alone for htmx, the page with its filters otherwise."""
    listing = _listed(request)
    context = _table(request, listing)
    if wants_fragment(request):
        return render(request, "images/images.html#table", context)
    values = listing.values
    guest = (
        selectors.guests_for(request.actor).filter(pk=int(values["guest"])).first()
        if "guest" in values and not listing.ignored
        else None
    )
    context |= {
        "section": "images",
        "values": values,
        "guest": guest,
        "hosts": as_choices(hosts_for(request.actor).values_list("pk", "name"), values.get("host", "")),
        "pools": as_choices(pool_names(request.actor), values.get("pool", "")),
        "formats": as_choices(((name, name) for name in FORMATS), values.get("format", "")),
        "states": as_choices(((value, word.lower()) for value, word in Image.State.choices), values.get("state", "")),
        "in_use_words": (("true", "yes"), ("false", "no"), ("unknown", "unknown")),
        "reclaimable_words": RECLAIMABLE,
        "other_reclaimable": values.get("min_reclaimable", "") not in {"", *(value for value, __ in RECLAIMABLE)},
    }
    return render(request, "images/images.html", context)


#: A line of the list as CSV.
CSV_COLUMNS: Columns = {
    "id": "pk",
    "host": "host.name",
    "pool": "pool.name",
    "path": "path",
    "format": "format",
    "declared_format": "declared_format",
    "state": "state",
    "virtual_size": "virtual_size",
    "allocated_size": "allocated_size",
    "file_size": "file_size",
    "reclaimable_bytes": "reclaimable_bytes",
    "chain_depth": "chain_depth",
    "overlays_count": "overlays_count",
    "in_use": lambda image: known(image.in_use),
    "orphan": lambda image: known(image.orphan),
    "guests": lambda image: [disk.guest.name for disk in image.disks],
    "last_scanned": "last_scanned",
}


#: What of an image's row the file is made of.
CSV_FIELDS = (
    "host", "pool", "path", "format", "declared_format", "state", "virtual_size", "allocated_size", "file_size",
    "reclaimable_bytes", "chain_depth", "overlays_count", "in_use", "orphan", "seen",
)  # fmt: skip


@require_safe
@page()
def images_csv(request: PageRequest) -> HttpResponseBase:
    """The whole list as it is filtered and ordered, sizes in bytes, sent as it is read."""
    # Few hosts and pools have many images: each is read once for a part of the file, not joined to every row.
    rows = _listed(request).exact().select_related(None).only(*CSV_FIELDS).prefetch_related("host", "pool")
    return csv_answer("images", CSV_COLUMNS, rows)


@require_POST
@page(Role.OPERATOR)
def images_analyze(request: PageRequest) -> HttpResponseBase:
    """Analyzes the images that were selected, and says how many were refused and why the first one was."""
    given = request.POST.getlist("image")[:AT_ONCE]
    chosen = [int(text) for text in given if text.isascii() and text.isdecimal() and len(text) < 20]
    queued, refused = 0, []
    look.at(selectors.images_for(request.actor).filter(pk__in=chosen))
    for image_id in chosen:
        try:
            submit(request.actor, "analyze", image_id, {}, look=False)
            queued += 1
        except (RefusedError, InvalidError, NotFoundError) as error:
            refused.append(error.detail)
    if not chosen:
        messages.warning(request, gettext("No image was selected."))
    if queued:
        messages.success(request, gettext("{queued} queued for analysis. Results appear here.").format(queued=queued))
    if refused:
        messages.warning(
            request,
            gettext("{count} refused. The first reason: {refused}").format(count=len(refused), refused=refused[0]),
        )
    return HttpResponseRedirect(local(request.POST.get("next", ""), reverse("images")))
