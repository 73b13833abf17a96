"""A matrix started, watched and read through the pages, and compared with the run after it."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest

pytestmark = pytest.mark.browser

#: What Chart.js itself holds of a canvas, and how many of its pixels are painted.
_DRAWN = """(id) => {
  const canvas = document.querySelector(`canvas[data-chart="${id}"]`);
  const chart = canvas && window.Chart.getChart(canvas);
  if (!chart) return null;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let painted = 0;
  for (let at = 3; at < pixels.length; at += 4) if (pixels[at] > 0) painted += 1;
  return {
    type: chart.config.type,
    labels: chart.data.labels || [],
    painted: painted / (canvas.width * canvas.height),
    sets: chart.data.datasets.map((set, index) => ({
      label: set.label,
      data: set.data,
      hatched: set.backgroundColor instanceof CanvasPattern,
      heights: chart.getDatasetMeta(index).data.map((bar) => (bar.base === undefined ? null : bar.base - bar.y)),
    })),
  };
}"""


def drawn(seen: Tab, chart: str) -> dict[str, Any]:
    """The chart as the browser has drawn it."""
    expect(seen.page.locator(f'canvas[data-chart="{chart}"]')).to_be_visible()
    found = seen.page.evaluate(_DRAWN, chart)
    assert found, f"{chart} is not drawn"
    return dict(found)


def rates_of(rest: Rest, run: int) -> dict[str, float]:
    """The write rate of each preallocation, as REST tells it."""
    rows = rest.get(f"benchmarks/{run}/results/")["results"]
    return {row["setting"]["preallocation"]: row["median"] for row in rows if row["metric"] == "write_rate"}


def started(seen: Tab, pool: dict[str, Any]) -> int:
    """From the list over the costs to a run that has ended; its number."""
    page = seen.page
    seen.open("/benchmarks/")
    page.get_by_role("link", name="Start a benchmark…").click()
    page.get_by_label("Pool", exact=True).select_option(str(pool["id"]))
    page.get_by_label("Kind", exact=True).select_option("preallocation")
    page.get_by_label("Data per step (MiB)").fill("8")
    page.get_by_label("Repetitions").fill("2")
    plan = page.locator("#plan")
    # Four images of 32 MiB: 8 are written into each, one is written full before; all of it twice.
    expect(plan.locator("#cost-written")).to_contain_text("128 MiB")
    expect(plan).to_contain_text("No image is read or written.")
    seen.assert_accessible()
    plan.get_by_role("button", name="Start Preallocation").click()
    expect(page).to_have_url(re.compile(r"/benchmarks/\d+/$"))
    # The page is not loaded again: what follows came by itself.
    page.evaluate("window.stayed = true")
    expect(page.locator("#status")).to_contain_text("succeeded", timeout=120_000)
    expect(page.locator("#advice")).to_be_visible()
    assert page.evaluate("window.stayed") is True
    return int(page.url.rstrip("/").rsplit("/", 1)[1])


def test_a_matrix_is_started_watched_read_and_compared(seen: Tab, page: Page, rest: Rest, shared_folder: Path) -> None:
    kept = disks.disk(shared_folder, "kept.qcow2")
    before = kept.read_bytes()
    pool = disks.registered(rest, shared_folder)

    first = started(seen, pool)
    rates = rates_of(rest, first)
    assert set(rates) == {"off", "metadata", "falloc", "full"}
    chart = drawn(seen, "chart-write_rate")
    mine, published = chart["sets"]
    assert chart["type"] == "bar"
    assert dict(zip(chart["labels"], mine["data"], strict=True)) == rates
    assert (mine["hatched"], published["hatched"]) == (False, True)
    assert chart["painted"] > 0.02
    highest = max(rates, key=lambda name: rates[name])
    assert max(mine["heights"]) == mine["heights"][chart["labels"].index(highest)] > 50
    expect(page.locator("#aside")).to_contain_text("Load before")
    expect(page.locator("#aside")).to_contain_text("qemu-img")
    seen.assert_accessible()

    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    assert {row["setting"]: float(row["median"]) for row in rows if row["metric"] == "write_rate"} == rates
    page.get_by_role("link", name="Hide").click()
    assert [one["label"] for one in drawn(seen, "chart-write_rate")["sets"]] == ["this run"]

    second = started(seen, pool)
    seen.open("/benchmarks/")
    for number in (first, second):
        page.get_by_label(f"Compare run {number}").check()
    page.get_by_role("button", name="Compare selected").click()
    expect(page.get_by_role("heading", name="2 runs side by side")).to_be_visible()
    compared = drawn(seen, "chart-write_rate")
    assert len(compared["sets"]) == 3
    told = [[rates_of(rest, number)[name] for name in compared["labels"]] for number in (first, second)]
    assert [one["data"] for one in compared["sets"][:2]] in (told, told[::-1])
    seen.assert_accessible()

    seen.open(f"/benchmarks/pools/{pool['id']}/")
    lines = drawn(seen, "history-write_rate")
    assert lines["type"] == "line"
    assert {len(one["data"]) for one in lines["sets"]} == {2}
    seen.assert_accessible()

    # All of it was done beside the image, and nothing is left of it.
    assert kept.read_bytes() == before
    assert [path.name for path in shared_folder.iterdir()] == ["kept.qcow2"]


def test_what_boots_is_asked_for_a_boot_storm_alone(seen: Tab, page: Page, rest: Rest, shared_folder: Path) -> None:
    disks.disk(shared_folder, "template.qcow2")
    pool = disks.registered(rest, shared_folder)
    (image,) = [row for row in rest.get(f"images/?pool={pool['id']}")["results"] if row["name"] == "template.qcow2"]
    seen.open(f"/benchmarks/start/?pool={pool['id']}")
    fields = [page.locator(f"#boot_{name}") for name in ("image", "guests", "pattern", "kernel", "append")]
    for field in fields:
        expect(field).to_be_hidden()
    page.get_by_label("Kind", exact=True).select_option("boot")
    for field in fields:
        expect(field).to_be_visible()
    plan = page.locator("#plan")
    expect(plan).to_contain_text("choose what boots")
    page.get_by_label("Image to boot (ID)").fill(str(image["id"]))
    page.get_by_label("Concurrent guests").fill("1, 3")
    page.get_by_label("Concurrent guests").press("Tab")
    expect(plan).to_contain_text("3 guests of 256 MiB need 960 MiB of memory")
    expect(plan.locator("#cost-scratch")).to_be_visible()
    seen.assert_accessible()
    page.get_by_label("Kind", exact=True).select_option("dd")
    for field in fields:
        expect(field).to_be_hidden()
