"""Importing a packed image into a pool: the file, the plan, and the button that starts it."""

from django.http.response import HttpResponseBase
from django.views.decorators.http import require_http_methods

from images.kinds.unpack import Unpack
from storage_admin.web.page import PageRequest, page
from storage_admin.web.pages.create import form_and_plan, values_of
from storage_admin.web.pages.pools import pool_of

FIELDS = ("source", "name", "format", "member", "sha256")


@require_http_methods(["GET", "HEAD", "POST"])
@page()
def unpack(request: PageRequest, pool_id: int) -> HttpResponseBase:
    return form_and_plan(request, pool_of(request, pool_id), Unpack(), values_of(request, FIELDS))
