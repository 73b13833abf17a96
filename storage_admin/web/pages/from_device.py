"""Importing a block device into a pool: the device, the plan, and the button that starts it."""

from typing import Any
from uuid import uuid4

from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from images.kinds.from_device import FromDevice
from storage_admin.accounts.models import Role
from storage_admin.agent.rewrite.conversion import OPTIONS
from storage_admin.errors import InvalidError
from storage_admin.jobs import services
from storage_admin.web.page import PageRequest, page, plan_digest, was_planned
from storage_admin.web.pages.create import start
from storage_admin.web.pages.pools import pool_of

FIELDS = ("device", "name", "format")


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN)
def from_device(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """The form and the plan. POST starts what the page had shown; with ``show``, or where it had shown another plan, it
    is the plan again.
    """
    pool = pool_of(request, pool_id)
    given = request.POST if request.method == "POST" else request.GET
    values = {name: str(given.get(name, "")).strip() for name in FIELDS}
    options: dict[str, Any] = {name: text for name, text in values.items() if text}
    error, plan = None, None
    try:
        if request.method == "POST" and "show" not in given and was_planned(request, options):
            return start(request, FromDevice.name, pool, options)
        if "device" in options or "name" in options:
            plan = services.plan(request.actor, FromDevice.name, pool.pk, options)
    except InvalidError as invalid:
        error = invalid
    context = {
        "section": "hosts", "pool": pool, "title": FromDevice.title, "plan": plan, "error": error, "on": pool.name,
        "back": reverse("pool", args=[pool.pk]), "address": reverse("from_device", args=[pool.pk]), "key": uuid4().hex,
        "planned": plan_digest(options), "values": values, "formats": list(OPTIONS),
    }  # fmt: skip
    return render(request, "hosts/pool/from_device.html", context)
