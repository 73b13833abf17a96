"""Saved views: a list's filters, search and order under a name.

Each belongs to who saved it; a shared one is offered to everybody who may open the page. What a list knows to filter
by, the list says itself: ``settings.LIST_PAGES`` names a :class:`ListPage` for each.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlencode

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet, Value
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from storage_admin.accounts.models import Actor, DefaultView, ForbiddenError, Role, SavedView, audit

LONGEST_NAME = 100
#: Characters of a query string: what browsers and proxies pass on without a doubt.
LONGEST_QUERY = 2000
#: Filters that mean nothing without a time zone, and without which that means nothing.
DATES = frozenset({"from", "to"})
#: Of one user on one page; shared ones of tokens count together.
MOST = 100


@dataclass(frozen=True)
class ListPage:
    """A list whose filters can be kept.

    Args:
        name: of the page's URL.
        title: of the page.
        keys: of the query string that make the list what it is; what else stands there is not kept.
        role: who may open the page.
        everywhere: it concerns every host, and is not for those who are limited to some.
    """

    name: str
    title: str
    keys: frozenset[str]
    role: Role = Role.VIEWER
    everywhere: bool = False

    def open_to(self, actor: Actor) -> bool:
        """Whether ``actor`` may open the page."""
        return actor.role >= self.role and not (self.everywhere and actor.hosts is not None)

    def clean(self, query: str) -> str:
        """A query string as it is kept: known keys alone, in their order, each once, none of them empty.

        Raises:
            ValueError: it is too long.
        """
        too_long = _("These filters are too long: at most {longest} characters.").format(longest=LONGEST_QUERY)
        if len(query) > 4 * LONGEST_QUERY:
            raise ValueError(too_long)
        given = {key: value.replace("\0", "").strip() for key, value in parse_qsl(query.removeprefix("?"))}
        known = [(key, given[key]) for key in sorted(given) if key in self.keys and given[key]]
        has_dates = any(key in DATES for key, __ in known)
        cleaned = urlencode([(key, value) for key, value in known if key != "zone" or has_dates])
        if len(cleaned) > LONGEST_QUERY:
            raise ValueError(too_long)
        return cleaned


def list_page(
    name: str, title: str, filters: Iterable[str], role: Role = Role.VIEWER, *, everywhere: bool = False
) -> ListPage:
    """A page whose filters have these names, and which can be ordered; dates are of a time zone."""
    keys = frozenset(filters) | {"ordering"}
    return ListPage(name, title, keys | {"zone"} if keys >= DATES else keys, role, everywhere)


@cache
def pages() -> dict[str, ListPage]:
    """Every list, by the name of its URL."""
    found: list[ListPage] = [import_string(path) for path in settings.LIST_PAGES]
    return {page.name: page for page in found}


def views_for(actor: Actor) -> QuerySet[SavedView]:
    """The views that exist for ``actor``: their own and shared ones, of pages that they may open, by name."""
    open_to = [page.name for page in pages().values() if page.open_to(actor)]
    rows = SavedView.objects.filter(Q(shared=True) | _own(actor), page__in=open_to)
    if actor.hosts is not None:
        rows = rows.exclude(pk__in=_of_others(actor, rows))
    return rows.order_by("page", "name", "id")


def _of_others(actor: Actor, rows: QuerySet[SavedView]) -> list[int]:
    """Ids of those that somebody else shares, and whose filters name what does not exist for the actor."""
    named = {
        view.pk: {(key, value) for key, value in parse_qsl(view.query) if key in settings.NAMED_BY_FILTERS}
        for view in rows
        if not is_own(actor, view)
    }
    asked = set().union(*named.values())
    seen = {
        (key, value)
        for key in settings.NAMED_BY_FILTERS
        for value in _seen(actor, key, {value for one, value in asked if one == key})
    }
    return [pk for pk, pairs in named.items() if pairs - seen]


def _seen(actor: Actor, key: str, values: set[str]) -> set[str]:
    """Of the values of a filter those that name what exists for the actor."""
    rows_for, *columns = settings.NAMED_BY_FILTERS[key]
    found: set[str] = set()
    for column in columns if values else ():
        # No column of ids takes a longer number.
        ids = {value for value in values if value.isascii() and value.isdigit() and len(value) < 19}
        wanted = ids if column == "pk" else values
        rows = import_string(rows_for)(actor).filter(**{f"{column}__in": wanted})
        found |= {str(value) for value in rows.values_list(column, flat=True)}
    return found


def with_defaults(actor: Actor, views: QuerySet[SavedView]) -> QuerySet[SavedView]:
    """The same, each with ``opens_first``: whether its page opens with it for the actor."""
    chosen = DefaultView.objects.filter(view=OuterRef("pk"), user=actor.user_id)
    return views.annotate(opens_first=Value(False) if actor.user_id is None else Exists(chosen))


def _own(actor: Actor) -> Q:
    return Q(pk__in=[]) if actor.user_id is None else Q(user=actor.user_id)


def is_own(actor: Actor, view: SavedView) -> bool:
    """Whether it is the actor's; what a token has shared belongs to tokens of the same name."""
    return view.by == actor.name if view.user_id is None else view.user_id == actor.user_id


def may_change(actor: Actor, view: SavedView) -> bool:
    """Whether ``actor`` may rename, share or delete it: its owner, or an admin who is limited to no host."""
    return is_own(actor, view) or (view.shared and actor.role >= Role.ADMIN and actor.hosts is None)


def may_share(actor: Actor) -> bool:
    """Whether ``actor`` may offer a view to everybody."""
    return actor.role >= Role.OPERATOR and actor.hosts is None


def save(
    actor: Actor, page_name: str, name: str, query: str, *, shared: bool = False, default: bool = False
) -> tuple[SavedView, bool]:
    """Keeps a list's filters under a name; one's own view of that name on that page takes them over.

    Args:
        query: the list's query string; what the page does not know is left out.
        shared: offered to everybody who may open the page.
        default: what the page opens with, for this user.

    Returns:
        The view, and whether it is new.

    Raises:
        ForbiddenError: the page is not for the actor, or sharing is not.
        ValueError: there is no such page, the name cannot be one, or there are too many.
    """
    page = _page(actor, page_name)
    values = {"query": page.clean(query), "shared": shared}
    name = _named(name)
    if actor.user_id is None and (default or not shared):
        raise ValueError(
            _(
                "A token can only save shared views, and cannot have a default view. Share the view, or save it as a "
                "user."
            )
        )
    if shared:
        actor.require_everywhere(Role.OPERATOR)
    with transaction.atomic():
        there = SavedView.objects.filter(user=actor.user_id, page=page.name)
        old = there.filter(name=name).first()
        if old is None and there.count() >= MOST:
            told = _("{title} already has {most} views. Delete one, or use its name to replace it.")
            raise ValueError(told.format(most=MOST, title=_(page.title)))
        if old is not None:
            _require_change(actor, old)
        before = _facts(old) if old else None
        created = {"by": actor.name, **values}
        own: dict[str, Any] = {"user_id": actor.user_id, "page": page.name, "name": name}
        view, new = SavedView.objects.update_or_create(**own, defaults=values, create_defaults=created)
        _ended_sharing(view, before)
        _audit(actor, view, before)
        if default:
            set_default(actor, view, on=True)
    return view, new


def change(
    actor: Actor, view: SavedView, *, name: str | None = None, query: str | None = None, shared: bool | None = None
) -> SavedView:
    """Renames a view, shares it or ends that, or gives it other filters; what is ``None`` stays as it is.

    Raises:
        ForbiddenError: it is another's, or sharing is not for the actor: what everybody is offered does not change
            then, though its sharing may end.
        ValueError: the name cannot be one, or the actor has another view of that name there.
    """
    _require_change(actor, view)
    if view.user_id is None and shared is False:
        raise ValueError(_("This view was created by a token and has no owner. Delete it if it is no longer needed."))
    before = _facts(view)
    if name is not None:
        view.name = _named(name)
    if query is not None:
        view.query = _page(actor, view.page).clean(query)
    if shared is not None:
        view.shared = shared
    if view.shared and _facts(view) != before:
        actor.require_everywhere(Role.OPERATOR)
    with transaction.atomic():
        same = SavedView.objects.filter(user=view.user_id, page=view.page, name=view.name).exclude(pk=view.pk)
        if same.exists():
            told = _("A view named {view} already exists. Delete it first, or choose another name.")
            raise ValueError(told.format(view=view.name))
        view.save(update_fields=["name", "query", "shared"])
        _ended_sharing(view, before)
        _audit(actor, view, before)
    return view


def delete(actor: Actor, view: SavedView) -> None:
    """Takes a view away; whoever's page opened with it sees the whole list from then on.

    Raises:
        ForbiddenError: it is another's.
    """
    _require_change(actor, view)
    with transaction.atomic():
        if view.shared:
            audit(actor, "shared view deleted", view, before=_facts(view))
        view.delete()


def set_default(actor: Actor, view: SavedView, *, on: bool) -> None:
    """Has the page open with this view for the actor, or not any more.

    Raises:
        ValueError: the actor is a token, for which no page opens.
    """
    if actor.user_id is None:
        raise ValueError(_("A token cannot have a default view. Only a user can choose one."))
    chosen = DefaultView.objects.filter(user=actor.user_id, page=view.page)
    if on:
        DefaultView.objects.update_or_create(user_id=actor.user_id, page=view.page, defaults={"view": view})
    else:
        chosen.filter(view=view).delete()


def _page(actor: Actor, name: str) -> ListPage:
    page = pages().get(name)
    if page is None:
        told = _("There is no list {name!r}. Available lists: {pages}.")
        raise ValueError(told.format(name=name[:40], pages=", ".join(sorted(pages()))))
    (actor.require_everywhere if page.everywhere else actor.require)(page.role)
    return page


def _named(name: str) -> str:
    name = name.strip()
    if not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
        raise ValueError(_("A view needs a name of 1 to {longest} visible characters.").format(longest=LONGEST_NAME))
    return name


def _require_change(actor: Actor, view: SavedView) -> None:
    if not may_change(actor, view):
        told = _("The view {view} belongs to another user. Only that user or an admin of all hosts can change it.")
        raise ForbiddenError(told.format(view=view.name))


def _ended_sharing(view: SavedView, before: dict[str, object] | None) -> None:
    """Nobody else's page opens with a view that is not theirs to see any more."""
    if before and before["shared"] and not view.shared:
        DefaultView.objects.filter(view=view).exclude(user=view.user_id).delete()


def _facts(view: SavedView) -> dict[str, object]:
    return {"name": view.name, "query": view.query, "shared": view.shared}


def _audit(actor: Actor, view: SavedView, before: dict[str, object] | None) -> None:
    """What others see is recorded; what somebody keeps for themselves is their own business."""
    after = _facts(view)
    if after == before or not (view.shared or (before and before["shared"])):
        return
    was = bool(before and before["shared"])
    what = "view shared" if not was else "shared view changed" if view.shared else "view not shared any more"
    audit(actor, what, view, before=before, after=after)
