"""The job that has an image now, on every page that shows the image."""

from typing import Any

from django import template
from django.template.context import RequestContext
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _

from storage_admin.accounts.authentication import actor_of
from storage_admin.hosts.selectors import in_scope
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job, ResourceLock
from storage_admin.web.sidebar import active_ids

register = template.Library()
#: Where a request keeps the jobs of its page.
_KEPT = "_jobs_on_images"


def job_of(request: Any, image_id: int) -> Job | None:
    """The active job that needs an image, for itself before one that only reads it; asked once for all of a page."""
    if not hasattr(request, _KEPT):
        active = in_scope(Job.objects.filter(state__in=Job.ACTIVE), actor_of(request))
        locks = ResourceLock.objects.filter(job__in=active, key__startswith="image:").select_related("job")
        locks = locks.order_by("exclusive", "-job").defer("job__plan", "job__commands", "job__result")
        setattr(
            request, _KEPT, {lock.key: lock.job for lock in locks} if active_ids(request, actor_of(request)) else {}
        )
    found: dict[str, Job] = getattr(request, _KEPT)
    return found.get(f"image:{image_id}")


@register.simple_tag(takes_context=True)
def job_on(context: RequestContext, image_id: int) -> Job | None:
    """As :func:`job_of`."""
    return job_of(context["request"], image_id)


@register.simple_tag(takes_context=True)
def busy(context: RequestContext, image_id: int) -> str:
    """As :func:`link_to`."""
    return link_to(job_of(context["request"], image_id))


@register.simple_tag
def link_to(job: Job | None) -> str:
    """A link to the job that needs an image, with how far it is; nothing where none does."""
    if job is None:
        return ""
    far = f"{job.progress:.0f} %" if job.state == Job.State.RUNNING else _("queued")
    said = _("job {number}: {kind}, {progress}").format(
        number=job.pk, kind=kinds.get(job.kind).title.lower(), progress=far
    )
    return format_html(' <a class="chip info" href="{}">{}</a>', reverse("job", args=[job.pk]), said)
