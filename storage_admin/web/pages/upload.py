"""Uploading a file into a pool: the file, the plan, and the button that starts it. The browser then sends the bytes."""

from typing import Any
from uuid import uuid4

from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from images.kinds.upload import Upload
from storage_admin.accounts.models import Role
from storage_admin.errors import InvalidError
from storage_admin.jobs import services
from storage_admin.web.page import PageRequest, page, plan_digest, was_planned
from storage_admin.web.pages.create import start
from storage_admin.web.pages.pools import pool_of

FIELDS = ("name", "size", "sha256")


@require_http_methods(["GET", "HEAD", "POST"])
@page()
def upload(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """The form and the plan. POST starts what the page had shown; with ``show``, or where it had shown another plan, it
    is the plan again.
    """
    pool = pool_of(request, pool_id)
    given = request.POST if request.method == "POST" else request.GET
    values = {name: str(given.get(name, "")).strip() for name in FIELDS}
    options: dict[str, Any] = {name: text for name, text in values.items() if text}
    error, plan = None, None
    try:
        if "size" in options and options["size"].isascii() and options["size"].isdigit():
            options["size"] = int(options["size"][:20])
        if request.method == "POST" and "show" not in given:
            request.actor.require(Role.OPERATOR, pool.host.slug)
            if was_planned(request, options):
                return start(request, Upload.name, pool, options)
        if options or request.method == "POST":
            plan = services.plan(request.actor, Upload.name, pool.pk, options)
    except InvalidError as invalid:
        wrong = invalid.fields | ({"file": _("Choose a file.")} if "size" in invalid.fields else {})
        wrong.pop("size", None)
        error = InvalidError(" ".join(f"{name}: {text}" for name, text in wrong.items()), wrong)
    context = {
        "section": "hosts", "pool": pool, "title": Upload.title, "plan": plan, "error": error, "on": pool.name,
        "back": reverse("pool", args=[pool.pk]), "address": reverse("upload", args=[pool.pk]), "key": uuid4().hex,
        "planned": plan_digest(options), "values": values,
    }  # fmt: skip
    return render(request, "hosts/pool/upload.html", context)
