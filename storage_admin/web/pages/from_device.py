"""Importing a block device into a pool: the device, the plan, and the button that starts it."""

from django.http.response import HttpResponseBase
from django.views.decorators.http import require_http_methods

from images.kinds.from_device import FromDevice
from storage_admin.accounts.models import Role
from storage_admin.web.page import PageRequest, page
from storage_admin.web.pages.create import form_and_plan, values_of
from storage_admin.web.pages.pools import pool_of

FIELDS = ("device", "name", "format")


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN)
def from_device(request: PageRequest, pool_id: int) -> HttpResponseBase:
    return form_and_plan(request, pool_of(request, pool_id), FromDevice(), values_of(request, FIELDS))
