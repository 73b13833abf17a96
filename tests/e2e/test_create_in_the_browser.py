"""A new image and an overlay on it, made through the pages."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser


def test_an_image_and_an_overlay_on_it_are_created_as_their_plans_say(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path
) -> None:
    new, over = shared_folder / "fresh.qcow2", shared_folder / "over.qcow2"
    pool = disks.registered(rest, shared_folder)["id"]
    seen.open(f"/pools/{pool}/")
    page.get_by_role("link", name="Create image…").click()
    page.get_by_label("Name").fill(new.name)
    page.get_by_label("Size (GiB)").fill("none")
    page.get_by_label("Size (GiB)").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Enter a number above 0.")
    expect(page.get_by_label("Name")).to_have_value(new.name)
    seen.assert_accessible()
    page.get_by_label("Size (GiB)").fill("1.5")
    page.get_by_label("Cluster size").select_option("128K")
    page.get_by_label("Extended l2").select_option("on")
    page.get_by_label("Size (GiB)").press("Enter")
    expect(page.locator("pre.shell")).to_contain_text("cluster_size=128k,extended_l2=on")
    assert not new.exists()
    seen.confirm("Create image", "Physical size of the new file")
    assert seen.exact("Physical size of the new file") == disks.physical(new)
    assert seen.exact("Virtual size") == disks.info(new)["virtual-size"] == 3 << 29
    seen.assert_accessible()

    page.get_by_role("link", name=str(new)).click()
    seen.reload_until(seen.row(new.name))
    page.get_by_role("link", name=new.name, exact=True).click()
    expect(seen.fact("Extended L2")).to_have_text("yes")
    page.get_by_role("link", name="Create overlay…").click()
    page.get_by_label("Name").fill(over.name)
    page.get_by_label("Name").press("Enter")
    expect(page.locator("pre.shell")).to_contain_text(f"-b {new} -F qcow2")
    seen.confirm("Create image", "Physical size of the new file")
    made = disks.info(over)
    assert (made["backing-filename"], made["virtual-size"]) == (new.name, 3 << 29)

    seen.open(f"/pools/{pool}/create/?name={new.name}&size_gib=1")
    expect(page.locator(".say.bad")).to_contain_text("(target_exists)")
    expect(page.get_by_role("button", name="Create image")).to_have_count(0)
