"""What lists do the same way: filters in the address bar, and the view that a page opens with."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

import django_filters
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponseRedirect
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from storage_admin.accounts import saved_views
from storage_admin.accounts.models import Actor
from storage_admin.errors import InvalidError
from storage_admin.moments import zone_named
from storage_admin.web.templatetags.lists import views_on

M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class Filtered(Generic[M]):
    """A list as it was asked for.

    Args:
        values: each filter that is set, as its text; the form shows it again.
        ignored: filters with values that mean nothing. They are named on the page, as silence would show a wrong list.
    """

    rows: QuerySet[M]
    values: dict[str, str]
    ignored: list[str]

    def exact(self) -> QuerySet[M]:
        """The rows for a file, which has no place to say what was ignored.

        Raises:
            InvalidError: something was.
        """
        if self.ignored:
            raise InvalidError(_("Invalid filters: {ignored}.").format(ignored=", ".join(self.ignored)))
        return self.rows


def filtered(request: HttpRequest, filters: type[django_filters.FilterSet], rows: QuerySet[M]) -> Filtered[M]:
    """The rows that the query string asks for, by the filters of the API; its ``zone`` says what its dates mean, which
    are of UTC without it.
    """
    given = {name: str(text).strip() for name, text in request.GET.items()}
    values = {name: text for name, text in given.items() if text and name in filters.base_filters}
    named = zone_named(given.get("zone") or "UTC")
    with timezone.override(named):
        found = filters(values, rows, request=request)
        ignored = sorted(found.form.errors)
        if ignored:
            understood = {name: text for name, text in values.items() if name not in ignored}
            found = filters(understood, rows, request=request)
        rows, read = found.qs, found.form.cleaned_data
    if named != timezone.get_current_timezone():
        # Sent by somebody elsewhere: it stays the moment that it is, whatever the days of this reader are.
        values |= {name: one.isoformat() for name, one in read.items() if isinstance(one, datetime)}
    if named is None and not saved_views.DATES.isdisjoint(values):
        ignored.append("zone")
    return Filtered(rows=rows, values=values, ignored=ignored)


#: Columns of numbers, by their words.
NUMERIC = frozenset(
    {"Physical", "Virtual", "Reclaimable", "Depth", "Freed", "Duration", "Before", "After", "Predicted", "Held"}
)


def columns(known: tuple[tuple[str | None, str, str], ...], ordering: str) -> list[dict[str, Any]]:
    """The heads of a table.

    Args:
        known: of each column what it is ordered by, its word, and ``-`` where a first click shows the largest first.
        ordering: what the list is ordered by.
    """
    shown = []
    for key, word, first in known:
        down = ordering.startswith("-")
        sorted_by = key is not None and ordering.removeprefix("-") == key
        following = "" if key is None else (key if down else f"-{key}") if sorted_by else f"{first}{key}"
        sort = ("descending" if down else "ascending") if sorted_by else ""
        shown.append({"word": _(word), "ordering": following, "sort": sort, "numeric": word in NUMERIC})
    return shown


def as_choices(pairs: Any, chosen: str) -> list[dict[str, Any]]:
    """Options of a select element."""
    return [{"value": str(value), "word": word, "chosen": str(value) == chosen} for value, word in pairs]


def opened_with(request: HttpRequest, actor: Actor) -> HttpResponseRedirect | None:
    """Leads to the view that a list opens with for this user, where its address says nothing else."""
    name = request.resolver_match.url_name if request.resolver_match else None
    plain = request.method in {"GET", "HEAD"} and not request.META.get("QUERY_STRING")
    if not plain or getattr(request, "htmx", False) or name not in saved_views.pages():
        return None
    view = next((view for view in views_on(request, actor, str(name)) if view.opens_first), None)
    return HttpResponseRedirect(f"{reverse(str(name))}?{view.query or 'view=all'}") if view else None
