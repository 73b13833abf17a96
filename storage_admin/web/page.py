"""What every page does the same way: who may see it, what a refusal looks like, fragments that swap only on change."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlencode

from django.contrib import messages
from django.core.paginator import Page, Paginator
from django.http import Http404, HttpRequest, HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils.cache import patch_vary_headers
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django_htmx.middleware import HtmxDetails

from storage_admin.accounts import refusals
from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.models import Actor, ForbiddenError, Role
from storage_admin.agent.protocol import RefusedError
from storage_admin.errors import InvalidError, NotFoundError
from storage_admin.jobs.plan_and_progress import Plan
from storage_admin.web.forms import refusal_message
from storage_admin.web.lists import opened_with
from storage_admin.web.templatetags.busy import job_of

#: Said where Confirm came for a plan that the page had not shown: of other values, or of facts that have changed.
NOT_PLANNED = gettext_noop("This plan was not shown before. Nothing was started. Review the plan, then confirm it.")

CSRF_VALUE = re.compile(r'name="csrfmiddlewaretoken" value="[^"]*"')

P = ParamSpec("P")
T = TypeVar("T")


class NotShownError(Exception):
    """Confirm came for a plan that the page had not shown: the next page shows it, and says so."""


class PageRequest(HttpRequest):
    """A request of somebody who is signed in."""

    htmx: HtmxDetails
    actor: Actor


View = Callable[Concatenate[PageRequest, P], HttpResponseBase]
Guarded = Callable[Concatenate[HttpRequest, P], HttpResponseBase]


def page(role: Role = Role.VIEWER, *, everywhere: bool = False) -> Callable[[View[P]], Guarded[P]]:
    """Makes a view that people of that role or a higher one may open; the others read why not.

    What services refuse to show or do becomes the page that says so, and stands in the audit trail. The view finds who
    asks in ``request.actor``.

    Args:
        everywhere: it concerns every host, and is not for those who are limited to some.
    """

    def decorate(view: View[P]) -> Guarded[P]:
        @wraps(view)
        def guarded(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponseBase:
            try:
                request.actor = actor_of(request)  # type: ignore[attr-defined]
                actor = request.actor  # type: ignore[attr-defined]
                (actor.require_everywhere if everywhere else actor.require)(role)
                _without_nul(request)
                answer = opened_with(request, actor) or view(request, *args, **kwargs)  # type: ignore[arg-type]
            except ForbiddenError as error:
                refusals.forbidden(request, request.actor, str(error))  # type: ignore[attr-defined]
                return render(request, "403.html", {"sentence": str(error)}, status=403)
            except InvalidError as error:
                return render(request, "400.html", {"sentence": error.detail}, status=400)
            except NotFoundError as error:
                raise Http404(error.detail) from error
            # One address has a page and a fragment: the browser must not show one for the other when it goes back.
            patch_vary_headers(answer, ["HX-Request"])
            return answer

        return guarded

    return decorate


def _without_nul(request: HttpRequest) -> None:
    """PostgreSQL takes no NUL: nothing of a form is stored that has one, and an address is read without them.

    Raises:
        InvalidError: a form has one.
    """
    if any("\0" in text for name, texts in request.POST.lists() for text in (name, *texts)):
        raise InvalidError(_("The form contains a NUL character, which is not valid text. Nothing was changed."))
    if "%00" in request.META.get("QUERY_STRING", ""):
        request.GET = QueryDict(request.META["QUERY_STRING"].replace("%00", ""))


def wants_fragment(request: PageRequest) -> bool:
    """Whether htmx asks for a part of the page; when it goes back in history it wants the whole of it."""
    return bool(request.htmx) and not request.htmx.history_restore_request


def attempt(request: HttpRequest, work: Callable[[], T], done: str = "") -> T | None:
    """Does something that may be refused, and tells on the next page how it went.

    Args:
        done: the sentence for success; empty says nothing.

    Returns:
        What ``work`` returned, ``None`` where it was refused.

    Raises:
        ForbiddenError, NotFoundError: they have pages of their own.
    """
    try:
        result = work()
    except RefusedError as error:
        messages.error(request, refusal_message(error))
        return None
    except InvalidError as error:
        messages.error(request, _("{detail} Nothing was changed.").format(detail=error.detail))
        return None
    if done:
        messages.success(request, done)
    return result


def plan_digest(*planned: object) -> str:
    """A digest of what a plan was made for; Confirm sends it back as ``planned``."""
    return hashlib.sha256(json.dumps(planned, sort_keys=True, default=str).encode()).hexdigest()[:16]


def was_planned(request: HttpRequest, *sent: object) -> bool:
    """Whether the page had shown the plan of just what the form sent; where it had not, the next page says so."""
    if request.POST.get("planned") == plan_digest(*sent):
        return True
    messages.warning(request, _(NOT_PLANNED))
    return False


def live(
    request: PageRequest, template: str, context: dict[str, Any], *, url: str, every: str = "", beside: str = ""
) -> HttpResponse:
    """A fragment that asks for itself again, and answers 204 as long as it looks the same: nothing moves for nothing.

    Args:
        url: where the fragment comes from.
        every: how often it asks, such as ``1s``; empty ends it.
        beside: template of what is swapped elsewhere on the page together with it.
    """
    body, version = live_body(request, template, context)
    if every and request.GET.get("v") == version:
        return HttpResponse(status=204)
    parts = live_context(body, version, url=url, every=every)
    if beside:
        parts["live_beside"] = render_to_string(beside, context, request=request)
    return render(request, "fragments/live.html", parts)


def live_body(request: HttpRequest, template: str, context: dict[str, Any]) -> tuple[str, str]:
    """A fragment and a digest of what it says; the tokens of its forms are new each time and do not count."""
    body = render_to_string(template, context, request=request)
    said = CSRF_VALUE.sub("", body)
    return body, hashlib.sha256(said.encode()).hexdigest()[:16]


def live_context(body: str, version: str, *, url: str, every: str) -> dict[str, Any]:
    """What ``fragments/live.html`` needs."""
    joint = "&" if "?" in url else "?"
    return {"live_body": body, "live_url": f"{url}{joint}{urlencode({'v': version})}", "live_every": every}


def shown_as(request: HttpRequest, plan: Plan | None) -> str:
    """A digest of what a page shows of a plan but its age; a look sends it back as ``shown``."""
    if plan is None:
        return ""
    jobs = [job.pk if (job := job_of(request, one.id)) else None for one in plan.affected_images]
    return plan_digest(replace(plan, facts_at=None).as_json(), jobs)


def looked_plan(request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
    """A plan after a look: the template's part ``plan``; where the page already shows it, the age of its facts alone,
    which takes nothing away from whoever is confirming the plan. With either comes ``chip``: the image's job.

    Args:
        context: with the new ``plan``, and as ``shown`` what a page shows of it.
    """
    same = bool(context["shown"]) and request.GET.get("shown") == context["shown"]
    first = "fragments/facts_age.html" if same else f"{template}#plan"
    parts = [(first, {"beside": same}), (f"{template}#chip", {"looked": True})]
    answer = HttpResponse("".join(render_to_string(name, context | more, request) for name, more in parts))
    if same:
        answer["HX-Reswap"] = "none"
    return answer


def paginated(request: HttpRequest, rows: Any, per_page: int) -> Page[Any]:
    """The page that the address bar asks for; the nearest one where it asks for nonsense."""
    return Paginator(rows, per_page).get_page(request.GET.get("page"))


def local(where: str, otherwise: str) -> str:
    """An address of the dashboard that a form names as where to go next; ``otherwise`` where it is none."""
    is_path = where.startswith("/") and where.isprintable()
    return where if is_path and url_has_allowed_host_and_scheme(where, allowed_hosts=None) else otherwise
