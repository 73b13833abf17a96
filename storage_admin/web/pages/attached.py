"""Images that are block devices of their hosts: the list, and the steps that attach and detach one."""

from typing import Any
from uuid import uuid4

from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_safe

from images.rewrite import attached as known
from storage_admin.accounts.models import Role
from storage_admin.hosts.selectors import hosts_for
from storage_admin.jobs import kinds, services
from storage_admin.jobs.kinds import JobKind
from storage_admin.web.forms import Form, status_of, typed
from storage_admin.web.page import PageRequest, looked_plan, page, shown_as, wants_fragment
from storage_admin.web.pages.image import image_of


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
    """The plan of attaching an image or detaching it; POST starts the job that the plan showed.

    For htmx it is what a look at the image on its host changes of that.
    """
    image, kind = image_of(request, image_id), kinds.get(kind_name)
    options = _options(request, kind)
    if request.method == "POST":
        key = "".join(filter(str.isalnum, request.POST.get("key", "")))[:64]
        job = Form(request).save(
            lambda: services.submit(request.actor, kind.name, image.pk, options, idempotency_key=key)
        )
        if job is not None:
            return redirect("job", job.pk)
    look = request.method != "POST" and wants_fragment(request)
    plan = services.plan(request.actor, kind.name, image.pk, options, look=look)
    image = image_of(request, image.pk) if look else image
    context = {
        "section": "images",
        "image": image,
        "kind": kind,
        "address": reverse(kind.name, args=[image.pk]),
        "plan": plan,
        "shown": shown_as(request, plan),
        "writable": options.get("writable", False),
        "without_nbd": {refusal.code for refusal in plan.refusals} & {"nbd_missing", "nbd_partitions"},
        "attached": known.of_image(image),
        "form": typed(request, request.path, {"confirm_name": ""}),
        "key": uuid4().hex,
    }
    if look:
        return looked_plan(request, "images/attach.html", context)
    return render(request, "images/attach.html", context, status=status_of(request))
