"""What is typed is what a job gets: Confirm, right after a value was typed, starts nothing that was not shown."""

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from images.models import Image
from storage_admin.jobs.models import Job
from storage_admin.web.page import NOT_PLANNED
from tests.factories import GIB, ImageFactory, StoragePoolFactory

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

#: The page's kind, the field that is typed into, what is typed, the option that the job gets of it.
TYPED = [
    ("reclaim", "Keep the undo copy (hours)", "7", "undo_hours", 7),
    ("flatten", "Bandwidth limit (MiB/s)", "5", "bandwidth_bytes_sec", 5 << 20),
    ("convert", "Format options", "cluster_size=2M", "format_options", {"cluster_size": "2M"}),
    ("check", "Bandwidth limit (MiB/s)", "3", "bandwidth_bytes_sec", 3 << 20),
    ("benchmark", "Repetitions", "3", "repetitions", 3),
]


@pytest.fixture
def page(page: Page) -> Page:
    """A tab to which no plan comes by itself: Confirm is always quicker."""
    page.route("**", lambda route: None if "hx-request" in route.request.headers else route.continue_())
    return page


def opened(page: Page, kind: str) -> Page:
    """The page of a plan that can be confirmed."""
    pool = StoragePoolFactory.create(available_bytes=400 * GIB, capacity_bytes=1000 * GIB)
    base = ImageFactory.create(pool=pool, name="base.qcow2", overlays_count=1)
    image = ImageFactory.create(pool=pool, name="top.qcow2", backing=base)
    page.goto(f"/benchmarks/start/?pool={pool.pk}&kind=dd" if kind == "benchmark" else f"/images/{image.pk}/{kind}/")
    return page


@pytest.mark.parametrize(("kind", "label", "typed", "option", "wanted"), TYPED)
def test_what_is_typed_right_before_confirm_is_planned_first_and_then_what_the_job_gets(
    page: Page, kind: str, label: str, typed: str, option: str, wanted: object
) -> None:
    confirm = opened(page, kind).locator("#plan button.btn-primary")
    page.get_by_label(label).press("Control+a")
    page.get_by_label(label).press_sequentially(typed)
    confirm.click()
    expect(page.get_by_text(NOT_PLANNED)).to_be_visible()
    assert not Job.objects.exists()
    expect(page.get_by_label(label)).to_have_value(typed)
    confirm.click()
    page.wait_for_url("**/jobs/*/" if kind != "benchmark" else "**/benchmarks/*/")
    assert Job.objects.get().options[option] == wanted


def test_a_look_that_answers_late_does_not_bring_back_the_plan_of_what_was_chosen_before(
    admins_page: Callable[..., Page],
) -> None:
    page = admins_page()
    held: list[Route] = []
    page.route("**look=1**", lambda route: route.continue_() if held else held.append(route))
    plan = opened(page, "reclaim").locator("#plan")
    page.get_by_label("Keep the undo copy (hours)").fill("0")
    page.get_by_label("Keep the undo copy (hours)").press("Tab")
    without = page.get_by_label("without an undo copy")
    expect(without).to_be_visible()
    page.get_by_label("Keep the undo copy (hours)").fill("9")
    Image.objects.update(allocated_size=5 * GIB)  # so that the look has something else to show
    with page.expect_response(lambda answer: "look=1" in answer.url and "undo_hours=9" in answer.url):
        with page.expect_response("**look=1**"):
            held[0].continue_()
        expect(without).to_be_visible()
        page.get_by_label("Keep the undo copy (hours)").press("Tab")
    expect(plan).to_contain_text("5 GiB")
    expect(without).to_be_hidden()


def test_enter_in_a_field_shows_the_plan_and_never_starts_it(page: Page) -> None:
    field = opened(page, "reclaim").get_by_label("Keep the undo copy (hours)")
    for hours in ("9", "9", "11"):
        field.fill(hours)
        with page.expect_navigation():
            field.press("Enter")
        expect(page.locator("#plan")).to_contain_text("holds")
    assert not Job.objects.exists()
    page.locator("#plan button.btn-primary").click()
    page.wait_for_url("**/jobs/*/")
    assert Job.objects.get().options["undo_hours"] == 11


def test_a_bulk_plan_starts_what_it_shows_and_asks_before_originals_go(page: Page) -> None:
    pool = StoragePoolFactory.create(available_bytes=400 * GIB, capacity_bytes=1000 * GIB)
    images = [ImageFactory.create(pool=pool, name=f"bulk-{number}.qcow2") for number in range(3)]
    page.goto("/images/")
    page.get_by_label("Select all images on this page").check()
    page.get_by_role("button", name="Reclaim selected…").click()
    confirm, main = page.locator("[data-confirm]"), page.locator("main")
    row = page.locator("tbody tr", has_text="bulk-0.qcow2")
    expect(row).to_contain_text(pool.name)
    expect(row).to_contain_text(pool.host.name)
    expect(main).to_contain_text("Undo copies are kept for 24 hours")

    page.get_by_label("Keep undo copies (hours)").fill("0")
    confirm.click()
    expect(page.get_by_text(NOT_PLANNED)).to_be_visible()
    expect(main).to_contain_text("No undo copies are kept")
    confirm.click()
    expect(main).to_contain_text("images are replaced without an undo copy: 3")
    assert not Job.objects.exists()

    page.get_by_label("Reclaim bulk-1.qcow2").uncheck()
    expect(confirm).to_have_text("Update plan for 2 images")
    page.get_by_label("Reclaim bulk-1.qcow2").check()
    expect(confirm).to_have_text("Reclaim 3 images")
    page.get_by_label("Reclaim bulk-1.qcow2").uncheck()
    confirm.click()
    expect(page.get_by_role("heading", name="Reclaim 2 images")).to_be_visible()
    assert not Job.objects.exists()
    page.get_by_label("Replace 2 originals without an undo copy").check()
    confirm.click()
    page.wait_for_url("**/jobs/")
    jobs = Job.objects.filter(kind="reclaim")
    assert {job.target_id for job in jobs} == {images[0].pk, images[2].pk}
    assert {job.options["undo_hours"] for job in jobs} == {0}


def test_all_that_is_wrong_is_said_at_once_and_beside_its_fields(admins_page: Callable[..., Page]) -> None:
    page = admins_page()
    opened(page, "convert")
    hours, speed = page.locator("#wait_hours"), page.locator("#bandwidth_mib")
    page.get_by_label("If a guest is running").select_option("wait")
    page.get_by_label("Format options").fill("cluster_size=3k,refcount_bits=3")
    hours.fill("many")
    speed.fill("1e")
    speed.press("Tab")
    expect(page.locator("#plan .say.bad [data-error-of]")).to_have_count(3)
    notes = page.locator(".field-error")
    expect(notes).to_have_count(3)
    expect(page.locator("#format_options-wrong")).to_contain_text("cluster_size: choose a power of two")
    expect(page.locator("#format_options-wrong")).to_contain_text("refcount_bits: choose a power of two")
    for field, was in ((hours, "many"), (speed, "1e")):
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_have_accessible_description(re.compile("Enter a number"))
        expect(field).to_have_value(was)
    page.get_by_label("Format options").fill("cluster_size=2M")
    hours.fill("3")
    speed.fill("")
    speed.press("Tab")
    expect(notes).to_have_count(0)
    expect(page.locator("#plan")).to_contain_text("cluster_size=2M")
    expect(speed).not_to_have_attribute("aria-invalid", "true")


def test_a_policys_errors_stand_beside_its_fields(admins_page: Callable[..., Page], said: list[str]) -> None:
    page = admins_page()
    page.goto("/policies/add/")
    page.get_by_label("Opens (minute").fill("0 99 * * *")
    page.get_by_label("Duration (minutes)").fill("")
    page.get_by_role("button", name="Create policy").click()
    expect(page.get_by_text("Not saved.")).to_be_visible()
    expect(page.locator("#window_minutes")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#window_minutes-wrong")).to_be_visible()
    assert ["400" in text for text in said] == [True]  # that it was refused
    said.clear()
