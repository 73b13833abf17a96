"""What only a browser can tell: the policy refuses nothing, the console stays empty, axe finds nothing."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page

from images.rewrite import attached, planning
from storage_admin.hosts.models import StoragePool
from tests.factories import ImageFactory, JobFactory
from tests.web.browser import axe
from tests.web.conftest import ADMIN_PAGES, Filled, fill

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

HOSTILE = "\"><img src=x onerror=alert(1)><script>alert(2)</script>'{{7*7}}.qcow2"


def addresses(filled: Filled) -> list[str]:
    """Every page that only reads, and every plan; also those of an image whose chain is broken, and what was found."""
    name = filled.image.name
    lost = ImageFactory.create(
        pool=filled.pool, path=f"{filled.pool.path}/lost/{name}", name=name, state="chain_broken", backing_file=name,
        header={"bitmaps": [{"name": name, "in_use": False, "granularity": 65536}]},
    )  # fmt: skip
    StoragePool.objects.update(look_inside=True)
    part = {"number": 1, "volume": name[:128], "start": 0, "size": 1 << 30, "name": "ext4"}
    found = {"table": "gpt", "wrong": "", "parts": [part | {"filesystem_bytes": 1 << 30, "free_bytes": 1 << 20}]}
    JobFactory.create(kind="inside", target=filled.base, state="succeeded", result=found | {"fingerprint": ""})
    device = {"device": "nbd0", "path": "/dev/nbd0", "pid": 7, "size": 1 << 30, "read_only": True, "file": name}
    by_hand = device | dict.fromkeys(("dev", "inode", "job", "by", "at"))
    base = {"dev": int(filled.base.dev), "inode": int(filled.base.inode), "job": "j1", "by": name[:150], "at": 1e9}
    attached.note(filled.host.pk, {"attached": [device | base, by_hand]})
    kinds = [kind.name for kind in planning.rewriting_kinds()]
    plans = [f"/images/{image}/{kind}/" for image in (filled.image.pk, lost.pk) for kind in kinds]
    new = [
        f"/images/{lost.pk}/",
        "/images/attached/",
        *(f"/images/{filled.image.pk}/attach/{query}" for query in ("", "?writable=true")),
        f"/images/{filled.base.pk}/detach/",
        *(f"/pools/{filled.pool.pk}/{verb}/" for verb in ("create", "unpack", "upload", "from-device")),
    ]
    return filled.pages() + plans + new + ADMIN_PAGES


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.night)])
def test_axe_finds_nothing_and_nothing_is_refused(
    admins_page: Callable[..., Page], said: list[str], theme: str
) -> None:
    filled = fill()
    page = admins_page(color_scheme=theme)
    for address in addresses(filled):
        page.goto(address)
        assert page.locator("html").get_attribute("data-bs-theme") == theme
        assert axe(page) == [], address
        assert said == [], address


def test_a_hostile_name_opens_no_dialog_on_any_page(page: Page, said: list[str]) -> None:
    filled = fill(HOSTILE)
    for address in addresses(filled):
        page.goto(address)
        assert page.locator("img").count() == 0
        assert said == [], address
    assert page.locator("h1").count() == 1


@pytest.mark.parametrize("width", [1440, pytest.param(1024, marks=pytest.mark.night), 420])
def test_a_name_of_255_bytes_breaks_no_layout(page: Page, width: int) -> None:
    filled = fill("W" * 249 + ".qcow2")
    page.set_viewport_size({"width": width, "height": 900})
    too_wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    broken = []
    for address in addresses(filled):
        page.goto(address)
        if page.evaluate(too_wide):
            broken.append(address)
    assert broken == []


@pytest.mark.parametrize("name", ["vm-104-disk-0.qcow2", "W" * 249 + ".qcow2"])
def test_on_a_small_screen_what_can_be_done_with_an_image_is_in_sight(page: Page, name: str) -> None:
    filled = fill(name)
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto("/images/")
    button, box = page.locator(f".act a[href='/images/{filled.image.pk}/reclaim/']"), page.locator(".wide")
    edges = [found.evaluate("it => it.getBoundingClientRect().right") for found in (button, box)]
    assert edges[0] < edges[1]
    if len(name) < 30:
        assert box.evaluate("it => it.scrollWidth <= it.clientWidth")
        page.goto("/hosts/")
        for table in page.locator(".wide").all():
            assert table.evaluate("it => it.scrollWidth <= it.clientWidth"), table.inner_text()[:200]


def test_typing_filters_the_table_and_the_address_bar_says_so(page: Page) -> None:
    filled = fill()
    page.goto("/images/")
    assert page.locator("#table tbody tr").count() == 3
    page.fill("#search", filled.image.name)
    page.wait_for_url("**search=vm-104*")
    assert page.locator("#table tbody tr").count() == 1
    assert "pool=" not in page.url
    page.click("#table th a:has-text('Virtual')")
    page.wait_for_url("**ordering=-virtual_size*")
    assert "search=vm-104" in page.url
    page.go_back()
    page.wait_for_url("**ordering=-allocated_size*")
    assert page.locator("header.side").count() == 1


def test_a_job_page_moves_with_its_job_and_stops_with_it(page: Page) -> None:
    filled = fill()
    page.goto(f"/jobs/{filled.running.pk}/")
    assert page.locator("#percent").inner_text() == "46 %"
    type(filled.running).objects.filter(pk=filled.running.pk).update(progress=71, stage="verifying")
    page.wait_for_selector("#percent:has-text('71 %')")
    assert page.locator("#stage").inner_text() == "verifying"
    type(filled.running).objects.filter(pk=filled.running.pk).update(state="cancelled", commands=[])
    page.wait_for_selector("#status .chip:has-text('cancelled')")
    page.wait_for_function("document.querySelectorAll('#main [hx-trigger^=every]').length === 0")
    assert "None." in page.locator("#aside").inner_text()


def test_a_chosen_theme_stays(admins_page: Callable[..., Page]) -> None:
    page = admins_page(color_scheme="dark")
    page.goto("/jobs/")
    page.click("[data-theme-button]")
    assert page.locator("html").get_attribute("data-bs-theme") == "light"
    page.goto("/hosts/")
    assert page.locator("html").get_attribute("data-bs-theme") == "light"
