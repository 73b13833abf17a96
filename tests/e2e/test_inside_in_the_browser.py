"""What is on an image, looked at through the pages: partitions, files, a file that is downloaded."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser
MIB = 1 << 20


def test_an_admin_allows_it_looks_inside_browses_and_downloads_a_file(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path, tmp_path: Path
) -> None:
    root, raw, words = tmp_path / "root", tmp_path / "disk.raw", os.urandom(3 * MIB)
    (root / "home/ann").mkdir(parents=True)
    (root / "home/ann/words & more.bin").write_bytes(words)
    with raw.open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-d", root, raw], check=True)
    disks.run("qemu-img", "convert", "-O", "qcow2", str(raw), str(shared_folder / "vm.qcow2"))
    pool = disks.registered(rest, shared_folder)["id"]
    image = f"/images/{rest.image('vm.qcow2')['id']}/"
    seen.open(image)
    expect(page.get_by_role("link", name="Browse files…")).to_have_count(0)
    seen.open(f"/pools/{pool}/")
    page.get_by_label(re.compile("look inside", re.IGNORECASE)).check()
    page.get_by_role("button", name="Save").first.click()

    seen.open(image)
    page.get_by_role("link", name="Browse files…").click()
    expect(page.get_by_text("Starting a small virtual machine")).to_be_visible()
    expect(page.get_by_role("link", name="/dev/sda")).to_be_visible(timeout=240_000)
    seen.assert_accessible()
    seen.open(f"{page.url.removeprefix(seen.base)}?device=/dev/sda&path=/home/ann")
    with page.expect_download(timeout=300_000) as waiting:
        page.get_by_role("link", name="words & more.bin").click(timeout=240_000)
    assert Path(waiting.value.path()).read_bytes() == words
    seen.assert_accessible()
