"""A job that waits for a running guest: what its page says, and how it is given up."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest
from tests.harness.guests import Disk, Starts

pytestmark = [pytest.mark.browser, pytest.mark.guest]


def test_a_job_says_which_guest_it_waits_for_and_is_cancelled_on_its_page(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path, tcg_guest: Starts
) -> None:
    path = disks.disk(shared_folder, "awake.qcow2")
    guest = tcg_guest(Disk(path))
    disks.registered(rest, shared_folder)
    plan, status = page.locator("#plan"), page.locator("#status")

    seen.image_page(path)
    page.get_by_role("link", name="Reclaim…").click()
    expect(plan).to_contain_text("(guest_running)")
    page.get_by_role("link", name="Wait for shutdown instead.").click()
    expect(plan).to_contain_text(f"The job waits until guest {guest.name} has been shut down")
    expect(plan).not_to_contain_text("refused")
    page.get_by_label("Maximum wait (hours)").fill("3")
    page.get_by_label("Maximum wait (hours)").blur()
    expect(plan).to_contain_text("for at most 3 hours")
    was = plan.locator("input[name=planned]").input_value()
    page.get_by_label("Afterwards").select_option("true")
    expect(plan.locator("input[name=planned]")).not_to_have_value(was)
    seen.assert_accessible()
    plan.get_by_role("button", name=re.compile("awake.qcow2")).click()

    expect(page).to_have_url(re.compile(r"/jobs/\d+/$"))
    expect(status).to_contain_text(f"Waiting for guest {guest.name} to be shut down", timeout=30_000)
    expect(status).to_contain_text("When it finishes, it starts the guest again.")
    expect(seen.fact("If a guest is running")).to_have_text("wait for shutdown, at most 3 hours")
    seen.assert_accessible()
    job = page.url.removesuffix("/").rpartition("/")[2]
    seen.open("/jobs/?state=queued")
    expect(seen.page.locator("tbody")).to_contain_text(f"waiting for guest {guest.name}")
    page.get_by_role("link", name=re.compile(f"^{job} ·")).click()

    page.get_by_role("button", name="Cancel job").click()
    expect(status).to_contain_text("cancelled")
    expect(status).to_contain_text("changed nothing")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    assert guest.domain.isActive()
    guest.write(100, 1, 0x61)  # its image is still the one that it has open
    assert [file.name for file in shared_folder.glob(".sa-*")] == []
    assert disks.physical(path) > 0
    assert rest.get(f"jobs/{job}/")["state"] == "cancelled"
