"""An image looked through and repaired through the pages."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.agent.test_check import leak
from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser


def checked_on_the_page(seen: Tab, path: Path) -> None:
    """From the list over the image's page to the result of a check."""
    seen.image_page(path)
    seen.page.get_by_role("link", name="Check…").click()
    expect(seen.page.locator("#plan")).to_contain_text("nothing is written")
    seen.page.locator("#plan").get_by_role("button", name=f"Check {path.name}").click()
    expect(seen.page).to_have_url(re.compile(r"/jobs/\d+/$"))
    expect(seen.page.locator("#status")).to_contain_text("Found:", timeout=60_000)


def test_leaks_are_found_repaired_and_put_back(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path, tmp_path: Path
) -> None:
    path = disks.disk(shared_folder, "leaky.qcow2")
    leak(path, clusters=5)
    content, before, found = disks.content_of(path, tmp_path / "before.raw"), path.read_bytes(), disks.checked(path)
    assert found == {"corruptions": 0, "leaks": 5, "errors": 0}
    disks.registered(rest, shared_folder)
    status = page.locator("#status")

    checked_on_the_page(seen, path)
    expect(status).to_contain_text("Found: 0 errors, 5 leaked clusters.")
    assert path.read_bytes() == before
    seen.assert_accessible()

    page.get_by_role("link", name="Repair leaks…").click()
    plan = page.locator("#plan")
    expect(plan).to_contain_text("on a copy of the file")
    page.get_by_text("Commands", exact=True).click()
    expect(plan).to_contain_text("qemu-img check -r leaks")
    seen.assert_accessible()
    plan.get_by_role("button", name="Repair leaks leaky.qcow2").click()
    expect(status).to_contain_text("Repaired. Found before the repair: 0 errors, 5 leaked clusters.", timeout=60_000)
    assert disks.checked(path) == {"corruptions": 0, "leaks": 0, "errors": 0}
    assert disks.equal(path, content)
    assert seen.exact("After") == disks.physical(path)
    assert seen.exact("Held by the undo copy") == seen.exact("Before")

    seen.undo()
    assert path.read_bytes() == before
