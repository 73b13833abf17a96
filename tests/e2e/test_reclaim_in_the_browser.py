import re
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.browser import Tab
from tests.e2e.disks import equal, physical
from tests.harness.services import Dashboard

pytestmark = pytest.mark.browser


def test_an_image_is_found_reclaimed_and_put_back(seen: Tab, page: Page, dashboard: Dashboard, tmp_path: Path) -> None:
    path = dashboard.demo / "mail.qcow2"
    before, original = physical(path), tmp_path / "original.qcow2"
    subprocess.run(["cp", "--sparse=always", str(path), str(original)], check=True)

    seen.open("/")
    page.get_by_role("link", name="Images", exact=True).click()
    page.get_by_label("Search by name or path").fill("mail")
    expect(page).to_have_url(re.compile("search=mail"))
    page.get_by_role("link", name="mail.qcow2", exact=True).click()
    expect(page.get_by_role("heading", name="mail.qcow2")).to_be_visible()
    image = page.url.removeprefix(dashboard.url)
    assert seen.exact("Physical") == before

    page.get_by_role("link", name=re.compile("Reclaim")).first.click()
    expect(page.get_by_role("heading", name=re.compile("· Plan"))).to_be_visible()
    expect(page.locator("#plan")).to_contain_text("saves about")
    page.get_by_label("Method").select_option("compress")
    page.get_by_label("Bandwidth limit (MiB/s)").fill("3")
    page.get_by_label("Bandwidth limit (MiB/s)").blur()
    expect(page.locator("#plan")).to_contain_text(f"-r {3 << 20}")
    page.locator("#plan").get_by_role("button", name=re.compile(r"mail\.qcow2")).click()

    expect(page).to_have_url(re.compile(r"/jobs/\d+/$"))
    bar = page.get_by_role("progressbar")
    expect(bar).to_be_visible()
    seen_on_the_way: set[str] = set()
    while bar.is_visible():
        # It may be gone by the time that it is read.
        seen_on_the_way |= set(page.locator("#percent").all_inner_texts())
        page.wait_for_timeout(200)
    assert len(seen_on_the_way) >= 3, "the bar does not move"
    expect(page.locator("#status")).to_contain_text("Undo: restore the original", timeout=60_000)

    after = physical(path)
    assert after < before / 4
    assert (seen.exact("Before"), seen.exact("After"), seen.exact("Freed")) == (before, after, 0)
    assert seen.exact("Held by the undo copy") == before
    assert equal(path, original)
    page.get_by_role("link", name="mail.qcow2", exact=True).first.click()
    assert seen.exact("Physical") == after

    seen.undo("Undo…")
    seen.open(image)
    assert seen.exact("Physical") == before == physical(path)
    assert equal(path, original)
    assert [file.name for file in path.parent.glob(".sa-*")] == []
