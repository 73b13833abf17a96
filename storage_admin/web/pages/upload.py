"""Uploading a file into a pool: the file, the plan, and the button that starts it. The browser then sends the bytes."""

from typing import Any

from django.http.response import HttpResponseBase
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from images.kinds.upload import Upload
from storage_admin.errors import InvalidError, of_fields
from storage_admin.web.page import PageRequest, page
from storage_admin.web.pages.create import form_and_plan, values_of
from storage_admin.web.pages.pools import pool_of

FIELDS = ("name", "size", "sha256")


@require_http_methods(["GET", "HEAD", "POST"])
@page()
def upload(request: PageRequest, pool_id: int) -> HttpResponseBase:
    values = values_of(request, FIELDS)
    return form_and_plan(
        request, pool_of(request, pool_id), Upload(), values, lambda: _options(values), _in_the_form
    )  # fmt: skip


def _options(values: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {name: text for name, text in values.items() if text}
    if values["size"].isascii() and values["size"].isdigit():
        options["size"] = int(values["size"][:20])  # more digits are too many, too
    return options


def _in_the_form(invalid: InvalidError) -> InvalidError:
    """The size is no field of the form: it is that of the file that was chosen."""
    if "size" not in invalid.fields:
        return invalid
    wrong = {name: text for name, text in invalid.fields.items() if name != "size"} | {"file": _("Choose a file.")}
    return of_fields(wrong)
