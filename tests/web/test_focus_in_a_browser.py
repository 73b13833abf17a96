"""Whatever can be focused has a ring that stands out from what is around it, in the light and in the dark."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from tests.factories import ImageFactory
from tests.web.conftest import fill

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

#: Focuses each element in turn, and returns those whose ring is too thin, too faint or cut off.
FAULTS = """() => {
  const numbers = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const over = (top, below) => {
    const [r, g, b, a = 1] = top;
    return [r, g, b].map((part, at) => part * a + below[at] * (1 - a));
  };
  const ground = (element) => {
    if (!element) return [255, 255, 255];
    return over(numbers(getComputedStyle(element).backgroundColor), ground(element.parentElement));
  };
  const contrast = (one, other) => {
    const [dark, bright] = [light(one), light(other)].sort((a, b) => a - b);
    return (bright + 0.05) / (dark + 0.05);
  };
  const cut = (element, offset) => {
    const box = element.getBoundingClientRect();
    for (let outer = element.parentElement; outer; outer = outer.parentElement) {
      const style = getComputedStyle(outer);
      if (style.overflowX === "visible" && style.overflowY === "visible") continue;
      // What scrolls can be scrolled: only what never shows is cut off.
      const room = outer.getBoundingClientRect();
      const scrolls = /auto|scroll/.test(style.overflowX + style.overflowY);
      if (!scrolls && outer !== document.body && outer !== document.documentElement &&
          (box.left - offset < room.left - 0.5 || box.right + offset > room.right + 0.5)) return true;
    }
    return false;
  };
  const all = document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex='0']");
  const found = [];
  let seen = 0;
  for (const element of all) {
    if (element.disabled || element.tabIndex < 0 || !element.checkVisibility()) continue;
    element.focus();
    if (document.activeElement !== element || !element.matches(":focus-visible")) continue;
    seen += 1;
    const style = getComputedStyle(element);
    const width = parseFloat(style.outlineWidth), offset = parseFloat(style.outlineOffset);
    const around = offset < 0 ? ground(element) : ground(element.parentElement);
    const ratio = contrast(numbers(style.outlineColor), around);
    if (style.outlineStyle !== "solid" || width < 2 || ratio < 3 || cut(element, Math.max(offset + width, 0)))
      found.push(`${ratio.toFixed(1)} ${width} ${style.outlineStyle} ${element.outerHTML.slice(0, 120)}`);
  }
  return [seen, found];
}"""


#: What has rings of its own: a list, a form, a plan.
FEW = ("/images/", "/policies/add/", "convert")


@pytest.mark.parametrize(
    ("theme", "only"), [("light", ()), ("dark", FEW), pytest.param("dark", (), marks=pytest.mark.night)]
)
def test_whatever_can_be_focused_has_a_ring_of_three_to_one(
    admins_page: Callable[..., Page], theme: str, only: tuple[str, ...]
) -> None:
    filled = fill()
    ImageFactory.create(pool=filled.pool, name="nobodys.qcow2", orphan=True)
    page = admins_page(color_scheme=theme)
    pages = {
        "/": 15, "/images/": 30, f"/images/{filled.image.pk}/": 20, "/hosts/": 20, "/hosts/add/": 20,
        f"/images/{filled.base.pk}/convert/": 20, "/policies/add/": 30, f"/jobs/{filled.done.pk}/": 15,
        "/webhooks/": 20, f"/pools/{filled.pool.pk}/": 20, "/benchmarks/start/": 20, "/orphans/": 20, "/ledger/": 20,
        "/jobs/": 20, f"/jobs/{filled.done.pk}/undo/": 15, "/alerts/": 15, "/guests/": 20,
    }  # fmt: skip
    for address, at_least in pages.items():
        if only and not any(address.rstrip("/").endswith(part.rstrip("/")) for part in only):
            continue
        page.goto(address)
        check(page, at_least, address)
    if not only:
        page.goto("/images/")
        page.get_by_label("Select all images on this page").check()
        page.get_by_role("button", name="Reclaim selected…").click()
        page.wait_for_url("**/images/reclaim/")
        check(page, 15, "many plans")
        page.context.clear_cookies()
        page.goto("/login/")
        check(page, 3, "sign in")


def check(page: Page, at_least: int, what: str) -> None:
    """Holds that a page has so many elements that can be focused, each with its ring."""
    page.keyboard.press("Tab")  # from now on rings are shown, as for somebody who uses the keyboard
    seen, faults = page.evaluate(FAULTS)
    assert faults == [], what
    assert seen >= at_least, what
