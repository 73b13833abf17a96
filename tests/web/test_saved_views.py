"""Saved views: whose they are, what they keep, and what a page opens with."""

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from storage_admin.accounts import saved_views
from storage_admin.accounts.models import Actor, AuditEntry, DefaultView, ForbiddenError, Role, SavedView, User
from tests.factories import UserFactory
from tests.web.conftest import Filled
from tests.web.html import tags_of, text_of
from tests.working import reread

pytestmark = pytest.mark.sql


def actor(role: str, **values: object) -> Actor:
    user: User = UserFactory.create(role=role, **values)
    return user.actor


def links(page: str) -> list[str]:
    """Where the saved views of a page lead, in order."""
    tags = tags_of(page)
    start = next((at for at, (_, found) in enumerate(tags) if found.get("aria-label") == "Saved views"), len(tags))
    found = []
    for tag, attributes in tags[start + 1 :]:
        if tag == "details":
            break
        if tag == "a":
            found.append(attributes["href"] or "")
    return found


def keep(client: Client, **form: str) -> str:
    given = {"page": "images", "name": "mine", "query": "state=ok"} | form
    return client.post("/views/", given, follow=True).content.decode()


def test_a_view_is_saved_and_leads_back_to_the_same_list(viewer: Client, filled: Filled) -> None:
    page = keep(viewer, name="Large raw", query="ordering=-allocated_size&format=raw&page=7&csrf=x&search=")
    assert "“Large raw” is saved." in text_of(page)
    assert links(page) == ["/images/?format=raw&ordering=-allocated_size"]
    current = [found for tag, found in tags_of(page) if found.get("aria-current") == "true"]
    assert [found["href"] for found in current] == ["/images/?format=raw&ordering=-allocated_size"]


@pytest.mark.parametrize(
    ("page", "query", "kept"),
    [
        ("images", "format=raw&page=3&cursor=x&v=abc&next=/&view=all", "format=raw"),
        ("images", "?search=a%26b&format=", "search=a%26b"),
        ("images", "search=1&search=2", "search=2"),
        ("images", "search=%00%20x%20", "search=x"),
        ("images", "%ff=1&search=%C3%A4", "search=%C3%A4"),
        ("jobs", "from=2026-11-01&by=policy&kind=reclaim&state=active&format=raw",
         "by=policy&from=2026-11-01&kind=reclaim&state=active"),
        ("guests", "kind=vm&state=running&ordering=-name&disk=x", "kind=vm&ordering=-name&state=running"),
        ("hosts", "status=ok&kind=ssh&token=x", "kind=ssh&status=ok"),
        ("benchmarks", "pool=3&kind=dd&ids=1", "kind=dd&pool=3"),
        ("images", "", ""),
    ],
)  # fmt: skip
def test_only_what_the_page_knows_is_kept(page: str, query: str, kept: str) -> None:
    cleaned = saved_views.pages()[page].clean(query)
    assert cleaned == kept
    assert saved_views.pages()[page].clean(cleaned) == cleaned


@pytest.mark.parametrize("query", ["search=" + "x" * 2001, "x" * 9000, "search=" + "%C3%A4" * 400])
def test_filters_that_are_too_long_are_not_kept(viewer: Client, query: str) -> None:
    assert "too long" in keep(viewer, query=query)
    assert not SavedView.objects.exists()


@pytest.mark.parametrize("name", ["", "   ", "x" * 101, "a\nb", "a\u202eb"])
def test_a_name_is_short_and_visible(viewer: Client, name: str) -> None:
    assert "needs a name" in keep(viewer, name=name)
    assert not SavedView.objects.exists()


def test_saving_under_the_same_name_takes_the_filters_over(viewer: Client) -> None:
    keep(viewer, query="state=ok")
    assert "were updated" in keep(viewer, query="state=missing")
    assert [view.query for view in SavedView.objects.all()] == ["state=missing"]


def test_somebody_has_a_hundred_views_of_a_page_and_no_more(db: None) -> None:
    who = actor("viewer")
    SavedView.objects.bulk_create(SavedView(user_id=who.user_id, page="jobs", name=f"v{n}") for n in range(100))
    with pytest.raises(ValueError, match="Jobs already has 100 views"):
        saved_views.save(who, "jobs", "one more", "")
    assert saved_views.save(who, "jobs", "v7", "state=failed")[1] is False
    assert saved_views.save(who, "images", "another page", "")[1] is True


def test_views_are_ones_own_until_they_are_shared(browser_of: Callable[[str], Client], filled: Filled) -> None:
    operator, viewer = browser_of("operator"), browser_of("viewer")
    keep(operator, name="night shift", query="in_use=false")
    assert links(viewer.get("/images/").content.decode()) == []
    view = SavedView.objects.get()
    operator.post(f"/views/{view.pk}/", {"name": view.name, "shared": "on"})
    page = viewer.get("/images/").content.decode()
    assert links(page) == ["/images/?in_use=false"]
    assert "by the-operator" in text_of(page)
    operator.post(f"/views/{view.pk}/", {"name": view.name})
    assert links(viewer.get("/images/").content.decode()) == []


def test_a_viewer_shares_nothing_and_is_not_offered_to(viewer: Client) -> None:
    assert viewer.post("/views/", {"page": "images", "name": "x", "query": "", "shared": "on"}).status_code == 403
    assert not SavedView.objects.exists()
    assert 'name="shared"' not in viewer.get("/images/").content.decode()


def test_who_is_limited_to_some_hosts_shares_nothing(db: None) -> None:
    limited = actor("admin", hosts=["local"])
    with pytest.raises(ForbiddenError):
        saved_views.save(limited, "images", "x", "", shared=True)
    assert saved_views.save(limited, "images", "x", "")[1]


def test_anothers_view_is_changed_by_an_admin_alone(browser_of: Callable[[str], Client], filled: Filled) -> None:
    owner = actor("operator")
    view, _ = saved_views.save(owner, "images", "theirs", "state=ok", shared=True)
    operator, admin = browser_of("operator"), browser_of("admin")
    assert operator.post(f"/views/{view.pk}/delete/").status_code == 403
    operator.post(f"/views/{view.pk}/", {"name": "taken over"})
    assert (reread(view).name, view.shared) == ("theirs", True)
    assert "deleted" in text_of(admin.post(f"/views/{view.pk}/delete/", follow=True))
    assert not SavedView.objects.exists()


def test_anothers_own_view_does_not_exist(admin: Client) -> None:
    view, _ = saved_views.save(actor("operator"), "images", "theirs", "state=ok")
    for address in (f"/views/{view.pk}/", f"/views/{view.pk}/delete/"):
        assert admin.post(address, {"name": "x"}).status_code == 404
    assert SavedView.objects.get().name == "theirs"


def test_what_others_see_stands_in_the_audit_trail_and_the_rest_does_not(operator: Client) -> None:
    keep(operator, name="a", query="state=ok")
    view = SavedView.objects.get()
    assert not AuditEntry.objects.filter(target="images: a").exists()
    keep(operator, name="a", query="state=missing", shared="on")
    operator.post(f"/views/{view.pk}/", {"name": "b", "shared": "on"})
    operator.post(f"/views/{view.pk}/delete/")
    told = AuditEntry.objects.filter(what__contains="view").order_by("id")
    assert [(entry.what, entry.target) for entry in told] == [
        ("view shared", "images: a"),
        ("shared view changed", "images: b"),
        ("shared view deleted", "images: b"),
    ]
    assert (told[0].before or {})["query"] == "state=ok"
    assert (told[0].after or {})["query"] == "state=missing"


def test_a_page_opens_with_the_chosen_view_and_the_whole_list_stays_one_click_away(
    viewer: Client, filled: Filled
) -> None:
    keep(viewer, name="running", query="in_use=true", default="on")
    assert viewer.get("/images/")["Location"] == "/images/?in_use=true"
    whole = viewer.get("/images/?view=all")
    assert whole.status_code == 200
    assert "Ignored invalid" not in whole.content.decode()
    assert viewer.get("/images/?search=vm").status_code == 200
    assert viewer.get("/images/", headers={"HX-Request": "true"}).status_code == 200
    assert viewer.get("/jobs/").status_code == 200
    view = SavedView.objects.get()
    viewer.post(f"/views/{view.pk}/", {"name": "running"})
    assert viewer.get("/images/").status_code == 200


def test_a_view_without_filters_can_be_what_a_page_opens_with(viewer: Client) -> None:
    keep(viewer, name="all", query="", default="on")
    assert viewer.get("/images/", follow=True).status_code == 200


def test_one_view_of_a_page_opens_first(db: None) -> None:
    who = actor("viewer")
    for name in ("a", "b"):
        saved_views.save(who, "images", name, f"search={name}", default=True)
    assert [chosen.view.name for chosen in DefaultView.objects.all()] == ["b"]


def test_a_view_that_is_shared_no_more_opens_for_nobody_else(db: None) -> None:
    owner, other = actor("operator"), actor("viewer")
    view, _ = saved_views.save(owner, "images", "a", "state=ok", shared=True, default=True)
    saved_views.set_default(other, view, on=True)
    saved_views.change(owner, view, shared=False)
    offered: list[Any] = [saved_views.with_defaults(who, saved_views.views_for(who)) for who in (owner, other)]
    assert [[one for one in views if one.opens_first] for views in offered] == [[view], []]


def test_a_demoted_operators_view_can_be_taken_back_by_them(browser_of: Callable[[str], Client]) -> None:
    operator = browser_of("operator")
    keep(operator, name="a", shared="on")
    User.objects.update(role=Role.VIEWER.label)
    view = SavedView.objects.get()
    operator.post(f"/views/{view.pk}/", {"name": "a"})
    assert not reread(view).shared


@pytest.mark.parametrize("next_page", ["//example.org/", "https://example.org/", "nothing", "users"])
def test_saving_leads_nowhere_else(viewer: Client, next_page: str) -> None:
    answer = viewer.post("/views/", {"page": next_page, "name": "x", "query": "https://example.org/"})
    assert answer["Location"] == "/"


def test_hostile_names_stay_text(operator: Client, filled: Filled) -> None:
    page = keep(operator, name='"><img src=x onerror=alert(1)>', query='search="><script>', shared="on")
    assert not [tag for tag, found in tags_of(page) if tag == "img" or found.get("onerror")]
    assert links(page) == ["/images/?search=%22%3E%3Cscript%3E"]
