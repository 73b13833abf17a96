"""Saved views over REST: of users as on the pages; of tokens, which share them."""

from collections.abc import Callable

import pytest
from rest_framework.test import APIClient

from storage_admin.accounts.models import SavedView
from tests.factories import SavedViewFactory, UserFactory

pytestmark = pytest.mark.sql

ADDRESS = "/api/v1/views/"


def client_for(role: str, **values: object) -> APIClient:
    client = APIClient()
    client.force_login(UserFactory.create(role=role, **values), "django.contrib.auth.backends.ModelBackend")
    return client


def test_a_user_keeps_finds_changes_and_deletes_a_view(db: None) -> None:
    client = client_for("viewer")
    made = client.post(ADDRESS, {"page": "jobs", "name": "failed", "query": "state=failed&page=2"}, format="json")
    assert made.status_code == 201
    view = made.json()
    assert (view["query"], view["mine"], view["default"], view["shared"]) == ("state=failed", True, False, False)
    again = client.post(ADDRESS, {"page": "jobs", "name": "failed", "query": "state=failed&kind=scan"}, format="json")
    assert (again.status_code, again.json()["id"], again.json()["query"]) == (200, view["id"], "kind=scan&state=failed")
    one = f"{ADDRESS}{view['id']}/"
    changed = client.patch(one, {"name": "broken", "default": True}, format="json").json()
    assert (changed["name"], changed["default"]) == ("broken", True)
    assert [row["name"] for row in client.get(ADDRESS, {"page": "jobs"}).json()["results"]] == ["broken"]
    assert client.delete(one).status_code == 204
    assert client.get(ADDRESS).json()["count"] == 0


def test_a_token_shares_and_has_none_of_its_own(client_of: Callable[..., APIClient]) -> None:
    operator = client_of("operator")
    own = operator.post(ADDRESS, {"page": "images", "name": "x"}, format="json")
    assert (own.status_code, own.json()["code"]) == (400, "invalid")
    shared = {"page": "images", "name": "x", "query": "orphan=true", "shared": True}
    assert operator.post(ADDRESS, shared, format="json").status_code == 201
    assert operator.post(ADDRESS, shared, format="json").status_code == 200
    found = client_for("viewer").get(ADDRESS).json()["results"]
    assert [(row["name"], row["mine"], row["shared"]) for row in found] == [("x", False, True)]
    assert client_of("operator").post(ADDRESS, shared, format="json").status_code == 403  # another token's
    assert client_of("admin").post(ADDRESS, shared, format="json").status_code == 200
    assert SavedView.objects.count() == 1


def test_lists_show_ones_own_and_shared_ones_alone(db: None) -> None:
    SavedViewFactory.create(name="theirs")
    SavedViewFactory.create(name="for all", shared=True)
    client = client_for("admin")
    assert [row["name"] for row in client.get(ADDRESS).json()["results"]] == ["for all"]
    assert client.get(ADDRESS, {"shared": "false"}).json()["count"] == 0
    assert client.delete(f"{ADDRESS}{SavedView.objects.get(name='theirs').pk}/").status_code == 404


def test_another_ones_shared_view_can_open_ones_page(db: None) -> None:
    view = SavedViewFactory.create(shared=True)
    client = client_for("viewer")
    one = f"{ADDRESS}{view.pk}/"
    assert client.patch(one, {"default": True}, format="json").json()["default"] is True
    assert client.patch(one, {"name": "x"}, format="json").status_code == 403
    assert client.patch(one, {"default": False}, format="json").json()["default"] is False


@pytest.mark.parametrize(
    "body",
    [
        {"page": "nothing", "name": "x"}, {"page": "images"}, {"page": "images", "name": ""},
        {"page": "images", "name": "x" * 101}, {"page": "images", "name": "a\u202eb"},
        {"page": "images", "name": "x", "query": "search=" + "x" * 2000},
        {"page": "images", "name": "x", "shared": "yes"}, {"page": "images", "name": "x", "user": 1},
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_and_nothing_kept(db: None, body: dict[str, object]) -> None:
    answer = client_for("admin").post(ADDRESS, body, format="json")
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid")
    assert not SavedView.objects.exists()
