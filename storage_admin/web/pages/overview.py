"""The first page: what is full, what can be won back now, what is wrong, what is at work."""

from dataclasses import dataclass
from typing import Any

from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe

from images import selectors
from images.models import Image
from images.selectors import Concern, ConcernItem
from storage_admin.jobs import kinds
from storage_admin.web.page import PageRequest, live, live_body, live_context, page, wants_fragment
from storage_admin.web.pages.images import button_of
from storage_admin.web.templatetags.storage import bar_scale

#: So many of each concern are named, the others are in the list that it links to.
NAMED = 3


@dataclass(frozen=True)
class Look:
    """A concern, the list of all that it is about (empty where there is none), and the first few by name."""

    shown: Concern
    link: str
    things: tuple[ConcernItem, ...]


def _list_of(concern: Concern) -> str:
    if concern.code == "orphan":
        return reverse("orphans")
    if concern.code in Image.State.values:
        return f"{reverse('images')}?state={concern.code}"
    if concern.code in {"job_failed", "job_interrupted"}:
        return f"{reverse('jobs')}?state={concern.code.removeprefix('job_')}"
    return reverse("hosts") if concern.code.startswith("host_") else ""


def _context(request: PageRequest) -> dict[str, Any]:
    found = selectors.overview(request.actor)
    candidates = [(candidate, button_of(candidate.method)) for candidate in found.win_back_now]
    fills = [row for row in found.pools if row.days_until_full is not None]
    promised = [row for row in found.pools if row.overcommit_ratio is not None]
    return {
        "found": found,
        "totals": found.totals,
        "candidates": candidates,
        "concerns": [Look(concern, _list_of(concern), concern.items[:NAMED]) for concern in found.needs_a_look],
        "scale": bar_scale((candidate.virtual_size, candidate.allocated_size) for candidate in found.win_back_now),
        "full_first": min(fills, key=lambda row: row.days_until_full or 0.0, default=None),
        "most_promised": max(promised, key=lambda row: row.overcommit_ratio or 0.0, default=None),
        "titles": kinds.titles(),
    }


@require_safe
@page()
def overview(request: PageRequest) -> HttpResponseBase:
    """The first page; its numbers follow what jobs and scans change."""
    context = _context(request)
    url = reverse("overview")
    every = "2s" if context["found"].at_work else "15s"
    if wants_fragment(request):
        return live(request, "images/overview.html#numbers", context, url=url, every=every)
    body, version = live_body(request, "images/overview.html#numbers", context)
    context |= {"section": "overview"} | live_context(body, version, url=url, every=every)
    return render(request, "images/overview.html", context)
