"""Signing in and out, changing one's password, being locked out."""

import pytest
from django.test import Client

from storage_admin.accounts.models import AuditEntry
from tests.factories import UserFactory
from tests.web.html import text_of

PASSWORD = "correct horse battery staple"


@pytest.fixture
def anna(db: None) -> str:
    UserFactory.create(username="anna", role="admin")
    return "anna"


def test_signs_in_and_goes_where_it_was_going(anna: str) -> None:
    client = Client()
    asked = client.get("/jobs/")
    answer = client.post(asked["Location"], {"username": anna, "password": PASSWORD, "next": "/jobs/"})
    assert answer["Location"] == "/jobs/"
    assert client.get("/jobs/").status_code == 200


def test_never_goes_to_another_site_after_signing_in(anna: str) -> None:
    answer = Client().post("/login/", {"username": anna, "password": PASSWORD, "next": "https://example.org/"})
    assert answer["Location"] == "/"


def test_a_form_without_its_token_is_refused_with_a_page(anna: str) -> None:
    client = Client(enforce_csrf_checks=True)
    answer = client.post("/login/", {"username": anna, "password": PASSWORD})
    assert answer.status_code == 403
    assert "The form has expired" in text_of(answer)


def test_signing_out_is_a_post(anna: str) -> None:
    client = Client()
    client.post("/login/", {"username": anna, "password": PASSWORD})
    assert client.get("/logout/").status_code == 405
    assert client.post("/logout/")["Location"] == "/login/"
    assert client.get("/").status_code == 302


def test_a_fragment_after_the_session_ended_reloads_its_page(db: None) -> None:
    answer = Client().get("/login/", headers={"HX-Request": "true"})
    assert answer["HX-Refresh"] == "true"


def test_changes_a_password_and_records_that(anna: str) -> None:
    client, elsewhere = Client(), Client()
    for browser in (client, elsewhere):
        browser.post("/login/", {"username": anna, "password": PASSWORD})
    short = {"old_password": PASSWORD, "new_password1": "short", "new_password2": "short"}
    assert "too short" in text_of(client.post("/password/", short))
    wanted = "another long enough one"
    form = {"old_password": PASSWORD, "new_password1": wanted, "new_password2": wanted}
    assert "is changed" in text_of(client.post("/password/", form, follow=True))
    assert client.get("/").status_code == 200
    assert elsewhere.get("/").status_code == 302
    entry = AuditEntry.objects.get(what="password changed")
    assert (entry.who, entry.before, entry.after) == (anna, None, None)
