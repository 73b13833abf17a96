"""A policy from its form over the preview to a run and its history; the switch for all automation."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser


@pytest.fixture
def automation_on(rest: Rest) -> Iterator[None]:
    yield
    rest.patch("automation/", {"paused": False})


def test_a_policy_is_made_previewed_run_and_read(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path, tmp_path: Path, automation_on: None
) -> None:
    more = disks.disk(shared_folder, "night-more.qcow2", zeros_mib=24, data_mib=4)
    less = disks.disk(shared_folder, "night-less.qcow2", zeros_mib=8, data_mib=2)
    small = disks.disk(shared_folder, "night-small.qcow2", zeros_mib=0, data_mib=1)
    disks.registered(rest, shared_folder)
    kept = {path: disks.content_of(path, tmp_path / f"{path.name}.raw") for path in (more, less)}
    before, untouched = {path: disks.physical(path) for path in (more, less)}, small.read_bytes()

    # The form shows what it would do as it is filled in.
    seen.open("/policies/")
    page.get_by_role("link", name="New policy…").click()
    page.get_by_label("Name", exact=True).fill("compaction")
    page.get_by_label("Opens (minute, hour, day of month, month, day of week)").fill("0 99 * * *")
    page.get_by_label("Time zone").fill("Europe/Berlin")
    page.get_by_label("Names", exact=True).fill("night-*")
    answer = page.locator("#answer")
    expect(answer).to_contain_text("The hour field is not valid")
    page.get_by_label("Opens (minute, hour, day of month, month, day of week)").fill("0 22 * * 1-5")
    page.get_by_label("Minimum savings (MiB)").fill("5")
    page.get_by_label("Minimum savings (MiB)").press("Tab")
    rows = answer.get_by_role("region", name="Selected").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("night-more.qcow2")
    expect(rows.nth(1)).to_contain_text("night-less.qcow2")
    expect(answer).to_contain_text("savings too small")
    expect(answer).to_contain_text("no new jobs after")
    # Another job has other options.
    page.get_by_label("Job", exact=True).select_option("analyze")
    expect(page.get_by_label("Mode", exact=True)).to_be_visible()
    page.get_by_label("Job", exact=True).select_option("reclaim")
    page.get_by_label("Undo (hours)").fill("0")
    seen.assert_accessible()
    page.get_by_role("button", name="Create policy").click()
    expect(page.get_by_role("heading", name="compaction")).to_be_visible()
    expect(page.locator("main")).to_contain_text("No runs yet")

    # Preview, with every reason.
    page.get_by_role("link", name="Run now…").click()
    chosen = page.get_by_role("region", name="Selected").locator("tbody tr")
    expect(chosen).to_have_count(2)
    left_out = page.get_by_role("region", name="Skipped")
    expect(left_out).to_contain_text("night-small.qcow2")
    expect(left_out).to_contain_text("the policy requires at least 5 MiB")
    seen.assert_accessible()

    # By hand, to its end, without a reload.
    page.get_by_role("button", name="Run now").click()
    expect(page.locator("main")).to_contain_text("finished", timeout=120_000)
    jobs = page.get_by_role("region", name="Jobs").locator("tbody tr")
    expect(jobs).to_have_count(2)
    expect(jobs.nth(0)).to_contain_text("night-more.qcow2")
    expect(jobs.nth(0)).to_contain_text("succeeded")
    expect(jobs.nth(1)).to_contain_text("succeeded")
    won = sum(before[path] - disks.physical(path) for path in (more, less))
    assert seen.fact("Freed").locator("[title]").first.get_attribute("title") == f"{won:,} bytes"
    assert won > 20 * disks.MIB
    for path, content in kept.items():
        assert disks.content_of(path, tmp_path / "after.raw").read_bytes() == content.read_bytes()
    assert small.read_bytes() == untouched
    page.reload()
    expect(page.get_by_role("region", name="Skipped")).to_contain_text("night-small.qcow2")
    seen.assert_accessible()

    # Its history, and who did it in the list of jobs.
    page.get_by_role("link", name="compaction").click()
    history = page.get_by_role("region", name="Runs").locator("tbody tr")
    expect(history).to_have_count(1)
    expect(history).to_contain_text("manual, admin")
    seen.assert_accessible()
    seen.open("/policies/")
    expect(seen.row("compaction")).to_contain_text("finished")
    assert {job["created_by"] for job in rest.get("jobs/", kind="reclaim")["results"][:2]} == {"policy compaction"}

    # The switch shows on every page, and stops what somebody starts by hand as well.
    page.get_by_label("Reason (shown to other admins)").fill("the array is rebuilt")
    page.get_by_role("button", name="Pause automation").click()
    seen.open("/jobs/")
    expect(page.locator("#paused")).to_contain_text("the array is rebuilt")
    seen.assert_accessible()
    seen.open("/policies/")
    seen.row("compaction").get_by_role("link", name="compaction").first.click()
    page.get_by_role("link", name="Run now…").click()
    page.get_by_role("button", name="Run now").click()
    expect(page.locator(".say.bad")).to_contain_text(re.compile("automation_paused"))
    page.get_by_role("button", name="Resume", exact=True).click()
    expect(page.locator("#paused")).to_have_count(0)
