"""An orphan set aside and restored through the pages."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser


def test_an_orphan_is_set_aside_and_restored(seen: Tab, page: Page, rest: Rest, shared_folder: Path) -> None:
    path = disks.disk(shared_folder, "left-over.qcow2")
    content, size = path.read_bytes(), disks.physical(path)
    pool = disks.registered(rest, shared_folder)
    status = page.locator("#status")
    listed = f"/orphans/?everywhere=true&pool={pool['id']}"

    seen.open(listed)
    row = page.locator("#orphans tbody tr").filter(has_text=path.name)
    expect(row).to_contain_text("No overlay uses it.")
    expect(row).to_contain_text("last changed")
    seen.assert_accessible()
    row.get_by_role("link", name=f"Set {path.name} aside…").click()
    expect(page.locator("#plan")).to_contain_text("is renamed within its folder")
    page.get_by_label("Grace period before deletion").fill("30")
    seen.assert_accessible()
    seen.confirm(f"Set {path.name} aside")
    assert not path.exists()
    [aside] = shared_folder.glob(".sa-*.aside")
    assert aside.read_bytes() == content
    rest.quiet()

    seen.open(listed)
    expect(page.locator("#orphans tbody tr")).to_have_count(0)
    waiting = page.locator("#aside tbody tr").filter(has_text=path.name)
    expect(waiting).to_contain_text("admin")
    expect(waiting.get_by_role("link", name=f"Delete {path.name}…")).to_have_count(0)
    seen.assert_accessible()
    found = rest.get("images/", state="set_aside", search=path.name)["results"]
    assert [(one["path"], one["allocated_size"]) for one in found] == [(str(path), size)]
    assert rest.get(f"pools/{pool['id']}/")["aside_bytes"] == size

    waiting.get_by_role("button", name=f"Restore {path.name}").click()
    expect(page).to_have_url(re.compile(r"/jobs/\d+/$"))
    expect(status).to_contain_text("succeeded", timeout=60_000)
    assert path.read_bytes() == content
    assert list(shared_folder.glob(".sa-*")) == []
    rest.quiet()
    assert rest.image(path.name)["orphan"] is True
