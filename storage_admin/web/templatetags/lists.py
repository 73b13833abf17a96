"""What stands above each list: its saved views, and the list as CSV; and what a disk says that is no known image."""

from typing import Any
from urllib.parse import urlencode

from django import template
from django.core.paginator import Page
from django.http import HttpRequest
from django.template.context import RequestContext
from django.template.defaulttags import querystring
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from images.selectors.guests import why_no_image
from storage_admin.accounts import saved_views
from storage_admin.accounts.authentication import actor_of
from storage_admin.accounts.models import Actor
from storage_admin.hosts.live_facts import as_text
from storage_admin.web.templatetags.parts import as_attributes, head
from storage_admin.words import exact

register = template.Library()
register.filter("why_no_image", why_no_image)
#: Where a request keeps the saved views of its list.
_KEPT = "_saved_views"
#: Which way a column is sorted.
ARROWS = {"ascending": "↑", "descending": "↓"}


@register.inclusion_tag("fragments/views.html", takes_context=True)
def list_tools(context: RequestContext, page_name: str, *csv: str, **named_csv: str) -> dict[str, Any]:
    """The views of a list, the form that saves another, and links to the list as CSV.

    ``{% list_tools "jobs" "jobs_csv" %}``; of several files each has its word:
    ``{% list_tools "hosts" hosts_csv=_("Hosts") pools_csv=_("Pools") %}``.

    Args:
        page_name: of the page's URL, one of ``settings.LIST_PAGES``.
        csv, named_csv: names of URLs that take the same query string.
    """
    request: HttpRequest = context["request"]
    page = saved_views.pages()[page_name]
    actor = actor_of(request)
    now = _cleaned(page, request)
    shown = [_shown(actor, view, now) for view in views_on(request, actor, page_name)]
    return {
        "request": request,
        "csrf_token": context.get("csrf_token"),
        "page": page,
        "address": reverse(page_name),
        "query": now,
        "views": sorted(shown, key=lambda one: (not one["mine"], one["view"].name.lower())),
        "may_share": saved_views.may_share(actor),
        "files": [
            *((reverse(name), "CSV", now) for name in csv),
            *((reverse(name), _("{what} CSV").format(what=what), now) for name, what in named_csv.items()),
        ],
    }


def views_on(request: HttpRequest, actor: Actor, page_name: str) -> list[Any]:
    """The saved views of a list, each with ``opens_first``; asked once for a request."""
    if not hasattr(request, _KEPT):
        views = saved_views.views_for(actor).filter(page=page_name)
        setattr(request, _KEPT, list(saved_views.with_defaults(actor, views)))
    found: list[Any] = getattr(request, _KEPT)
    return found


def _cleaned(page: saved_views.ListPage, request: HttpRequest) -> str:
    try:
        return page.clean(request.META.get("QUERY_STRING", ""))
    except ValueError:
        return ""


def _shown(actor: Actor, view: Any, now: str) -> dict[str, Any]:
    return {
        "view": view,
        "mine": saved_views.is_own(actor, view),
        "may_change": saved_views.may_change(actor, view),
        "default": view.opens_first,
        "current": view.query == now,
    }


@register.simple_tag(takes_context=True)
def sortable(context: RequestContext, columns: list[dict[str, Any]], within: str = "") -> SafeString:
    """The tops of columns, of which those with an ordering lead to the list in that order.

    Args:
        columns: as ``web.lists.columns`` describes them.
        within: as of :func:`leads_to`.
    """
    return format_html_join("", "{}", ((_top(context, column, within),) for column in columns))


def _top(context: RequestContext, column: dict[str, Any], within: str) -> SafeString:
    word = column["word"]
    if column["ordering"]:
        link = querystring(context, ordering=column["ordering"], page=None, v=None)
        word = format_html("<a{}>{} {}</a>", leads_to(context, link, within), word, ARROWS.get(column["sort"], ""))
    return head(word, "n" if column["numeric"] else "", column["sort"])


@register.simple_tag(takes_context=True)
def leads_to(context: RequestContext, link: str, within: str = "") -> SafeString:
    """The attributes of a link to another part of a list.

    Args:
        link: a query string.
        within: the element in which htmx swaps the list; empty loads the page anew.
    """
    swaps = {"hx_get": f"{context['request'].path}{link}", "hx_target": within, "hx_push_url": "true"} if within else {}
    return as_attributes({"href": link, **swaps})


@register.simple_tag
def rows_shown(page: Page[Any]) -> str:
    """Which rows of a list its page shows, of how many."""
    return some_of(page.start_index(), page.end_index(), page.paginator.count)


@register.simple_tag
def some_of(first: int, last: int, total: int) -> str:
    """As :func:`rows_shown`, by their numbers."""
    said = _("{first}–{last} of {total}")  # noqa: RUF001 (a span of numbers)
    return said.format(first=exact(first), last=exact(last), total=exact(total))


@register.simple_tag
def page_shown(page: Page[Any]) -> str:
    """Which page of a list this is: ``page 2 of 25``."""
    return _("page {page} of {pages}").format(page=exact(page.number), pages=exact(page.paginator.num_pages))


@register.filter
def which_snapshot(snapshot: Any) -> str:
    """The query of a job's page that names a snapshot and its time: a later one of that name is another one."""
    return urlencode({"name": snapshot.name} | ({"created": as_text(snapshot.created)} if snapshot.created else {}))
