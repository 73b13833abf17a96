"""A file is uploaded through the pages, on from where it broke off, by the same page and by the job's."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser
MIB = 1 << 20


def test_an_upload_that_breaks_off_goes_on_and_the_host_has_what_the_browser_read(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path, tmp_path: Path
) -> None:
    source, pool = tmp_path / "some disk.raw", disks.registered(rest, shared_folder)["id"]
    source.write_bytes(os.urandom(17 * MIB) + bytes(20 * MIB) + os.urandom(100_000))
    seen.open(f"/pools/{pool}/")
    page.get_by_role("link", name="Upload file…").click()
    page.get_by_label("Name").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Choose a file.")
    page.get_by_label("File", exact=True).set_input_files(source)
    expect(page.get_by_label("Name")).to_have_value(source.name)
    page.get_by_label("Name").fill("first.raw")
    page.get_by_label("Name").press("Enter")
    expect(page.get_by_text("are sent, written beside")).to_be_visible()
    seen.assert_accessible()

    asked: list[str] = []

    def once(route: Route) -> None:
        asked.append(route.request.headers["upload-offset"])
        if len(asked) == 2:
            route.abort()
        else:
            route.continue_()

    page.route(
        "**/api/v1/uploads/*/", lambda route: once(route) if route.request.method == "PATCH" else route.fallback()
    )
    seen.confirm("Upload file")
    assert asked == ["0", str(16 * MIB), str(16 * MIB), str(32 * MIB)]
    made = shared_folder / "first.raw"
    assert made.read_bytes() == source.read_bytes()
    expect(page.get_by_text(hashlib.sha256(source.read_bytes()).hexdigest())).to_be_visible()
    assert seen.exact("Physical size of the new file") == disks.physical(made) < 20 * MIB
    assert [said for said in seen.complaints if "ERR_FAILED" not in said] == []
    seen.complaints.clear()


def test_an_upload_whose_page_was_left_goes_on_from_the_page_of_its_job(
    admin_tab: Callable[..., Tab], rest: Rest, shared_folder: Path, tmp_path: Path
) -> None:
    source, other = tmp_path / "second.raw", tmp_path / "other.raw"
    source.write_bytes(os.urandom(20 * MIB))
    other.write_bytes(b"something else")
    pool = disks.registered(rest, shared_folder)["id"]
    seen = admin_tab()
    page = seen.page
    seen.open(f"/pools/{pool}/upload/")
    page.get_by_label("File", exact=True).set_input_files(source)
    page.get_by_label("Name").press("Enter")
    passed: list[str] = []

    def first_alone(route: Route) -> None:
        if route.request.method == "PATCH" and passed:
            route.abort()
            return
        if route.request.method == "PATCH":
            passed.append(route.request.url)
        route.continue_()

    page.route("**/api/v1/uploads/*/", first_alone)
    page.get_by_role("button", name="Upload file").click()
    expect(page.get_by_text("Connection lost. Trying again.")).to_be_visible()
    page.close()
    seen.complaints.clear()  # of what was cut off

    seen = admin_tab()
    page = seen.page
    (job,) = [int(part) for part in passed[0].split("/") if part.isdigit()]
    seen.open(f"/jobs/{job}/")
    expect(page.locator("#status")).to_contain_text("16 MiB of 20 MiB have arrived")
    seen.assert_accessible()
    page.get_by_label("Continue with the same file").set_input_files(other)
    expect(page.get_by_text("This is not the same file")).to_be_visible()
    page.get_by_label("Continue with the same file").set_input_files(source)
    expect(page.locator("#status")).to_contain_text("succeeded", timeout=60_000)
    assert (shared_folder / source.name).read_bytes() == source.read_bytes()
