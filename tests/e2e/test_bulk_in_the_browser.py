"""Many images at once: one plan, one job each; some are cancelled on the way, one is undone."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser


@pytest.fixture
def slow_host(rest: Rest) -> Iterator[None]:
    """Jobs of this machine go one after the other, and no faster than 1 MiB a second."""
    host = rest.local()
    rest.patch(f"hosts/{host['id']}/", {"bandwidth_bytes_sec": disks.MIB, "max_jobs": 1})
    yield
    before = {name: host[name] for name in ("bandwidth_bytes_sec", "max_jobs")}
    rest.patch(f"hosts/{host['id']}/", before)


def choose_all(seen: Tab, search: str) -> None:
    """Selects all images that a search finds, and goes to their plan."""
    seen.open(f"/images/?search={search}")
    seen.page.get_by_label("Select all images on this page").check()
    seen.page.get_by_role("button", name="Reclaim selected…").click()


def job_of(seen: Tab, name: str) -> Locator:
    """The rows of an image's reclaim jobs in the list of jobs."""
    return seen.page.locator("tbody tr", has_text=name).filter(has_text="Reclaim")


def test_one_page_plans_many_and_jobs_are_cancelled_from_the_list_and_one_is_undone(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path, slow_host: None, tmp_path: Path
) -> None:
    slow = disks.noisy(shared_folder, "heap-slow.qcow2", zeros_mib=16, noise_mib=12)
    others = [disks.disk(shared_folder, f"heap-{number}.qcow2", zeros_mib=4, data_mib=1) for number in range(3)]
    lost = disks.disk(shared_folder, "heap-orphan.qcow2", base=others[0].name)
    disks.run("qemu-img", "rebase", "-u", "-f", "qcow2", "-b", "gone.qcow2", "-F", "qcow2", str(lost))
    disks.registered(rest, shared_folder)
    before = {path: path.read_bytes() for path in (slow, *others, lost)}
    content = disks.content_of(others[1], tmp_path / "content.raw")

    choose_all(seen, f"{shared_folder}/heap-")
    expect(page.get_by_role("heading", name="Reclaim 5 images")).to_be_visible()
    expect(page.locator("#refused")).to_contain_text("chain_broken")
    expect(page.locator("#refused")).to_contain_text("gone.qcow2 is missing")
    page.get_by_label("Reclaim heap-0.qcow2").uncheck()
    page.get_by_label("Method").select_option("compress")
    page.get_by_role("button", name="Update plan", exact=True).click()
    expect(page.get_by_role("heading", name="Reclaim 4 images")).to_be_visible()
    expect(seen.fact("Jobs")).to_contain_text("3")
    expect(seen.fact("Jobs")).to_contain_text("1 image refused")
    held = page.get_by_title(f"{sum(disks.physical(path) for path in (slow, *others[1:])):,} bytes")
    expect(seen.fact("Held by undo copies").locator(held)).to_be_visible()
    seen.assert_accessible()
    page.get_by_role("button", name="Reclaim 3 images").click()

    expect(page).to_have_url(re.compile(r"/jobs/$"))
    expect(page.locator("main")).to_contain_text("3 queued")
    expect(job_of(seen, slow.name)).to_contain_text("running", timeout=60_000)
    job_of(seen, others[2].name).get_by_role("button", name="Cancel").click()
    expect(job_of(seen, others[2].name)).to_contain_text("cancelled")
    expect(job_of(seen, slow.name)).to_contain_text(re.compile(r"running\s+[1-9]\d? %"))
    job_of(seen, slow.name).get_by_role("button", name="Cancel").click()
    expect(job_of(seen, slow.name)).to_contain_text(re.compile("cancelled"), timeout=20_000)
    expect(job_of(seen, others[1].name)).to_contain_text("succeeded", timeout=60_000)
    seen.assert_accessible()

    after = disks.physical(others[1])
    assert after < len(before[others[1]])
    assert disks.equal(others[1], content)
    job_of(seen, others[1].name).get_by_role("link", name=re.compile("Undo")).click()
    assert seen.exact("After") == after
    seen.undo()
    assert {path: path.read_bytes() for path in before} == before
    assert [file.name for file in shared_folder.glob(".sa-*")] == []


def test_undo_copies_stand_on_the_pools_page_until_they_are_discarded(
    seen: Tab, page: Page, rest: Rest, shared_folder: Path
) -> None:
    paths = [disks.disk(shared_folder, f"stack-{number}.qcow2", zeros_mib=8 * number) for number in (1, 2)]
    pool = disks.registered(rest, shared_folder)
    held = [disks.physical(path) for path in paths]
    copies = page.locator("#undo-copies")
    choose_all(seen, f"{shared_folder}/stack-")
    page.get_by_label("Method").select_option("compress")
    page.get_by_role("button", name="Update plan", exact=True).click()
    page.get_by_role("button", name="Reclaim 2 images").click()
    expect(page.locator("main")).to_contain_text("2 queued")
    for path in paths:
        undo = job_of(seen, path.name).get_by_role("link", name=re.compile("Undo"))
        expect(undo).to_be_visible(timeout=60_000)
    rest.quiet()

    seen.open(f"/pools/{pool['id']}/")
    titles = [title.get_attribute("title") for title in copies.locator("tbody td.n span[title]").all()]
    assert titles == [f"{size:,} bytes" for size in sorted(held, reverse=True)]
    assert sum(path.stat().st_blocks * 512 for path in shared_folder.glob(".sa-*.orig")) == sum(held)
    seen.assert_accessible()
    row = copies.locator("tbody tr", has_text=paths[1].name)
    row.get_by_text("Discard…").click()
    label = row.get_by_label(re.compile("Type “job"))
    label.fill("job 0")
    row.get_by_role("button", name="Discard undo copy").click()
    expect(page.locator("main")).to_contain_text("Not confirmed")
    assert len(seen.complaints) == 1  # the browser says that the answer was 400
    seen.complaints.clear()
    assert len(list(shared_folder.glob(".sa-*.orig"))) == len(paths)

    seen.open(f"/pools/{pool['id']}/")
    row.get_by_text("Discard…").click()
    name = re.search(r"job \d+", row.inner_text())
    assert name is not None
    label.fill(name.group())
    row.get_by_role("button", name="Discard undo copy").click()
    expect(page.locator("#status")).to_contain_text("succeeded", timeout=60_000)
    rest.quiet()
    seen.open(f"/pools/{pool['id']}/")
    expect(copies.locator("tbody tr")).to_have_count(1)
    assert [path.stat().st_blocks * 512 for path in shared_folder.glob(".sa-*.orig")] == [held[0]]
