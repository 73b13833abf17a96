"""Images that nobody needs: the list with its evidence, what is set aside, and the steps from the one to the other."""

from typing import Any

from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_http_methods, require_safe

from images.filters import OrphanFilters
from images.models import Image
from images.orphans import selectors
from images.orphans.refusals import changed_at
from images.orphans.rows import GRACE_DAYS
from images.selectors.chains import whole
from storage_admin.accounts.models import Role
from storage_admin.accounts.saved_views import list_page
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.hosts.selectors import hosts_for, pool_names
from storage_admin.jobs import kinds
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.plan_and_progress import Plan
from storage_admin.web.forms import Form, typed
from storage_admin.web.lists import Filtered, as_choices, filtered
from storage_admin.web.page import PageRequest, page, paginated
from storage_admin.web.pages.image import image_of
from storage_admin.web.pages.image_job import image_job

PER_PAGE = 50
PAGE = list_page("orphans", gettext_noop("Orphans"), {*OrphanFilters.base_filters, "everywhere"})
#: How long an image was not changed, in days, and the word for it.
AGES = (
    ("1", _("for a day")),
    ("7", _("for a week")),
    ("30", _("for 30 days")),
    ("90", _("for 90 days")),
    ("365", _("for a year")),
)


def _listed(request: PageRequest) -> Filtered[Image]:
    everywhere = request.GET.get("everywhere") == "true"
    return filtered(request, OrphanFilters, selectors.orphans_for(request.actor, everywhere=everywhere))


CSV_COLUMNS: Columns = {
    "id": "id",
    "name": "name",
    "host": "host.name",
    "pool": "pool.name",
    "path": "path",
    "format": "declared_format",
    "virtual_size": "virtual_size",
    "allocated_size": "allocated_size",
    "last_changed": changed_at,
    "evidence": lambda image: " ".join(selectors.evidence(image)),
}


@require_safe
@page()
def orphans_csv(request: PageRequest) -> HttpResponseBase:
    """The whole list as it is filtered."""
    return csv_answer("orphans", CSV_COLUMNS, _listed(request).exact())


@require_safe
@page()
def orphans(request: PageRequest) -> HttpResponseBase:
    """Every orphan with its evidence, what is set aside, and what is not known."""
    everywhere = request.GET.get("everywhere") == "true"
    listed = _listed(request)
    rows, values = listed.rows, listed.values
    page_of = paginated(request, rows, PER_PAGE)
    aside, now, unknown = list(selectors.aside_for(request.actor)), timezone.now(), selectors.unknown_for(request.actor)
    found = selectors.summed(rows)
    hidden = selectors.summed(selectors.orphans_for(request.actor, everywhere=True)).count if not everywhere else 0
    pools = pool_names(request.actor)
    context = {
        "section": "orphans",
        "page_of": page_of,
        "rows": [
            {"image": image, "evidence": selectors.evidence(image), "changed": changed_at(image)} for image in page_of
        ],
        "found": found,
        "aside": [
            {"image": image, "due": image.aside_until is not None and image.aside_until <= now} for image in aside
        ],
        "aside_bytes": whole([image.allocated_size for image in aside]),
        "unknown": unknown,
        "unknown_count": sum(one.count for one in unknown),
        "elsewhere": max(hidden - selectors.summed(selectors.orphans_for(request.actor)).count, 0),
        "everywhere": everywhere,
        "ignored": listed.ignored,
        "hosts": as_choices(hosts_for(request.actor).values_list("pk", "name"), values.get("host", "")),
        "pools": as_choices(pools, values.get("pool", "")),
        "ages": as_choices(AGES, values.get("age", "")),
    }
    return render(request, "orphans/orphans.html", context)


def _options(form: Form, kind: JobKind) -> dict[str, Any]:
    if "grace_days" in kind.properties:
        days = form.whole("grace_days")
        return {} if days is None else {"grace_days": days}
    return {"confirm_name": form.text("confirm_name")} if "confirm_name" in kind.properties else {}


@require_http_methods(["GET", "HEAD", "POST"])
@page(Role.ADMIN)
def aside(request: PageRequest, image_id: int, kind_name: str) -> HttpResponseBase:
    """The steps that set an image aside, restore or delete it."""
    kind = kinds.get(kind_name)

    def more(image: Image, plan: Plan) -> dict[str, Any]:  # noqa: ARG001 (as of every such page)
        form = typed(request, request.path, {"grace_days": GRACE_DAYS, "confirm_name": ""})
        return {"section": "orphans", "evidence": selectors.evidence(image), "form": form}

    image = image_of(request, image_id)
    return image_job(
        request, image, kind, "orphans/job.html", more, given=lambda form: _options(form, kind), planned={}
    )
