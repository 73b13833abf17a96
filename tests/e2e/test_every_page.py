from collections.abc import Callable

import pytest
from playwright.sync_api import Browser

from tests.chance import night
from tests.e2e.browser import Tab, Theme, tab
from tests.e2e.rest import Rest
from tests.harness.services import Dashboard

pytestmark = pytest.mark.browser

PAGES = (
    "/", "/images/", "/images/?search=nothing-is-called-this", "/images/{mail}/", "/images/{broken}/", "/images/{odd}/",
    "/images/{leaf}/", "/images/{mail}/reclaim/", "/images/{leaf}/flatten/",
    "/images/{leaf}/convert/", "/images/{leaf}/check/", "/images/{broken}/reclaim/",
    "/orphans/", "/jobs/", "/jobs/{job}/", "/ledger/", "/ledger/?held=true", "/hosts/",
    "/benchmarks/", "/benchmarks/start/", "/benchmarks/paste/", "/benchmarks/compare/", "/benchmarks/pools/{pool}/",
    "/policies/", "/policies/add/", "/pools/{pool}/", "/guests/", "/alerts/",
    "/webhooks/", "/tokens/", "/users/", "/audit/", "/password/", "/account/",
)  # fmt: skip


@pytest.fixture(scope="module")
def places(rest: Rest) -> dict[str, int]:
    """The ids that stand in the pages' addresses."""
    mail = rest.image("mail.qcow2")
    return {
        "mail": mail["id"],
        "broken": rest.image("shop.qcow2")["id"],
        "odd": rest.image("Müller & Söhne, Büro <neu>.qcow2")["id"],
        "leaf": rest.image("web-02-hotfix.qcow2")["id"],
        "job": rest.get("jobs/")["results"][0]["id"],
        "pool": mail["pool"] if isinstance(mail["pool"], int) else mail["pool"]["id"],
    }


@pytest.mark.sampled(5)  # of a made-up world all of them are looked at before a merge (tests/web)
@pytest.mark.parametrize("address", PAGES)
def test_axe_finds_nothing_and_the_console_is_silent(
    admin_tab: Callable[[Theme], Tab], places: dict[str, int], address: str
) -> None:
    seen = admin_tab("light")
    seen.open(address.format(**places))
    seen.page.wait_for_load_state("networkidle")
    assert seen.page.locator("html").get_attribute("data-bs-theme") == "light"
    assert seen.faults_of_accessibility() == []
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
    if not night():
        return
    seen.page.emulate_media(color_scheme="dark")
    seen.page.reload()
    assert seen.page.locator("html").get_attribute("data-bs-theme") == "dark"
    assert seen.faults_of_accessibility("color-contrast") == []


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.night)])
def test_axe_finds_nothing_on_the_way_in(browser_process: Browser, dashboard: Dashboard, theme: Theme) -> None:
    with tab(browser_process, dashboard.url, theme) as seen:
        seen.open("/login/")
        assert seen.faults_of_accessibility() == []
        assert seen.complaints == []


def test_rest_can_be_tried_out_in_the_browser(admin_tab: Callable[[Theme], Tab]) -> None:
    seen = admin_tab("light")
    seen.open("/api/v1/docs/")
    seen.page.get_by_text("/api/v1/images/", exact=True).first.wait_for()
