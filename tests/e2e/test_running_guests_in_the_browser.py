"""Running guests in a browser: trimmed, flattened, and a block job that outlives the worker that began it."""

import re
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest
from tests.harness.guests import Disk, Domains, LibvirtGuest, Starts
from tests.harness.processes import wait_until
from tests.harness.services import Dashboard
from tests.live.chains import PATTERNS, chain_of, definition_of, make_chain, patterns
from tests.live.conftest import allocated, deletes, filesystem_image, wait_for_agent

pytestmark = [pytest.mark.browser, pytest.mark.guest]


def open_page_of(guest: LibvirtGuest, seen: Tab, link: str = "") -> None:
    """By its name in the list of guests; then what a link on it leads to."""
    seen.open(f"/guests/?search={guest.name}")
    seen.page.get_by_role("link", name=guest.name, exact=True).click()
    if link:
        seen.page.get_by_role("link", name=link).click()


@pytest.fixture
def chained(rest: Rest, shared_folder: Path, tcg_guest: Starts) -> LibvirtGuest:
    """A guest on the chain of :func:`make_chain`, which the dashboard has scanned."""
    guest = tcg_guest(Disk(make_chain(shared_folder)[0]))
    disks.registered(rest, shared_folder)
    return guest


def test_a_guest_is_trimmed_and_its_page_says_what_became_free(
    admin_tab: Callable[..., Tab], rest: Rest, shared_folder: Path, domains: Domains
) -> None:
    image = filesystem_image(shared_folder / "root.qcow2")
    guest = domains.run([Disk(image)], agent=True)
    guest.console.run("mount -t ext4 /dev/vda /mnt")
    wait_for_agent(guest)
    deletes(guest, 40)
    before = allocated(image)
    disks.registered(rest, shared_folder)
    seen = admin_tab()
    page = seen.page
    open_page_of(guest, seen, "Trim in the guest…")
    expect(page.get_by_text("zeroes_kept")).to_be_visible()
    seen.assert_accessible()
    seen.confirm("Trim in the guest")
    expect(page.locator("body")).to_contain_text(f"{before - allocated(image):,} bytes became free on the host")
    seen.assert_accessible()


def test_a_chain_is_flattened_while_its_guest_runs(admin_tab: Callable[..., Tab], chained: LibvirtGuest) -> None:
    guest, seen = chained, admin_tab()
    page = seen.page
    open_page_of(guest, seen, "Flatten vda")
    expect(page.get_by_text(f"virsh blockpull {guest.name} vda")).to_be_visible()
    seen.assert_accessible()
    page.get_by_role("button", name="Flatten while the guest runs").click()
    expect(page).to_have_url(re.compile(r"/live-flatten/"))  # the name has to be typed
    page.get_by_label(f"Type “{guest.name}” to confirm").fill(guest.name)
    seen.confirm("Flatten while the guest runs")
    assert chain_of(guest) == ["top.qcow2"]
    assert patterns(guest) == PATTERNS


def test_a_disk_is_copied_and_switched_back_its_settings_changed_and_a_snapshot_gone_back_to(
    admin_tab: Callable[..., Tab], rest: Rest, chained: LibvirtGuest
) -> None:
    guest, seen = chained, admin_tab()
    page = seen.page
    open_page_of(guest, seen)
    seen.assert_accessible()
    page.get_by_role("link", name="Copy vda").click()
    page.get_by_label("Name of the new file").fill("moved.qcow2")
    page.get_by_role("button", name="Show plan").click()
    expect(page.get_by_text(f"virsh blockcopy {guest.name} vda")).to_be_visible()
    seen.assert_accessible()
    seen.confirm("Copy and switch while the guest runs")
    seen.assert_accessible()
    assert (chain_of(guest), patterns(guest)) == (["moved.qcow2"], PATTERNS)

    open_page_of(guest, seen, "Change the settings of vda")
    page.get_by_label("detect_zeroes").select_option("unmap")
    page.get_by_role("button", name="Show plan").click()
    expect(page.get_by_text("detect_zeroes default → unmap")).to_be_visible()
    seen.assert_accessible()
    seen.confirm("Change a disk's settings")

    guest.stop()
    rest.scan()
    rest.quiet()
    open_page_of(guest, seen, "Switch vda back")
    seen.confirm("Switch back to the image before a copy")
    assert definition_of(guest) == "top.qcow2"

    rest.quiet()
    open_page_of(guest, seen, "Create…")
    page.get_by_label("Name", exact=True).fill("before")
    page.get_by_role("button", name="Show plan").click()
    seen.assert_accessible()
    seen.confirm("Create a snapshot")
    rest.quiet()
    open_page_of(guest, seen, "Go back to the snapshot before")
    page.get_by_label(f"Type “{guest.name}” to confirm").fill(guest.name)
    seen.confirm("Go back to a snapshot")


def test_a_snapshot_of_a_running_guest_is_created_and_merged(
    admin_tab: Callable[..., Tab], rest: Rest, chained: LibvirtGuest
) -> None:
    guest, seen = chained, admin_tab()
    page = seen.page
    open_page_of(guest, seen, "Create…")
    page.get_by_label("Name", exact=True).fill("before")
    page.get_by_label("Filesystems in the guest").select_option("false")
    page.get_by_role("button", name="Show plan").click()
    expect(page.get_by_text(f"virsh snapshot-create-as {guest.name} before")).to_be_visible()
    seen.confirm("Create a snapshot")
    assert chain_of(guest)[0] == "top.before"

    rest.quiet()
    open_page_of(guest, seen, "Delete the snapshot before")
    expect(page.get_by_text(f"virsh snapshot-delete {guest.name} before")).to_be_visible()
    seen.assert_accessible()
    page.get_by_label(f"Type “{guest.name}” to confirm").fill(guest.name)
    seen.confirm("Delete a snapshot")
    assert (chain_of(guest)[0], definition_of(guest), patterns(guest)) == ("top.qcow2", "top.qcow2", PATTERNS)


def test_a_block_job_is_taken_over_when_the_worker_is_back_and_its_page_follows(
    admin_tab: Callable[..., Tab], dashboard: Dashboard, rest: Rest, chained: LibvirtGuest
) -> None:
    guest = chained
    row = next(one for one in rest.get("guests/", limit=1000)["results"] if one["name"] == guest.name)
    options = {"disk": "vda", "bandwidth_bytes_sec": 1 << 20}
    job = rest.post("jobs/", {"kind": "live_flatten", "guest": row["id"], "options": options})
    wait_until(lambda: rest.get(f"jobs/{job['id']}/")["stage"] == "mirroring", 60, "QEMU copies")
    seen = admin_tab()
    seen.open(f"/jobs/{job['id']}/")
    expect(seen.page.locator("#status")).to_contain_text("running")
    for child in psutil.Process(dashboard.pid).children(recursive=True):
        if "celery" in " ".join(child.cmdline()):
            child.kill()
    expect(seen.page.locator("#status")).to_contain_text("succeeded", timeout=120_000)
    expect(seen.page.locator("body")).to_contain_text("taken over from the worker before")
    assert rest.finished(job)["state"] == "succeeded"
    assert (chain_of(guest), patterns(guest)) == (["top.qcow2"], PATTERNS)
