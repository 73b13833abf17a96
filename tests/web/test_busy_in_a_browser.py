"""What shows a job's work refreshes itself when the job ends, without a reload."""

import pytest
from django.urls import reverse
from django.utils import timezone
from playwright.sync_api import Locator, Page, expect

from images.models import Image
from images.rewrite import record
from storage_admin.jobs.models import Job
from tests.factories import (
    GIB,
    ImageFactory,
    ImageUseFactory,
    JobFactory,
    PolicyFactory,
    PolicyPickFactory,
    PolicyRunFactory,
    ResourceLockFactory,
)

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


def at_work(image: Image, kind: str = "reclaim") -> Job:
    """A job that has the image."""
    job = JobFactory.create(kind=kind, target=image, state="running", progress=42.0)
    ResourceLockFactory.create(job=job, key=f"image:{image.pk}")
    return job


def chip_of(page: Page, job: Job) -> Locator:
    """Where the page says that a job is at work."""
    chip = page.locator(f"main .chip[href='/jobs/{job.pk}/']")
    expect(chip.first).to_contain_text("42 %")
    return chip


@pytest.mark.parametrize("place", ["/images/", "/images/{}/", "/"])
def test_an_action_comes_back_when_the_job_ends(page: Page, place: str) -> None:
    image = ImageFactory.create(
        name="busy.qcow2", allocated_size=9 * GIB, reclaimable_bytes=3 * GIB, reclaimable_method="compress"
    )
    job = at_work(image)
    page.goto(place.format(image.pk))
    action = page.locator(f"main a.btn[href='/images/{image.pk}/reclaim/']")
    busy = chip_of(page, job)
    expect(action).to_have_count(0)
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    expect(action).to_have_count(1, timeout=60_000)
    expect(busy).to_have_count(0)


@pytest.mark.parametrize("place", ["/guests/", "/guests/{}/"])
def test_a_guests_pages_refresh_themselves_when_a_job_ends(page: Page, place: str) -> None:
    use = ImageUseFactory.create()
    job = at_work(use.image)
    page.goto(place.format(use.disk.guest_id))
    busy = chip_of(page, job)
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    expect(busy).to_have_count(0, timeout=60_000)


def test_the_last_orphan_goes_from_the_page_with_its_job(page: Page) -> None:
    image = ImageFactory.create(name="nobodys.qcow2", orphan=True)
    job = at_work(image, "set_aside")
    page.goto("/orphans/?everywhere=true")
    row = page.locator(f"main a.name[href='/images/{image.pk}/']")
    expect(row).to_have_count(1)
    Image.objects.filter(pk=image.pk).update(orphan=False)
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    expect(row).to_have_count(0, timeout=60_000)


#: Plan pages: the field that is typed into.
PLANS = {"/images/{}/reclaim/": "Keep the undo copy (hours)", "/images/{}/set-aside/": "Grace period before deletion"}


@pytest.mark.parametrize("place", PLANS)
def test_a_plan_page_shows_that_the_job_has_ended_and_keeps_what_was_typed(page: Page, place: str) -> None:
    image = ImageFactory.create(name="busy.qcow2", orphan=True, state="modifying", allocated_size=9 * GIB)
    job = at_work(image)
    page.goto(place.format(image.pk))
    busy, plan = chip_of(page, job), page.locator("#plan")
    expect(plan).to_contain_text("busy")
    field = page.get_by_label(PLANS[place])
    field.fill("17")
    field.press("End")
    Image.objects.filter(pk=image.pk).update(state="ok")
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    expect(busy).to_have_count(0, timeout=60_000)
    expect(plan.locator("button.btn-primary")).to_be_enabled()
    expect(plan.locator(".say.bad")).to_have_count(0)
    expect(field).to_have_value("17")
    expect(field).to_be_focused()


def test_an_images_page_shows_what_a_look_has_found_while_it_is_open(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = ImageFactory.create(name="read.qcow2", in_use=True, in_use_detail="process 7 (tar)", state="missing")
    looks: list[int] = []

    def look(rows: list[Image]) -> frozenset[int]:
        looks.extend(row.pk for row in rows)
        Image.objects.filter(pk=image.pk).update(in_use=False, in_use_detail="", state="ok")
        return frozenset()

    monkeypatch.setattr("images.scan.look.at", look)
    page.goto(f"/images/{image.pk}/")
    expect(page.locator(f"a.btn[href='/images/{image.pk}/check/']")).to_have_count(1, timeout=60_000)
    expect(page.locator("#image-head")).not_to_contain_text("in use")
    expect(page.locator("#image-notes")).not_to_contain_text("not found")
    assert looks == [image.pk]


def test_many_plans_follow_a_job_and_keep_ticks_and_what_was_typed(page: Page) -> None:
    first = ImageFactory.create(name="first.qcow2")
    left = ImageFactory.create(name="left.qcow2", pool=first.pool)
    image = ImageFactory.create(name="busy.qcow2", pool=first.pool, state="modifying")
    job = at_work(image)
    page.goto("/images/")
    page.get_by_label("Select all images on this page").check()
    page.get_by_role("button", name="Reclaim selected…").click()
    page.wait_for_url("**/images/reclaim/")
    busy, hours = chip_of(page, job), page.locator("#undo_hours")
    expect(busy).to_have_count(1)
    page.locator(f"#take-{left.pk}").uncheck()
    hours.fill("17")
    Image.objects.filter(pk=image.pk).update(state="ok")
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    expect(busy).to_have_count(0, timeout=60_000)
    expect(page.locator(f"#take-{image.pk}")).to_be_checked()
    expect(page.locator(f"#take-{left.pk}")).not_to_be_checked()
    expect(hours).to_have_value("17")
    expect(page.locator("[data-confirm]")).to_have_text("Update plan for 2 images")


@pytest.mark.parametrize("place", ["ledger", "policy_preview", "policy_run", "policy_add"])
def test_what_is_listed_of_an_image_follows_its_job(page: Page, place: str) -> None:
    image = ImageFactory.create(name="busy.qcow2", reclaimable_bytes=GIB, allocated_size=2 * GIB)
    record.write_line(JobFactory.create(kind="reclaim", target=image, state="succeeded"), image.pool, 3 * GIB, 2 * GIB)
    job = at_work(image, "flatten")
    policy = PolicyFactory.create()
    run = PolicyRunFactory.create(policy=policy, state="finished", chosen_at=timezone.now(), finished=timezone.now())
    PolicyPickFactory.create(run=run, image=image, state="skipped", code="busy")
    arguments = {"policy_preview": [policy.pk], "policy_run": [policy.pk, run.pk]}.get(place, [])
    page.goto(reverse(place, args=arguments))
    busy = chip_of(page, job)
    if place == "policy_add":
        page.get_by_label("Name", exact=True).fill("nightly")
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    expect(busy).to_have_count(0, timeout=60_000)
    if place == "policy_add":
        expect(page.get_by_label("Name", exact=True)).to_have_value("nightly")
