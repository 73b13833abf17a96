"""In a browser with a device of its own: a passkey is added, is the second step, opens alone, and is removed."""

import pytest
from allauth.mfa.models import Authenticator
from playwright.sync_api import Browser, Page, expect
from pytest_django.live_server_helper import LiveServer

from storage_admin.accounts.models import AuditEntry
from tests.factories import UserFactory
from tests.web.test_in_a_browser import axe, chromium, complaints_of

__all__ = ["chromium"]

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PASSWORD = "correct horse battery staple"
DEVICE = {
    "protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True,
    "isUserVerified": True, "automaticPresenceSimulation": True,
}  # fmt: skip


def page_with_device(chromium: Browser) -> Page:
    # Colours that are still on their way to another theme are none to be judged.
    page = chromium.new_context(reduced_motion="reduce").new_page()
    device = page.context.new_cdp_session(page)
    device.send("WebAuthn.enable")
    device.send("WebAuthn.addVirtualAuthenticator", {"options": DEVICE})
    return page


def assert_readable(page: Page) -> None:
    """Axe finds nothing in both themes, and a phone shows it without scrolling sideways."""
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        for width in (420, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (page.url, width)
        assert axe(page) == [], (page.url, scheme)


def give_password(page: Page, live_server: LiveServer) -> None:
    page.goto(f"{live_server.url}/login/")
    page.get_by_label("User name").fill("bob")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()


def test_a_passkey_is_added_asked_for_opens_alone_and_is_removed(chromium: Browser, live_server: LiveServer) -> None:
    UserFactory.create(username="bob", role="operator")
    page = page_with_device(chromium)
    said = complaints_of(page)
    give_password(page, live_server)
    page.wait_for_url(f"{live_server.url}/")
    page.get_by_role("link", name="Your account").click()
    page.get_by_role("link", name="Second factor…").click()
    assert_readable(page)
    page.get_by_role("link", name="Set up an app…").click()
    page.get_by_label("Your password").fill(PASSWORD)
    assert_readable(page)
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_alt_text("QR code with the key below")).to_be_visible()
    assert_readable(page)
    page.get_by_role("link", name="Cancel").click()

    page.get_by_role("link", name="Add a passkey…").click()
    assert_readable(page)
    page.get_by_label("Name").fill("my laptop")
    page.get_by_label("Sign in with it alone, without a password").check()
    page.get_by_role("button", name="Add passkey").click()
    expect(page.get_by_role("heading", name="Recovery codes")).to_be_visible()
    assert_readable(page)
    page.get_by_role("link", name="Second factor").click()
    expect(page.get_by_text("signs in without a password")).to_be_visible()
    assert_readable(page)

    page.get_by_role("button", name="Sign out").click()
    give_password(page, live_server)
    page.wait_for_url("**/login/second-step/")
    assert_readable(page)
    page.get_by_role("button", name="Use a passkey").click()
    page.wait_for_url(f"{live_server.url}/")

    page.get_by_role("button", name="Sign out").click()
    assert_readable(page)
    page.get_by_role("button", name="Use a passkey").click()
    page.wait_for_url(f"{live_server.url}/")
    ways = [(entry.after or {})["with"] for entry in AuditEntry.objects.filter(what="signed in").order_by("id")]
    assert ways == [["password"], ["password", "passkey"], ["passkey"]]

    page.goto(f"{live_server.url}/account/second-factor/")
    page.get_by_role("link", name="Remove the passkey my laptop").click()
    page.get_by_label("Your password").fill(PASSWORD)
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="Remove passkey").click()
    expect(page.get_by_text("The passkey was removed.")).to_be_visible()
    assert not Authenticator.objects.exists()
    assert said == []
    page.context.close()


def test_a_device_that_knows_no_passkey_is_told_so_and_opens_nothing(
    chromium: Browser, live_server: LiveServer
) -> None:
    page = page_with_device(chromium)
    page.goto(f"{live_server.url}/login/")
    page.get_by_role("button", name="Use a passkey").click()
    expect(page.get_by_text("Your device did not confirm")).to_be_visible(timeout=90_000)
    page.goto(f"{live_server.url}/jobs/")
    assert "/login/" in page.url
    page.context.close()
