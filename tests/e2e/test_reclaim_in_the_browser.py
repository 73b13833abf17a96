import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.browser import Tab, tab
from tests.e2e.disks import disk, equal, physical, registered
from tests.e2e.rest import Rest
from tests.harness.guests import Disk, Guest, LibvirtGuest
from tests.harness.services import Dashboard

pytestmark = pytest.mark.browser


def test_an_image_is_found_reclaimed_and_put_back(
    admin_tab: Callable[..., Tab], dashboard: Dashboard, tmp_path: Path
) -> None:
    path = dashboard.demo / "mail.qcow2"
    before, original = physical(path), tmp_path / "original.qcow2"
    subprocess.run(["cp", "--sparse=always", str(path), str(original)], check=True)
    seen = admin_tab()
    page = seen.page

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

    page.get_by_role("link", name="Undo…").click()
    page.get_by_role("button", name="Undo: restore the original").click()
    expect(page.get_by_role("heading", name=re.compile("Undo"))).to_be_visible()
    expect(page.locator("#status")).to_contain_text("succeeded", timeout=60_000)
    seen.open(image)
    assert seen.exact("Physical") == before == physical(path)
    assert equal(path, original)
    assert [file.name for file in path.parent.glob(".sa-*")] == []


@pytest.mark.guest
def test_an_image_of_a_running_guest_is_refused_on_the_page_and_over_rest(
    admin_tab: Callable[..., Tab], rest: Rest, shared_folder: Path, tcg_guest: Callable[..., LibvirtGuest]
) -> None:
    path = disk(shared_folder, "held-by-a-guest.qcow2")
    guest = tcg_guest(Disk(path))
    registered(rest, shared_folder)
    image = rest.image(path.name)
    assert image["in_use"] is True
    before = path.stat()

    seen = admin_tab()
    seen.open(f"/images/{image['id']}/reclaim/")
    plan = seen.page.locator("#plan")
    expect(plan).to_contain_text("(guest_running)")
    expect(plan).to_contain_text(guest.name)
    expect(plan.get_by_role("button", name=re.compile("held-by-a-guest"))).to_be_disabled()
    refused = rest.post("jobs/", {"kind": "reclaim", "image": image["id"]}, expect=409)
    assert refused["code"] == "guest_running"

    guest.stop()
    rest.scan()
    seen.open(f"/images/{image['id']}/reclaim/")
    expect(seen.page.locator("#plan")).not_to_contain_text("refused")
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)


@pytest.mark.guest
def test_an_image_that_a_guest_without_libvirt_holds_is_in_use(
    rest: Rest, shared_folder: Path, plain_guest: Callable[..., Guest]
) -> None:
    path = disk(shared_folder, "held-by-qemu.qcow2")
    registered(rest, shared_folder)
    image = rest.image(path.name)
    assert image["in_use"] is False
    plain_guest(Disk(path))
    # The look of the submission sees it; where that takes longer than its second, the job does.
    told = rest.post("jobs/", {"kind": "reclaim", "image": image["id"]}, expect=(202, 409))
    error = rest.finished(told)["error"] if "id" in told else told
    assert error["code"] == "image_in_use"
    rest.scan()
    assert rest.image(path.name)["in_use"] is True


def test_a_wrong_password_does_not_open_and_says_so(browser_process: Browser, dashboard: Dashboard) -> None:
    with tab(browser_process, dashboard.url) as seen:
        seen.open("/images/")
        seen.page.get_by_label("User name").fill("admin")
        seen.page.get_by_label("Password").fill("not the password")
        seen.page.get_by_role("button", name="Sign in").click()
        expect(seen.page.get_by_role("alert")).to_be_visible()
        assert seen.complaints == []
