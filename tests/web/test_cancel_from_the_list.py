"""A job cancelled in the list of jobs."""

import pytest
from django.test import Client

from tests.factories import JobFactory
from tests.web.conftest import Filled
from tests.web.html import tags_of, text_of
from tests.working import reread


def test_who_cancels_in_the_list_stays_there_and_reads_that_it_is_done(operator: Client, filled: Filled) -> None:
    queued = JobFactory.create(kind="reclaim", target=filled.image, state="queued")
    page = operator.get("/jobs/?state=queued").content.decode()
    back = [found["value"] for _, found in tags_of(page) if found.get("name") == "next"]
    assert back == ["/jobs/?state=queued"]
    answer = operator.post(f"/jobs/{queued.pk}/cancel/", {"next": back[0]}, follow=True)
    assert answer.redirect_chain == [("/jobs/?state=queued", 302)]
    assert f"Job {queued.pk} is cancelled." in text_of(answer.content.decode())
    assert reread(queued).state == "cancelled"


def test_a_running_job_is_said_to_be_stopping_and_what_has_ended_has_no_button(
    operator: Client, viewer: Client, filled: Filled
) -> None:
    page = operator.get("/jobs/").content.decode()
    buttons = [found["id"] for tag, found in tags_of(page) if tag == "button" and found.get("id")]
    assert buttons == [f"cancel-{filled.running.pk}"]
    assert "cancel-" not in viewer.get("/jobs/").content.decode()
    answer = operator.post(f"/jobs/{filled.running.pk}/cancel/", {"next": "/jobs/?"}, follow=True)
    assert f"Job {filled.running.pk} is being cancelled." in text_of(answer.content.decode())


@pytest.mark.parametrize("back", ["", "https://example.org/jobs/?", "//example.org/jobs/?", "/logout/", "/jobs/"])
def test_nobody_is_led_elsewhere(operator: Client, filled: Filled, back: str) -> None:
    answer = operator.post(f"/jobs/{filled.running.pk}/cancel/", {"next": back})
    assert answer["Location"] == f"/jobs/{filled.running.pk}/"
