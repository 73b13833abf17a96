"""Headless Chromium on a running dashboard; everything that its console complains about is kept."""

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

from tests.chance import night

CHROMIUM = "/usr/bin/chromium"
#: Text is smoothed in grey, so that pictures compress.
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-lcd-text",
)  # fmt: skip
AXE = Path(__file__).resolve().parents[2] / "node_modules/axe-core/axe.min.js"

Theme = Literal["light", "dark"]

# A machine that does other work as well is slow; who waits for nothing waits no longer for that.
expect.set_options(timeout=60_000)

_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", (event) =>
  console.error("policy violated: " + event.violatedDirective + " " + event.blockedURI + " " + event.sourceFile))
"""


def is_error(said: ConsoleMessage) -> bool:
    """Whether it is one. A request that ends because its page is left is none; htmx says these two words of it."""
    return said.type == "error" and not said.text.startswith(("htmx:afterRequest", "htmx:sendAbort"))


@dataclass(frozen=True)
class Tab:
    """A page of the browser, with what went wrong in it so far."""

    page: Page
    base: str
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        """Goes to an address of the dashboard.

        Raises:
            AssertionError: it does not answer with a page.
        """
        answer = self.page.goto(self.base + path)
        assert answer is not None
        assert answer.ok, f"{path}: {answer.status}"

    def log_in(self, user: str, password: str) -> None:
        self.open("/")
        self.page.get_by_label("User name").fill(user)
        self.page.get_by_label("Password").fill(password)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(self.base + "/")

    def fact(self, term: str) -> Locator:
        """What stands beside a term in a list of facts."""
        named = self.page.locator("dt", has_text=re.compile(f"^{re.escape(term)}$"))
        return self.page.locator("dl.facts > div", has=named).locator("dd")

    def exact(self, term: str) -> int:
        """The exact bytes beside a term in a list of facts."""
        fact = self.fact(term)
        shown = fact.first.inner_text()
        return 0 if shown.startswith("0 B") else int(fact.locator(".sub").first.inner_text().replace(",", ""))

    def confirm(self, button: str, says: str = "succeeded") -> None:
        """Presses what starts a job, and waits until the job's page says that it went as it should."""
        self.page.get_by_role("button", name=button).click()
        expect(self.page).to_have_url(re.compile(r"/jobs/\d+/$"))
        expect(self.page.locator("#status")).to_contain_text(says, timeout=60_000)

    def image_page(self, path: Path) -> None:
        """Goes to the page of an image, by its path in the list."""
        self.open(f"/images/?search={path}")
        self.page.get_by_role("link", name=path.name, exact=True).click()

    def plan_of(self, path: Path, job: str) -> None:
        """From the page of an image to the plan of a job, by the link of that name."""
        self.image_page(path)
        self.page.get_by_role("link", name=job).click()
        expect(self.page.get_by_role("heading", name=re.compile("· Plan"))).to_be_visible()

    def undo(self, link: str = "Undo: restore the original") -> None:
        """From the page of a job, or of its image, over the plan to the end of the undo."""
        self.page.get_by_role("link", name=link).click()
        self.confirm("Undo: restore the original")
        expect(self.page.get_by_role("heading", name=re.compile("Undo"))).to_be_visible()

    def row(self, name: str) -> Locator:
        """The row of a table that has a link of that name."""
        return self.page.locator("tbody tr", has=self.page.get_by_role("link", name=name, exact=True))

    def reload_until(self, shown: Locator, seconds: float = 30) -> None:
        """Loads a page that does not refresh itself again until something is on it."""
        deadline = time.monotonic() + seconds
        while not shown.first.is_visible():
            assert time.monotonic() < deadline, f"{shown} is not on {self.page.url}"
            self.page.wait_for_timeout(250)
            self.page.reload()

    def assert_accessible(self) -> None:
        """Axe finds nothing in the light, nor, at night, in the dark; the page is no wider than a phone."""
        assert not (found := self.faults_of_accessibility()), found
        for width in (420, 1440):
            self.page.set_viewport_size({"width": width, "height": 1000})
            # A chart follows its window a moment later.
            self._wait_until_it_fits()
        if not night():
            return
        self.page.emulate_media(color_scheme="dark")
        expect(self.page.locator("html")).to_have_attribute("data-bs-theme", "dark")
        assert not (found := self.faults_of_accessibility("color-contrast")), found
        self.page.emulate_media(color_scheme="light")
        expect(self.page.locator("html")).to_have_attribute("data-bs-theme", "light")

    def _wait_until_it_fits(self) -> None:
        """Asked from here: a page whose policy allows no eval cannot be told to look again and again by itself."""
        deadline = time.monotonic() + 20
        while not self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
            assert time.monotonic() < deadline, f"{self.page.url} is wider than its window"
            self.page.wait_for_timeout(50)

    def faults_of_accessibility(self, *rules: str) -> list[str]:
        """What axe finds on the page as it is; with ``rules``, by these alone."""
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("rules => axe.run(document, rules.length ? {runOnly: rules} : {})", list(rules))
        return [
            f"{fault['id']} ({fault['impact']}): {fault['help']}: {node['html'][:160]}"
            for fault in found["violations"]
            for node in fault["nodes"][:3]
        ]


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that talks to nobody but the dashboard."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def tab(browser: Browser, base: str, theme: Theme = "light", state: Path | None = None) -> Iterator[Tab]:
    """A fresh tab with cookies of its own, or with those of ``state``."""
    context = browser.new_context(
        color_scheme=theme, viewport={"width": 1440, "height": 1000}, storage_state=state, reduced_motion="reduce"
    )
    context.set_default_timeout(60_000)
    try:
        page = context.new_page()
        page.add_init_script(_VIOLATIONS)
        opened = Tab(page, base)
        page.on("console", lambda said: opened.complaints.append(said.text) if is_error(said) else None)
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        yield opened
    finally:
        context.close()
