"""In a browser: a user is added, signs in, is out at once; a token is made, works and is gone."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect
from rest_framework.test import APIClient

from storage_admin.accounts.models import User
from tests.factories import HostFactory
from tests.web.browser import axe, log_in

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def test_a_user_is_added_chooses_a_password_and_is_out_when_deactivated(
    page: Page, stranger: Callable[..., Page], said: list[str]
) -> None:
    HostFactory.create(slug="alpha", name="Alpha")
    admin, bob = page, stranger()
    admin.goto("/users/")
    admin.get_by_label("User name").fill("bob")
    admin.get_by_label("Role").select_option("operator")
    admin.get_by_label("Alpha").check()
    admin.get_by_role("button", name="Add user").press("Enter")
    password = admin.locator("#secret").inner_text()
    assert axe(admin) == []
    admin.reload()  # would add bob again
    assert password not in admin.content()

    bob.goto("/")
    log_in(bob, "bob", password)
    bob.wait_for_url("**/password/")
    bob.goto("/images/")
    assert bob.url.endswith("/password/")
    bob.get_by_label("Old password").fill(password)
    bob.get_by_label("New password", exact=True).fill("a much better one")
    bob.get_by_label("New password confirmation").fill("a much better one")
    bob.get_by_role("button", name="Change password").click()
    bob.wait_for_url("/")
    bob.get_by_role("link", name="Your account").click()
    expect(bob.get_by_text("this session")).to_be_visible()

    for scheme in ("light", "dark"):
        admin.emulate_media(color_scheme=scheme)
        admin.goto(f"/users/{User.objects.get(username='bob').pk}/")
        assert axe(admin) == [], scheme
    admin.get_by_text("Deactivate…").press("Enter")
    admin.get_by_role("button", name="Deactivate bob").press("Enter")
    expect(admin.get_by_text("signed out everywhere and can no longer sign in")).to_be_visible()
    bob.goto("/images/")
    assert "/login/" in bob.url
    said[:] = [text for text in said if "400" not in text]


def test_a_token_is_made_works_and_is_refused_when_it_is_deleted(page: Page) -> None:
    HostFactory.create(slug="alpha", name="Alpha")
    HostFactory.create(slug="beta", name="Beta")
    page.goto("/tokens/")
    page.get_by_label("Name (shown in the audit trail)").fill("nightly")
    page.get_by_label("Alpha").check()
    page.get_by_role("button", name="Create token").click()
    secret = page.locator("#secret").inner_text()
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("button", name="Copied").or_(page.get_by_role("button", name="Selected"))).to_be_visible()
    client = APIClient(HTTP_AUTHORIZATION=f"Bearer {secret}")
    assert [host["slug"] for host in client.get("/api/v1/hosts/").json()["results"]] == ["alpha"]
    page.goto("/tokens/")
    assert secret not in page.content()
    page.get_by_text("Delete…").click()
    page.get_by_role("button", name="Delete the token nightly").click()
    expect(page.get_by_text("is deleted. Requests that use it are refused")).to_be_visible()
    assert client.get("/api/v1/hosts/").status_code == 401
