"""In a browser with a device of its own: a passkey is added, is the second step, opens alone, and is removed."""

from collections.abc import Callable

import pytest
from allauth.mfa.models import Authenticator
from playwright.sync_api import Page, expect

from storage_admin.accounts.models import AuditEntry
from tests.factories import UserFactory
from tests.web.browser import PASSWORD, axe, log_in

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

DEVICE = {
    "protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True,
    "isUserVerified": True, "automaticPresenceSimulation": True,
}  # fmt: skip


@pytest.fixture
def page(stranger: Callable[..., Page]) -> Page:
    # Colours that are still on their way to another theme are none to be judged.
    page = stranger(reduced_motion="reduce")
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


def test_a_passkey_is_added_asked_for_opens_alone_and_is_removed(page: Page) -> None:
    UserFactory.create(username="bob", role="operator")
    page.goto("/login/")
    log_in(page, "bob")
    page.wait_for_url("/")
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
    page.goto("/login/")
    log_in(page, "bob")
    page.wait_for_url("**/login/second-step/")
    assert_readable(page)
    page.get_by_role("button", name="Use a passkey").click()
    page.wait_for_url("/")

    page.get_by_role("button", name="Sign out").click()
    assert_readable(page)
    page.get_by_role("button", name="Use a passkey").click()
    page.wait_for_url("/")
    ways = [(entry.after or {})["with"] for entry in AuditEntry.objects.filter(what="signed in").order_by("id")]
    assert ways == [["password"], ["password", "passkey"], ["passkey"]]

    page.goto("/account/second-factor/")
    page.get_by_role("link", name="Remove the passkey my laptop").click()
    page.get_by_label("Your password").fill(PASSWORD)
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="Remove passkey").click()
    expect(page.get_by_text("The passkey was removed.")).to_be_visible()
    assert not Authenticator.objects.exists()


def test_a_device_that_knows_no_passkey_is_told_so_and_opens_nothing(page: Page) -> None:
    page.goto("/login/")
    page.get_by_role("button", name="Use a passkey").click()
    expect(page.get_by_text("Your device did not confirm")).to_be_visible(timeout=90_000)
    page.goto("/jobs/")
    assert "/login/" in page.url
