"""What becomes of an image after it was made: enlarged, rebased, repaired, merged, shrunk, by clicks."""

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser


def test_an_image_is_changed_in_every_way_that_its_page_offers(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path, tmp_path: Path
) -> None:
    old, new = (disks.disk(shared_folder, f"{name}.qcow2", zeros_mib=0) for name in ("old", "new"))
    path = disks.disk(shared_folder, "vm.qcow2", base="old.qcow2", at_mib=128, zeros_mib=0)
    content = disks.content_of(path, tmp_path / "before")
    disks.registered(rest, shared_folder)

    def begin(name: str, action: str) -> None:
        seen.open(f"/images/{rest.image(name)['id']}/")
        page.get_by_role("link", name=action).click()

    def ends(button: str) -> None:
        seen.confirm(button)
        rest.scan()
        rest.quiet()

    begin("vm.qcow2", "Change backing file…")
    page.get_by_label("New backing file").fill("/nowhere.qcow2")
    page.get_by_label("New backing file").press("Enter")
    expect(page.locator("#plan")).to_contain_text("no image /nowhere.qcow2")
    expect(page.get_by_label("New backing file")).to_have_value("/nowhere.qcow2")
    page.get_by_label("New backing file").fill(str(new))
    page.get_by_label("New backing file").press("Enter")
    expect(page.locator("#plan")).to_contain_text("takes over what new.qcow2 does not hold")
    seen.assert_accessible()
    ends("Change backing file vm.qcow2")
    assert disks.info(path)["backing-filename"] == "new.qcow2"
    assert disks.equal(path, content)

    moved = new.rename(shared_folder / "renamed.qcow2")
    rest.scan()
    begin("vm.qcow2", "repair the chain…")
    page.get_by_role("link", name=str(moved)).click()
    expect(page.locator("#plan")).to_contain_text("same file")
    seen.assert_accessible()
    ends("Repair chain vm.qcow2")
    assert disks.equal(path, content)

    begin("vm.qcow2", "Merge into backing file…")
    page.get_by_label("Type “vm.qcow2”").fill("renamed.qcow2")
    page.get_by_role("button", name="Merge vm.qcow2").click()
    expect(page.locator("#plan")).to_contain_text("Type vm.qcow2 to confirm.")
    assert ["409" in complaint for complaint in seen.complaints] == [True]  # that it was refused
    seen.complaints.clear()
    page.get_by_label("Type “vm.qcow2”").fill("vm.qcow2")
    seen.assert_accessible()
    ends("Merge vm.qcow2")
    assert disks.equal(moved, content)
    seen.open(f"/images/{rest.image('vm.qcow2')['id']}/")
    expect(page.locator("main")).to_contain_text("merged its data into the image below it")

    begin("old.qcow2", "Enlarge…")
    page.get_by_label("New size (GiB)").fill("1.25")
    page.get_by_label("New size (GiB)").press("Enter")
    expect(page.locator("#plan")).to_contain_text("to 1,342,177,280 bytes")
    ends("Enlarge old.qcow2")
    assert disks.info(old)["virtual-size"] == 5 << 28

    begin("old.qcow2", "Shrink…")
    expect(page.locator("#plan")).to_contain_text("has_overlays")  # undo copies stand on it
    alone = shared_folder / "alone.qcow2"
    shutil.copyfile(old, alone)
    rest.scan()
    begin("alone.qcow2", "Shrink…")
    seen.assert_accessible()
    page.get_by_role("button", name="Shrink alone.qcow2").click()
    expect(page.locator("#status")).to_contain_text("(end_in_use)", timeout=60_000)
    assert disks.info(alone)["virtual-size"] == 5 << 28
