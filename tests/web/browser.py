"""Tabs of a headless Chromium on the live server, what they complain about, and what axe finds in them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, sync_playwright
from pytest_django.live_server_helper import LiveServer

from tests.e2e.browser import is_error
from tests.working import client_as

AXE = Path(settings.BASE_DIR) / "node_modules/axe-core/axe.min.js"
#: Each violation as its rule and the first element that breaks it.
RUN_AXE = """axe.run(document, {resultTypes: ["violations"]}).then(
    (found) => found.violations.map((rule) => `${rule.id}: ${rule.nodes[0].html.slice(0, 200)}`))"""
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
#: Of every user that a factory makes.
PASSWORD = "correct horse battery staple"


@pytest.fixture
def chromium(live_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Browser]:
    """Headless Chromium, gone with all its tabs before the database is emptied."""
    # Playwright keeps an event loop in this thread, beside which Django would refuse its database.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def said() -> list[str]:
    """What tabs write to the console, throw, or ask in a dialog; at the end of a test nothing may be left in it."""
    return []


@pytest.fixture
def stranger(chromium: Browser, live_server: LiveServer, said: list[str]) -> Iterator[Callable[..., Page]]:
    """``stranger(color_scheme="dark")``: a tab in which nobody has signed in."""

    def dismiss(dialog: Dialog) -> None:
        said.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def hear(message: ConsoleMessage) -> None:
        if message.type == "warning" or is_error(message):
            said.append(message.text)

    def opened(**options: Any) -> Page:
        wide: dict[str, Any] = {"viewport": {"width": 1440, "height": 1000}, "base_url": live_server.url}
        page = chromium.new_context(**wide | options).new_page()
        page.on("console", hear)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", dismiss)
        return page

    yield opened
    assert said == []


@pytest.fixture
def admins_page(stranger: Callable[..., Page], live_server: LiveServer) -> Callable[..., Page]:
    """``admins_page(color_scheme="dark")``: a tab of an admin."""

    def opened(**options: Any) -> Page:
        page = stranger(**options)
        session = client_as(role="admin").cookies["sessionid"].value
        page.context.add_cookies([{"name": "sessionid", "value": session, "url": live_server.url, "httpOnly": True}])
        return page

    return opened


@pytest.fixture
def page(admins_page: Callable[..., Page]) -> Page:
    return admins_page()


def log_in(page: Page, user: str, password: str = PASSWORD) -> None:
    """Fills in the form of the page that asks who somebody is."""
    page.get_by_label("User name").fill(user)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()


def axe(page: Page) -> list[str]:
    """What axe finds on a page as it is, each as its rule and its first element."""
    page.evaluate(AXE.read_text())
    found: list[str] = page.evaluate(RUN_AXE)
    return found
