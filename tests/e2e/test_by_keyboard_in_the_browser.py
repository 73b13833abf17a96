"""Every flow from the overview to the end of its job, without a mouse; each takes as many steps as the table says."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.e2e import disks
from tests.e2e.browser import Tab
from tests.e2e.rest import Rest
from tests.harness.services import Dashboard

pytestmark = pytest.mark.browser

DOCS = Path(__file__).resolve().parents[2] / "docs/lists.md"
#: What the focus is on, as a reader of the screen is told.
NAME = """() => {
  const held = document.activeElement, own = held.cloneNode(true);
  own.querySelectorAll(".counted").forEach(count => count.remove());
  const label = held.getAttribute("aria-label") || (held.labels && held.labels[0] && held.labels[0].textContent);
  return (label || own.textContent || "").replace(/\\s+/g, " ").trim();
}"""
#: No page here has more places that Tab stops at.
MOST_STOPS = 400


class Keys:
    """Somebody at the keyboard, and how many links, buttons and boxes they have pressed since the overview."""

    def __init__(self, page: Page, base: str) -> None:
        self.page, self.base, self.steps = page, base, 0

    def start(self, *names: str) -> None:
        """Begins anew at the overview, and goes by links of these names from there."""
        self.page.goto(f"{self.base}/")
        self.steps = 0
        self.go_by(*names)

    def go_by(self, *names: str) -> None:
        """Presses one after the other, past the sidebar of each page that they lead to."""
        for name in names:
            self.press(name)
            self.into_main()

    def to(self, name: str) -> None:
        """Moves on, by Tab alone, until the focus is on what has this name.

        Raises:
            AssertionError: Tab does not get there.
        """
        seen = []
        for _ in range(MOST_STOPS):
            self.page.keyboard.press("Tab")
            now = str(self.page.evaluate(NAME))
            if now == name:
                return
            seen.append(now)
        raise AssertionError(f"Tab does not lead to {name!r} on {self.page.url}, but to {sorted(set(seen))}")

    def press(self, name: str) -> None:
        """Follows a link, or presses a button."""
        before = self.page.url
        self.to(name)
        self.page.keyboard.press("Enter")
        self.steps += 1
        expect(self.page).not_to_have_url(before)

    def into_main(self) -> None:
        """Past the sidebar, by the link that is there for it; that is no step of a flow."""
        self.to("Skip to content")
        self.page.keyboard.press("Enter")

    def tick(self, name: str) -> None:
        self.to(name)
        self.page.keyboard.press("Space")
        self.steps += 1

    def write(self, name: str, text: str) -> None:
        self.to(name)
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)

    def ended(self) -> None:
        """Waits until the page of a job says that it has succeeded."""
        expect(self.page.locator("#status")).to_contain_text("succeeded", timeout=120_000)


def counted() -> dict[str, int]:
    """The steps of each flow, as the table in the docs has them."""
    table = DOCS.read_text().partition("| flow |")[2]
    return {flow.strip(): int(steps) for flow, steps in re.findall(r"^\| ([^|]+) \| (\d+)", table, re.MULTILINE)}


def test_every_flow_is_walked_by_keyboard_to_its_end(
    admin_tab: Callable[..., Tab], rest: Rest, shared_folder: Path, dashboard: Dashboard
) -> None:
    disks.disk(shared_folder, "keys-0.qcow2", zeros_mib=30, data_mib=90)
    disks.disk(shared_folder, "keys-1.qcow2", zeros_mib=4, data_mib=1)
    disks.disk(shared_folder, "keys-2.qcow2", base="keys-1.qcow2", zeros_mib=0, data_mib=1)
    for number in (3, 4):
        disks.disk(shared_folder, f"keys-{number}.qcow2", zeros_mib=8, data_mib=1)
    disks.registered(rest, shared_folder)
    seen = admin_tab()
    keys, steps = Keys(seen.page, seen.base), dict[str, int]()

    def reached(flow: str) -> None:
        steps[flow] = keys.steps
        keys.ended()
        rest.quiet()

    def to_image(name: str) -> None:
        """Its page, as the first of the list that is ordered by size."""
        keys.start("Images")
        keys.to("Search by name or path")
        keys.page.keyboard.type(name)
        expect(keys.page).to_have_url(re.compile(f"search={name}"))
        expect(keys.page.locator("#table tbody tr")).to_have_count(1)
        keys.go_by(name)

    keys.start()
    keys.into_main()
    keys.go_by("Compress… keys-0.qcow2")
    keys.press("Compress keys-0.qcow2")
    reached("reclaim one image that the overview proposes")

    keys.start("Jobs")
    done = rest.get("jobs/", kind="reclaim")["results"][0]["id"]
    keys.go_by(f"{done} · Reclaim", "Undo: restore the original…")
    keys.press("Undo: restore the original")
    reached("undo a job")

    for kind, image, button in (
        ("Check…", "keys-1.qcow2", "Check keys-1.qcow2"),
        ("Convert…", "keys-1.qcow2", "Convert keys-1.qcow2"),
        ("Flatten…", "keys-2.qcow2", "Flatten keys-2.qcow2"),
    ):
        to_image(image)
        keys.go_by(kind)
        keys.press(button)
        reached("flatten, convert or check an image")

    keys.start("Images")
    keys.to("Search by name or path")
    keys.page.keyboard.type("keys-3")
    expect(keys.page.locator("#table tbody tr")).to_have_count(1)
    keys.tick("Select keys-3.qcow2")
    keys.go_by("Reclaim selected…")
    keys.press("Reclaim 1 image")
    steps["reclaim several images at once"] = keys.steps
    rest.quiet()
    assert rest.get("jobs/", kind="reclaim")["results"][0]["state"] == "succeeded"

    keys.start("Benchmarks", "Start a benchmark…")
    keys.write("Repetitions", "1")
    keys.write("Data per step (MiB)", "4")
    # A plan of what was typed comes a moment after the field was left; Confirm starts nothing else.
    with keys.page.expect_response(lambda one: "repetitions=1&" in one.url and "=4&" in one.url):
        keys.page.keyboard.press("Tab")
    expect(keys.page.locator(".htmx-request, .htmx-swapping, .htmx-settling")).to_have_count(0)
    keys.press("Start Cluster size")
    steps["start a benchmark"] = keys.steps
    keys.ended()

    keys.start("Policies", "New policy…")
    keys.write("Name", "by keyboard")
    keys.write("Names", "keys-4*")
    keys.write("Minimum savings (MiB)", "1")
    keys.press("Create policy")
    steps["make a policy"] = keys.steps
    keys.into_main()
    keys.go_by("Run now…")
    keys.press("Run now")
    steps["run a policy by hand"] = keys.steps
    expect(keys.page.locator("main")).to_contain_text("finished", timeout=120_000)
    expect(keys.page.get_by_role("region", name="Jobs").locator("tbody tr")).to_contain_text("succeeded")
    rest.quiet()

    keys.start("Orphans")
    if keys.page.get_by_role("link", name="Include them").count():
        # Orphans of a machine without a hypervisor, as this one may be, are one link further.
        keys.press("Include them")
        keys.steps -= 1
        keys.into_main()
    keys.go_by("Set keys-3.qcow2 aside…")
    keys.press("Set keys-3.qcow2 aside")
    reached("set an orphan aside")

    keys.start("Orphans")
    keys.press("Restore keys-3.qcow2")
    reached("restore what is set aside")

    image = rest.image("keys-3.qcow2")["id"]
    rest.finished(rest.post(f"images/{image}/set-aside/", {"grace_days": 1}))
    # The time after which it may be deleted has passed.
    dashboard.manage(
        "shell",
        "-c",
        f"from images.models import Image; Image.every.filter(pk={image}).update(aside_until='2020-01-01T00:00Z')",
    )
    keys.start("Orphans", "Delete keys-3.qcow2…")
    keys.write("Type “keys-3.qcow2” to confirm", "keys-3.qcow2")
    keys.press("Delete keys-3.qcow2")
    reached("delete what is set aside")

    table = counted()
    assert {flow: table.pop(flow) for flow in steps} == steps
    assert list(table) == ["add a host by ssh, with a key pair that is created for it"]  # test_hosts_in_the_browser.py
