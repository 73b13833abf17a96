"""A chain made shorter through the pages, by both methods, and put back."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser


@pytest.fixture
def chain(shared_folder: Path, rest: Rest) -> list[Path]:
    """Four images, base first; each holds something of its own, and hides something of the one below."""
    names = [f"layer-{number}.qcow2" for number in range(4)]
    paths = []
    for number, name in enumerate(names):
        base = names[number - 1] if number else ""
        paths.append(disks.disk(shared_folder, name, base=base, zeros_mib=2, data_mib=2, at_mib=33 + number))
    disks.registered(rest, shared_folder)
    return paths


def test_a_chain_is_flattened_down_to_a_base_then_put_back_then_made_to_stand_alone(
    seen: Tab, page: Page, chain: list[Path], tmp_path: Path
) -> None:
    leaf, base = chain[-1], chain[0]
    content, before = disks.content_of(leaf, tmp_path / "before.raw"), disks.physical(leaf)
    below = {path: path.read_bytes() for path in chain[:-1]}
    plan = page.locator("#plan")

    seen.plan_of(leaf, "Flatten…")
    expect(plan).to_contain_text("The chain depth changes from 4 to 1")
    page.get_by_label("Flatten down to").select_option(label=f"keep {base.name} as backing file")
    expect(plan).to_contain_text("The chain depth changes from 4 to 2")
    page.get_by_text("Commands", exact=True).click()
    expect(plan).to_contain_text(f"-b {base} -F qcow2")
    seen.confirm(f"Flatten {leaf.name}", "Undo: restore the original")
    assert (disks.depth(leaf), disks.info(leaf)["backing-filename-format"]) == (2, "qcow2")
    assert disks.equal(leaf, content)
    assert (seen.exact("Before"), seen.exact("After")) == (before, disks.physical(leaf))
    expect(seen.fact("Flatten down to")).to_have_text(base.name)
    page.get_by_role("link", name=leaf.name, exact=True).first.click()
    expect(seen.fact("Chain depth")).to_have_text("2")
    assert seen.exact("Physical") == disks.physical(leaf)

    seen.undo("Undo…")
    assert (disks.depth(leaf), disks.physical(leaf)) == (4, before)
    assert disks.equal(leaf, content)

    seen.plan_of(leaf, "Flatten…")
    page.get_by_label("Method").select_option("convert")
    expect(plan).to_contain_text("Flatten into a new copy")
    page.get_by_text("Commands", exact=True).click()
    expect(plan).to_contain_text("qemu-img convert")
    seen.confirm(f"Flatten into a new copy {leaf.name}", "Undo: restore the original")
    assert disks.depth(leaf) == 1
    assert disks.equal(leaf, content)
    assert {path: path.read_bytes() for path in chain[:-1]} == below
