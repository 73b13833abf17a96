"""The page of one job on an image: it shows the plan, and its button starts what that shows."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse

from images.models import Image
from storage_admin.jobs import services
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.plan_and_progress import Plan
from storage_admin.web.forms import Form, status_of
from storage_admin.web.page import PageRequest, looked_plan, shown_as, wants_fragment
from storage_admin.web.pages.image import image_of


def image_job(
    request: PageRequest,
    image: Image,
    kind: JobKind,
    template: str,
    more: Callable[[Image, Plan], dict[str, Any]],
    *,
    given: Callable[[Form], dict[str, Any]],
    planned: dict[str, Any],
) -> HttpResponseBase:
    """The plan; POST starts the job. For htmx it is what a look at the image on its host changes of the plan.

    Args:
        more: what its template needs beside image, kind and plan.
        given: the job's options by the form.
        planned: those that the plan is shown for.
    """
    if request.method == "POST":
        form, key = Form(request), "".join(filter(str.isalnum, request.POST.get("key", "")))[:64]
        options = given(form)
        job = form.save(lambda: services.submit(request.actor, kind.name, image.pk, options, idempotency_key=key))
        if job is not None:
            return redirect("job", job.pk)
    look = request.method != "POST" and wants_fragment(request)
    plan = services.plan(request.actor, kind.name, image.pk, planned, look=look)
    image = image_of(request, image.pk) if look else image
    context = {
        "image": image,
        "kind": kind,
        "address": reverse(kind.name, args=[image.pk]),
        "plan": plan,
        "shown": shown_as(request, plan),
        "key": uuid4().hex,
        **more(image, plan),
    }
    if look:
        return looked_plan(request, template, context)
    return render(request, template, context, status=status_of(request))
