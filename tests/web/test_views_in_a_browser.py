"""Saved views in a browser: kept, found after signing in again, shared, seen by somebody else, and the same as CSV."""

import csv
import io
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.factories import ImageFactory, StoragePoolFactory, UserFactory
from tests.web.browser import axe, log_in

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def sign_in(stranger: Callable[..., Page]) -> Callable[[str, str], Page]:
    """``sign_in("ann", "dark")``: a new tab of that user."""

    def opened(user: str, theme: str) -> Page:
        page = stranger(color_scheme=theme)
        page.goto("/")
        log_in(page, user)
        page.wait_for_url("/")
        return page

    return opened


def names(page: Page) -> list[str]:
    return page.locator("#table tbody tr a.name").all_inner_texts()


def test_a_view_is_kept_shared_and_the_same_as_a_file(sign_in: Callable[[str, str], Page]) -> None:
    for user, role in (("ann", "operator"), ("bob", "viewer")):
        UserFactory.create(username=user, role=role)
    pool = StoragePoolFactory.create()
    for number in range(6):
        ImageFactory.create(pool=pool, name=f"web-{number}.qcow2", allocated_size=number << 30)
    ImageFactory.create(pool=pool, name="mail.raw", format="raw", declared_format="raw")

    page = sign_in("ann", "light")
    page.goto("/images/")
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

    page = sign_in("ann", "dark")
    page.goto("/images/")
    page.get_by_role("navigation", name="Saved views").get_by_role("link", name="web servers").click()
    assert names(page) == [f"web-{number}.qcow2" for number in range(6)]
    page.get_by_text("Manage views…").click()
    page.get_by_label("Shared", exact=True).check()
    assert axe(page) == []
    page.get_by_role("button", name="Save view web servers").click()
    expect(page.get_by_text("“web servers” was changed.")).to_be_visible()
    page.context.close()

    page = sign_in("bob", "light")
    page.goto("/images/")
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


@pytest.mark.parametrize("address", ["/jobs/", "/guests/", "/hosts/", "/benchmarks/"])
def test_the_forms_of_every_list_are_accessible_and_work_without_scripts(
    stranger: Callable[..., Page], address: str
) -> None:
    UserFactory.create(username="ann", role="operator")
    page = stranger(java_script_enabled=False)
    page.goto(address)
    log_in(page, "ann")
    page.get_by_text("Save this view…").click()
    page.get_by_label("Name", exact=True).fill("plain")
    page.get_by_label("Share with all users").check()
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_text("“plain” is saved.")).to_be_visible()
    page = stranger(storage_state=page.context.storage_state(), color_scheme="dark")
    page.goto(address)
    for summary in ("Save this view…", "Manage views…"):
        page.get_by_text(summary).click()
    assert axe(page) == []
