"""An image written in another format through the pages."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from storage_admin.words import size
from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser


def test_an_overlay_becomes_a_file_of_another_format_and_no_file_is_overwritten(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path
) -> None:
    disks.disk(shared_folder, "ground.qcow2")
    source = disks.disk(shared_folder, "travel.qcow2", base="ground.qcow2", zeros_mib=0, at_mib=40)
    new, before = shared_folder / "travel.vmdk", source.read_bytes()
    disks.registered(rest, shared_folder)
    plan = page.locator("#plan")

    seen.plan_of(source, "Convert…")
    page.get_by_label("Format options").fill("subformat=streamOptimized")
    page.get_by_label("Format options").blur()
    expect(plan).to_contain_text("No plan.")
    expect(plan).to_contain_text("qcow2 has no such option")
    page.get_by_label("Target format").select_option("vmdk")
    expect(plan).to_contain_text(f"are written in full as vmdk to {new}")
    expect(plan).to_contain_text("not needed: the image is not changed")
    page.get_by_text("Commands", exact=True).click()
    expect(plan).to_contain_text("-O vmdk -o subformat=streamOptimized")
    seen.assert_accessible()
    seen.confirm("Convert travel.qcow2", "Physical size of the new file")
    assert disks.equal(source, new)
    assert source.read_bytes() == before
    assert seen.exact("Physical size of the new file") == disks.physical(new)
    assert seen.exact("Physical size of the image (unchanged)") == disks.physical(source)
    expect(seen.fact("Format options")).to_have_text("subformat=streamOptimized")
    seen.assert_accessible()

    page.get_by_role("link", name=str(new)).click()
    seen.reload_until(seen.row(new.name))
    page.get_by_role("link", name=new.name, exact=True).click()
    assert seen.exact("Physical") == disks.physical(new)
    assert seen.exact("Virtual size") == disks.info(new)["virtual-size"]
    expect(seen.fact("Subformat")).to_have_text("streamOptimized")
    expect(seen.fact("Chain depth")).to_have_text("1")

    rest.scan()  # the one after the job may have found the image open: by the comparison above
    seen.plan_of(source, "Convert…")
    page.get_by_label("Target format").select_option("vmdk")
    expect(plan).to_contain_text("(target_exists)")
    expect(plan).to_contain_text("Choose another name")
    expect(plan.get_by_role("button", name="Convert travel.qcow2")).to_be_disabled()
    page.get_by_label("New name").fill("travel-again.vmdk")
    page.get_by_label("New name").blur()
    expect(plan).to_contain_text("travel-again.vmdk")
    expect(plan).not_to_contain_text("refused")
    expect(plan.get_by_role("button", name="Convert travel.qcow2")).to_be_enabled()


def test_a_new_format_takes_the_images_place_and_undo_brings_the_old_name_back(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path, tmp_path: Path
) -> None:
    old, new = disks.disk(shared_folder, "settled.qcow2"), shared_folder / "settled.raw"
    content, before = disks.content_of(old, tmp_path / "before.raw"), old.read_bytes()
    disks.registered(rest, shared_folder)
    plan = page.locator("#plan")

    seen.plan_of(old, "Convert…")
    page.get_by_label("Target format").select_option("raw")
    expect(page.get_by_label("Keep the undo copy (hours)")).to_be_hidden()
    page.get_by_label("Original image").select_option("true")
    expect(page.get_by_label("Keep the undo copy (hours)")).to_be_visible()
    expect(plan).to_contain_text(f"holds {size(disks.physical(old))} until")
    seen.assert_accessible()
    seen.confirm("Convert settled.qcow2", "Undo: restore the original")
    expect(seen.fact("New name")).to_have_text(str(new))
    assert not old.exists()
    assert disks.equal(new, content)
    assert seen.exact("After") == disks.physical(new)

    seen.undo()
    assert old.read_bytes() == before
    assert not new.exists()
    seen.open(f"/images/?search={old}")
    seen.reload_until(seen.row(old.name))
