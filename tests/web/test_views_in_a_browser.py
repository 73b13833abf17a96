"""Saved views in a browser: kept, found after signing in again, shared, seen by somebody else, and the same as CSV."""

import csv
import io

import pytest
from playwright.sync_api import Browser, Page, expect
from pytest_django.live_server_helper import LiveServer

from tests.factories import ImageFactory, StoragePoolFactory, UserFactory
from tests.web.test_in_a_browser import AXE, RUN_AXE, axe, chromium, complaints_of  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

PASSWORD = "correct horse battery staple"


def sign_in(browser: Browser, server: LiveServer, user: str, theme: str) -> Page:
    context = browser.new_context(viewport={"width": 1440, "height": 1000}, color_scheme=theme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{server.url}/")
    page.get_by_label("User name").fill(user)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{server.url}/")
    return page


def names(page: Page) -> list[str]:
    return page.locator("#table tbody tr a.name").all_inner_texts()


def test_a_view_is_kept_shared_and_the_same_as_a_file(chromium: Browser, live_server: LiveServer) -> None:  # noqa: F811
    for user, role in (("ann", "operator"), ("bob", "viewer")):
        UserFactory.create(username=user, role=role, password=PASSWORD)
    pool = StoragePoolFactory.create()
    for number in range(6):
        ImageFactory.create(pool=pool, name=f"web-{number}.qcow2", allocated_size=number << 30)
    ImageFactory.create(pool=pool, name="mail.raw", format="raw", declared_format="raw")

    page = sign_in(chromium, live_server, "ann", "light")
    said = complaints_of(page)
    page.goto(f"{live_server.url}/images/")
    page.fill("#search", "web-")
    page.wait_for_url("**search=web-*")
    page.locator("#table th a", has_text="Physical").click()
    page.wait_for_url("**ordering=allocated_size*")
    # By keyboard alone: the summary, the name, the button.
    page.get_by_text("Save this view…").focus()
    page.keyboard.press("Enter")
    page.get_by_label("Name", exact=True).focus()
    page.keyboard.type("web servers")
    page.keyboard.press("Enter")
    expect(page.get_by_text("“web servers” is saved.")).to_be_visible()
    assert names(page) == [f"web-{number}.qcow2" for number in range(6)]
    page.context.close()

    page = sign_in(chromium, live_server, "ann", "dark")
    said += complaints_of(page)
    page.goto(f"{live_server.url}/images/")
    page.get_by_role("navigation", name="Saved views").get_by_role("link", name="web servers").click()
    assert names(page) == [f"web-{number}.qcow2" for number in range(6)]
    page.get_by_text("Manage views…").click()
    page.get_by_label("Shared", exact=True).check()
    assert axe(page) == []
    page.get_by_role("button", name="Save view web servers").click()
    expect(page.get_by_text("“web servers” was changed.")).to_be_visible()
    page.context.close()

    page = sign_in(chromium, live_server, "bob", "light")
    said += complaints_of(page)
    page.goto(f"{live_server.url}/images/")
    link = page.get_by_role("navigation", name="Saved views").get_by_role("link", name="web servers")
    expect(link).to_contain_text("by ann")
    link.click()
    expect(page.get_by_label("Saved views").locator("[aria-current=true]")).to_have_count(1)
    page.get_by_text("Manage views…").click()
    assert page.get_by_role("button", name="Delete view web servers").count() == 0
    assert axe(page) == []
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    rows = list(csv.DictReader(io.StringIO(download.value.path().read_text())))
    assert [row["path"].rpartition("/")[2] for row in rows] == names(page)
    assert [int(row["allocated_size"]) for row in rows] == [number << 30 for number in range(6)]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 420, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert said == []
    page.context.close()


@pytest.mark.parametrize("address", ["/jobs/", "/guests/", "/hosts/", "/benchmarks/"])
def test_the_forms_of_every_list_are_accessible_and_work_without_scripts(
    chromium: Browser,  # noqa: F811
    live_server: LiveServer,
    address: str,
) -> None:
    UserFactory.create(username="ann", role="operator", password=PASSWORD)
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{live_server.url}{address}")
    page.get_by_label("User name").fill("ann")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("Save this view…").click()
    page.get_by_label("Name", exact=True).fill("plain")
    page.get_by_label("Share with all users").check()
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("“plain” is saved.")).to_be_visible()
    state = context.storage_state()
    context.close()
    context = chromium.new_context(storage_state=state, color_scheme="dark")
    page = context.new_page()
    page.goto(f"{live_server.url}{address}")
    for summary in ("Save this view…", "Manage views…"):
        page.get_by_text(summary).click()
    assert axe(page) == []
    context.close()
