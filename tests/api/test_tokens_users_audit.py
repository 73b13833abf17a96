"""Tokens, users and the audit trail over REST."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from storage_admin.accounts.models import AuditEntry, Token
from tests.factories import HostFactory, TokenFactory, UserFactory


def test_a_token_is_made_and_opens_what_its_role_allows(admin: APIClient) -> None:
    HostFactory.create(slug="local")
    expires = (timezone.now() + timedelta(days=1)).isoformat()
    body = {"name": "nightly", "role": "viewer", "hosts": ["local"], "expires": expires}
    response = admin.post("/api/v1/tokens/", body, format="json")
    assert response.status_code == 201
    made = response.json()
    assert (made["name"], made["role"], made["hosts"]) == ("nightly", "viewer", ["local"])
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {made['secret']}")
    assert client.get("/api/v1/hosts/").json()["count"] == 1


def test_a_secret_is_shown_once_and_kept_nowhere(admin: APIClient) -> None:
    secret = admin.post("/api/v1/tokens/", {"name": "n", "role": "viewer"}, format="json").json()["secret"]
    assert secret not in admin.get("/api/v1/tokens/").content.decode()
    assert secret not in str(list(Token.objects.values())) + str(list(AuditEntry.objects.values()))


@pytest.mark.parametrize(
    ("change", "field"),
    [({"name": "taken"}, "name"), ({"name": " "}, "name"), ({"name": "x" * 101}, "name"), ({"role": "root"}, "role"),
     ({"role": None}, "role"), ({"expires": "2001-01-01T00:00:00Z"}, "expires"), ({"expires": "soon"}, "expires"),
     ({"hosts": "local"}, "hosts"), ({"hosts": ["a b"]}, "hosts.0"),
     ({"digest": "x"}, "digest"), ({"name": 5}, "name")],
)  # fmt: skip
def test_a_token_that_makes_no_sense_is_not_made(admin: APIClient, change: dict[str, Any], field: str) -> None:
    TokenFactory.create(name="taken")
    before = Token.objects.count()
    response = admin.post("/api/v1/tokens/", {"name": "new", "role": "viewer"} | change, format="json")
    assert (response.status_code, list(response.json()["fields"])) == (400, [field])
    assert Token.objects.count() == before


def test_a_deleted_token_opens_nothing(admin: APIClient, viewer: APIClient) -> None:
    token = Token.objects.get(role="viewer")
    assert viewer.get("/api/v1/hosts/").status_code == 200
    assert admin.delete(f"/api/v1/tokens/{token.pk}/").status_code == 204
    assert viewer.get("/api/v1/hosts/").status_code == 401
    assert AuditEntry.objects.filter(what="token deleted", target=token.name).exists()


def test_users_are_listed_without_anything_secret(admin: APIClient) -> None:
    user = UserFactory.create(username="ann", role="operator")
    (row,) = admin.get("/api/v1/users/").json()["results"]
    assert (row["id"], row["username"], row["role"]) == (user.pk, "ann", "operator")
    assert "password" not in row


def test_the_audit_trail_is_newest_first_and_cannot_be_changed(admin: APIClient) -> None:
    for name in ("first", "second"):
        admin.post("/api/v1/tokens/", {"name": name, "role": "viewer"}, format="json")
    rows = admin.get("/api/v1/audit/").json()["results"]
    assert [row["target"] for row in rows] == ["second", "first"]
    assert rows[0]["who"].startswith("token ")
    for send in (admin.post, admin.delete, admin.patch):
        assert send("/api/v1/audit/").status_code == 405


def test_last_use_of_a_token_is_noted(viewer: APIClient) -> None:
    viewer.get("/api/v1/hosts/")
    assert Token.objects.get(role="viewer").last_used is not None


def test_a_user_who_was_disabled_is_out(db: None) -> None:
    user = UserFactory.create(role="admin")
    client = APIClient()
    client.force_login(user)
    assert client.get("/api/v1/hosts/").status_code == 200
    user.is_active = False
    user.save()
    assert client.get("/api/v1/hosts/").status_code == 401
