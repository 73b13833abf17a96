"""A disk is moved onto a thin volume from its page."""

from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.harness.lvm import Lvm
from tests.images.test_move import group, lvm, thin
from tests.web.browser import axe
from tests.web.test_volumes_in_a_browser import done, page
from tests.working import create, image_at, scanned_machine

__all__ = ["lvm", "page"]

pytestmark = [
    pytest.mark.browser, pytest.mark.qemu, pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("quiet", "no_libvirt", "no_reserve"),
]  # fmt: skip


def test_a_disk_is_moved_onto_a_thin_volume(lvm: Lvm, page: Page, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    pool.mkdir()
    disk = create(pool / "disk.qcow2", "9M")
    scanned_machine(pool)
    page.goto(f"/images/{image_at(disk).pk}/move/")
    page.locator("#plan").wait_for()
    assert axe(page) == []
    page.locator("[name=target_pool]").select_option(str(thin().pk))
    page.get_by_text(f"/dev/{group(lvm)}/disk").first.wait_for()
    assert axe(page) == []
    available = thin().available_bytes
    assert available is not None
    assert f"{available / (1 << 20):g} MiB free in {thin().name}" in page.locator("#plan").inner_text()
    page.get_by_role("button", name="Move to a volume disk.qcow2").click()
    job = done(page)
    assert (job.result or {})["path"] == f"/dev/{group(lvm)}/disk"
    assert lvm.volumes()["disk"]["pool_lv"] == "data"
    assert axe(page) == []
