"""Images that are block devices of their hosts: the list, and the steps that attach and detach one."""

from typing import Any

from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_http_methods, require_safe

from images.models import Image
from images.rewrite import attached as known
from storage_admin.accounts.models import Role
from storage_admin.hosts.selectors import hosts_for
from storage_admin.jobs import kinds
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.plan_and_progress import Plan
from storage_admin.web.forms import typed
from storage_admin.web.page import PageRequest, page, wants_fragment
from storage_admin.web.pages.image import image_of
from storage_admin.web.pages.image_job import image_job


@require_safe
@page()
def attached(request: PageRequest) -> HttpResponseBase:
    """What is attached where; for htmx as the hosts tell now that had something attached when they were scanned."""
    if wants_fragment(request):
        for host in hosts_for(request.actor):
            if host.capabilities.get("attached"):
                known.look(host)
    context = {"section": "hosts", "rows": known.listed(request.actor)}
    return render(request, "images/attached.html#list" if wants_fragment(request) else "images/attached.html", context)


def _options(request: PageRequest, kind: JobKind) -> dict[str, Any]:
    """What the page shows the plan of, by its address or its form."""
    if "writable" not in kind.properties:
        return {}
    given = request.POST if request.method == "POST" else request.GET
    return {"writable": given.get("writable") == "true", "confirm_name": given.get("confirm_name", "")}


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN)
def attach(request: PageRequest, image_id: int, kind_name: str) -> HttpResponseBase:
    """The steps that attach an image or detach it."""
    kind = kinds.get(kind_name)
    options = _options(request, kind)

    def more(image: Image, plan: Plan) -> dict[str, Any]:
        return {
            "section": "images",
            "writable": options.get("writable", False),
            "without_nbd": {refusal.code for refusal in plan.refusals} & {"nbd_missing", "nbd_partitions"},
            "attached": known.of_image(image),
            "form": typed(request, request.path, {"confirm_name": ""}),
        }

    image = image_of(request, image_id)
    return image_job(request, image, kind, "images/attach.html", more, given=lambda _: options, planned=options)
