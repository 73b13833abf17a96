"""What shows a job's work refreshes itself when the job ends, without a reload."""

import pytest
from playwright.sync_api import Browser, expect
from pytest_django.live_server_helper import LiveServer

from storage_admin.jobs.models import Job
from tests.factories import GIB, ImageFactory, JobFactory, ResourceLockFactory
from tests.web.test_in_a_browser import chromium, complaints_of, signed_in

__all__ = ["chromium"]

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]


@pytest.mark.parametrize("place", ["/images/", "/images/{}/", "/"])
def test_an_action_comes_back_when_the_job_ends(chromium: Browser, live_server: LiveServer, place: str) -> None:
    image = ImageFactory.create(
        name="busy.qcow2", allocated_size=9 * GIB, reclaimable_bytes=3 * GIB, reclaimable_method="compress"
    )
    job = JobFactory.create(kind="reclaim", target=image, state="running", progress=42.0)
    ResourceLockFactory.create(job=job, key=f"image:{image.pk}", exclusive=True)
    page = signed_in(chromium, live_server).new_page()
    said = complaints_of(page)
    page.goto(live_server.url + place.format(image.pk))
    action = page.locator(f"main a.btn[href='/images/{image.pk}/reclaim/']")
    busy = page.locator(f"main .chip[href='/jobs/{job.pk}/']")
    expect(busy.first).to_contain_text("42 %")
    expect(action).to_have_count(0)
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    expect(action).to_have_count(1, timeout=60_000)
    expect(busy).to_have_count(0)
    assert said == []
    page.context.close()
