"""A form that is refused tells all that is wrong, at its fields and by their labels, and keeps what was typed."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from playwright.sync_api import Page, expect

from storage_admin.accounts.models import Token, User
from storage_admin.events.models import Webhook
from tests.factories import HostFactory
from tests.web.browser import RUN_AXE, axe
from tests.web.conftest import Filled, fill

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]
#: A test takes every so many a form: a merge tries the first part of them.
PARTS = 6


@dataclass(frozen=True)
class Refused:
    """A form, what is typed into its fields by their names, and which of them are then told to be wrong.

    Args:
        button: what sends it; empty where the page plans by itself.
        form: which form of the page it is.
        wrong: names of fields; each of ``typed`` where none is given.
    """

    address: str
    button: str
    typed: dict[str, str]
    form: str = "main"
    wrong: tuple[str, ...] = ()


def forms_of(filled: Filled) -> list[Refused]:
    host, pool = filled.host, filled.pool
    return [
        Refused("/tokens/", "Create token", {"name": "", "expires_days": "soon"}),
        Refused("/users/", "Add user", {"username": "no body", "email": "nowhere"}),
        Refused(
            f"/users/{User.objects.get(username='changed').pk}/", "Save", {"email": "nowhere"},
        ),
        Refused("/webhooks/", "Add webhook", {"name": "", "url": "nowhere"}),
        Refused(f"/webhooks/{Webhook.objects.get().pk}/", "Save", {"name": " ", "url": "nowhere"}),
        Refused(
            "/hosts/", "Save", {"name": "", "max_jobs": "many", "bandwidth_mib": "1e"},
            form=f"form[action='/hosts/{host.pk}/']",
        ),
        Refused("/hosts/", "Register and scan", {"path": "srv"}, form=f"form[action='/hosts/{host.pk}/folders/']"),
        Refused(
            f"/pools/{pool.pk}/", "Save",
            {"name": "", "warn_percent": "x", "warn_days": "1000", "warn_overcommit": "lots", "warn_undo_percent": "0"},
        ),
        Refused(
            f"/pools/{pool.pk}/", "Remove pool", {"confirm": "another"},
            form=f"form[action='/pools/{pool.pk}/remove/']",
        ),
        Refused(f"/jobs/{filled.done.pk}/", "Discard undo copy", {"confirm": "it"}),
        Refused(f"/benchmarks/pools/{pool.pk}/", "Schedule", {"every_hours": "often"}),
        Refused("/benchmarks/paste/", "Save results", {"text": "1,2,3"}),
        Refused(
            "/policies/add/", "Create policy",
            {
                "name": "", "cron": "0 99 * * *", "timezone": "Mars/Olympus", "window_minutes": "long",
                "quiet_minutes": "", "option-undo_hours": "never", "option-bandwidth_bytes_sec": "fast",
                "min_reclaimable_mib": "all", "min_reclaimable_percent": "101", "max_jobs_per_host": "0",
            },
        ),
        Refused(
            f"/images/{filled.base.pk}/convert/", "Show plan",
            {"bandwidth_mib": "1e", "format_options": "cluster_size=3k"},
        ),
        Refused("/benchmarks/start/?kind=fio", "Show cost", {"repetitions": "x", "size_mib": "x", "seconds": "x"}),
        Refused("/hosts/add/", "Continue", {"name": "", "address": "", "port": "ssh"}),
        Refused("/password/", "Change password", {"old_password": "no", "new_password2": "x"},
                wrong=("old_password", "new_password1")),
        Refused("/images/", "", {"min_chain_depth": "deep", "max_chain_depth": "-1"}),
    ]  # fmt: skip


def states_of(filled: Filled) -> list[str]:
    """Addresses of plans with refusals and warnings, of filters that mean nothing, and of forms that are empty."""
    image, base = filled.image.pk, filled.base.pk
    return [
        f"/images/{image}/reclaim/", f"/images/{base}/reclaim/?undo_hours=0", f"/images/{image}/flatten/",
        f"/images/{image}/convert/?replace=true&undo_hours=0", f"/images/{image}/check/?repair=all",
        f"/images/{image}/set-aside/", f"/jobs/{filled.done.pk}/undo/", f"/jobs/{filled.done.pk}/undo/?force=1",
        "/images/?state=x&min_chain_depth=deep", "/jobs/?state=x", "/orphans/?age=x", "/ledger/?from=x",
        "/audit/?from=x", "/alerts/?kind=x", "/benchmarks/?kind=x", "/guests/?host=x", "/hosts/?kind=x",
        "/benchmarks/compare/?ids=x",
        "/benchmarks/start/?kind=fio&repetitions=x", "/images/999/", "/hosts/add/?kind=proxmox",
    ]  # fmt: skip


def look_at(page: Page, where: str) -> None:
    """The page as it is now: axe finds nothing, its colours stand out in the dark, and nothing is cut off."""
    assert axe(page) == [], where
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        expect(page.locator("html")).to_have_attribute("data-bs-theme", theme)
        if theme == "dark":
            assert page.evaluate(RUN_AXE.replace("{", "{runOnly: ['color-contrast'], ", 1)) == [], (
                f"{where} in the dark"
            )
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            # A chart follows its window a moment later.
            for _ in range(50):
                if fits := page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
                    break
                page.wait_for_timeout(100)
            assert fits, f"{where}, {width} wide"


def filled_in(page: Page, one: Refused) -> None:
    form = page.locator(one.form)
    for name, text in one.typed.items():
        field = form.locator(f"[name='{name}']:not([type=hidden])").first
        if not field.is_visible():
            field.locator("xpath=ancestor::details").locator("summary").first.click()
        field.fill(text)


@pytest.mark.sampled(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_form_tells_all_that_is_wrong_at_its_fields_and_keeps_what_was_typed(
    admins_page: Callable[..., Page], said: list[str], part: int
) -> None:
    filled = fill()
    HostFactory.create(name="another")
    User.objects.create_user("changed", role="viewer")
    tokens = Token.objects.count()
    page = admins_page(reduced_motion="reduce")
    for one in forms_of(filled)[part::PARTS]:
        page.goto(one.address)
        filled_in(page, one)
        if one.button:
            page.locator(one.form).get_by_role("button", name=one.button, exact=True).first.click()
        else:
            page.keyboard.press("Tab")
        for name in one.wrong or one.typed:
            field = page.locator(f"{one.form} [name='{name}']:not([type=hidden])").first
            where = f"{one.address} {name}"
            note = page.locator(f"[id='{field.get_attribute('id')}-wrong']")
            expect(note, where).to_be_visible()
            expect(field, where).to_have_attribute("aria-invalid", "true")
            if field.get_attribute("type") != "password" and name != "confirm":
                expect(field, where).to_have_value(one.typed[name])
            # Where all of it stands, the field is called as its label calls it.
            label = field.evaluate("(field) => field.labels[0].firstChild.textContent.trim()")
            expect(page.locator(".say", has=page.locator(f"[data-error-of='{name}']")).first, where).to_contain_text(
                label
            )
        assert page.locator("[type=number]").count() == 0, one.address
        look_at(page, f"{one.address} refused {one.button}")
    for address in states_of(filled)[part::PARTS]:
        page.goto(address)
        look_at(page, address)
    # Chromium writes the status of each refusal to its console, what is no date, and plans that nobody waited for.
    expected = ("status of 4", "does not conform to the required format", "htmx:")
    said[:] = [line for line in said if not any(one in line for one in expected)]
    assert Token.objects.count() == tokens
