"""Files of a guest: its filesystems, a folder, and the file that is downloaded."""

import posixpath
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_safe

from images import files
from storage_admin.accounts.models import Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.web.forms import refusal_message
from storage_admin.web.page import PageRequest, page, wants_fragment
from storage_admin.web.pages.image import image_of


@require_safe
@page(Role.ADMIN)
def image_files(request: PageRequest, image_id: int) -> HttpResponseBase:
    """The page at once; what is on the image follows, since a machine has to start for it."""
    image = image_of(request, image_id)
    device, path = request.GET.get("device", ""), posixpath.normpath("/" + request.GET.get("path", "/").lstrip("/"))
    context: dict[str, Any] = {"section": "images", "image": image, "device": device, "path": files.shown(path)}
    if not wants_fragment(request):
        return render(request, "images/files.html", context)
    try:
        if device:
            context |= files.listing(request.actor, image, device, path)
            for one in context["entries"]:
                one["address"] = _address(image_id, one["kind"], device, posixpath.join(path, one["name"]))
                one["shown"] = files.shown(one["name"])
            context["above"] = _address(image_id, "folder", device, posixpath.dirname(path)) if path != "/" else ""
        else:
            context |= files.look(request.actor, image)
            for one in context["filesystems"]:
                one["address"] = _address(image_id, "folder", one["device"], "/") if one["size"] is not None else ""
    except RefusedError as error:
        context["refused"] = error
    return render(request, "images/files.html#found", context)


def _address(image_id: int, kind: str, device: str, path: str) -> str:
    """Where an entry leads; nowhere for what is neither a folder nor a file."""
    pages = {"folder": "image_files", "file": "image_file"}
    if kind not in pages:
        return ""
    return f"{reverse(pages[kind], args=[image_id])}?{urlencode({'device': device, 'path': path})}"


@require_safe
@page(Role.ADMIN)
def image_file(request: PageRequest, image_id: int) -> HttpResponseBase:
    """The bytes of a file."""
    image = image_of(request, image_id)
    try:
        return files.content(request.actor, image, request.GET.get("device", ""), request.GET.get("path", "/"))
    except RefusedError as error:
        messages.error(request, refusal_message(error))
        return redirect("image", image.pk)
