"""Signs that no database takes, sent by somebody who is not signed in: they end in an answer, and in a plain entry."""

import pytest
from django.test import Client, RequestFactory
from django.utils import timezone

from storage_admin.accounts import refusals
from storage_admin.accounts.models import Actor, AuditEntry
from tests.factories import UserFactory

pytestmark = pytest.mark.sql


def test_a_nul_in_a_user_name_is_a_failed_sign_in(db: None) -> None:
    answer = Client().post("/login/", {"username": "a\x00b", "password": "x"})
    assert answer.status_code == 200
    assert AuditEntry.objects.get().target == "(no such user)"


def test_the_trail_says_whose_password_was_tried_however_the_name_was_typed(db: None) -> None:
    UserFactory.create(username="bob")
    Client().post("/login/", {"username": "ｂｏｂ", "password": "x"})  # noqa: RUF001 (these letters are the test)
    assert AuditEntry.objects.get().target == "bob"


def test_a_token_that_opens_nothing_is_refused_whatever_the_address(db: None) -> None:
    for path in ("/api/v1/images/%00/", "/api/v1/images/%1b%E2%80%AE/"):
        assert Client().get(path, headers={"Authorization": "Bearer x"}).status_code == 401
    assert AuditEntry.objects.get(what="token refused").target == "/api/v1/images//"


def test_what_is_forbidden_stands_in_the_trail_without_characters_that_nobody_sees(db: None, limited: Actor) -> None:
    request = RequestFactory().get("/api/v1/pools/%00%1b%E2%80%AEx/")
    refusals.forbidden(request, limited, "ann may not see a\x00b.")
    refusals.settle(timezone.now() + refusals.WINDOW)
    entry = AuditEntry.objects.get()
    assert (entry.target, entry.after) == ("GET /api/v1/pools/x/", {"why": "ann may not see ab."})
