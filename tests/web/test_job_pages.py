"""Jobs as they work: what moves, what does not, and who may do what."""

from collections.abc import Callable

import pytest
from django.test import Client
from django.utils import timezone

from storage_admin.agent import protocol
from storage_admin.jobs import claims, kinds, reaper
from storage_admin.jobs.kinds import JobKind
from storage_admin.jobs.models import Job
from tests.factories import JobFactory, JobLogFactory
from tests.web.conftest import Filled
from tests.web.html import tags_of, text_of
from tests.working import reread

HTMX = {"HX-Request": "true"}


def polls(page: str) -> list[str]:
    """What the page asks for by itself, beside the number of jobs in the sidebar."""
    asking = [found for _, found in tags_of(page) if (found.get("hx-trigger") or "").startswith("every")]
    return [found["hx-get"] or "" for found in asking if found.get("class") != "counted"]


def test_a_running_job_shows_how_far_it_is(viewer: Client, filled: Filled) -> None:
    text = text_of(viewer.get(f"/jobs/{filled.running.pk}/"))
    assert "46 % · copying" in text
    assert "1 GiB of 4 GiB · 286 MiB/s · 1 min 6 s left" in text


def test_a_fragment_that_did_not_change_is_not_sent_again(viewer: Client, filled: Filled) -> None:
    address = polls(viewer.get(f"/jobs/{filled.running.pk}/").content.decode())[0]
    assert viewer.get(address, headers=HTMX).status_code == 204
    Job.objects.filter(pk=filled.running.pk).update(progress=51)
    changed = viewer.get(address, headers=HTMX)
    assert changed.status_code == 200
    assert "51 %" in text_of(changed)
    assert polls(changed.content.decode()) != [address]


@pytest.mark.parametrize("address", ["/", "/jobs/", "/hosts/"])
def test_a_list_that_did_not_change_is_not_sent_again(viewer: Client, filled: Filled, address: str) -> None:
    asked = polls(viewer.get(address).content.decode())
    assert len(asked) == 1
    assert viewer.get(asked[0], headers=HTMX).status_code == 204
    JobFactory.create(kind="scan", target=filled.host, state="running", stage="reading", progress=12)
    assert viewer.get(asked[0], headers=HTMX).status_code == 200


def test_polling_ends_with_the_job_after_its_end_was_shown(viewer: Client, filled: Filled) -> None:
    address = polls(viewer.get(f"/jobs/{filled.running.pk}/").content.decode())[0]
    Job.objects.filter(pk=filled.running.pk).update(
        state="failed", error_code="image_in_use", error_detail="Guest x started.", finished=timezone.now()
    )
    last = viewer.get(address, headers=HTMX).content.decode()
    assert "Guest x started." in last
    assert "did not replace the image" in last
    assert polls(last) == []
    assert polls(viewer.get(f"/jobs/{filled.running.pk}/").content.decode()) == []


@pytest.mark.parametrize(
    ("state", "code", "method", "which"),
    [
        ("failed", "stale_plan", "compress", "ended"),
        ("failed", "stale_plan", "in_place", "ended"),
        ("failed", "pool_silent", "", "ended"),
        ("failed", "tool_failed", "compress", "cut_off"),  # while the names change
        ("cancelled", "", "compress", "ended"),
    ],
)
def test_a_job_that_failed_says_what_it_did_and_nothing_of_an_image_that_may_be_gone(
    viewer: Client, filled: Filled, state: str, code: str, method: str, which: str
) -> None:
    detail = "disk.qcow2 no longer exists; scan the host and try again" if code else ""
    plan, end = {"method": method}, timezone.now()
    Job.objects.filter(pk=filled.running.pk).update(
        state=state, error_code=code, error_detail=detail, plan=plan, finished=end, stage="swapping"
    )
    text = text_of(viewer.get(f"/jobs/{filled.running.pk}/"))
    said = kinds.unsuccessful(Job.objects.get(pk=filled.running.pk))
    assert [one in text for one in (said.ended, said.cut_off)] == [which == "ended", which == "cut_off"]
    Job.objects.filter(pk=filled.running.pk).update(started=None)
    assert "changed nothing" in text_of(viewer.get(f"/jobs/{filled.running.pk}/"))


def test_a_job_after_which_both_files_are_kept_says_which_one_has_the_name(viewer: Client, filled: Filled) -> None:
    job = filled.running
    told = {}
    for code in (protocol.BOTH_KEPT, protocol.STRANGERS_KEPT):
        Job.objects.filter(pk=job.pk).update(state="failed", error_code=code, error_detail="-", finished=timezone.now())
        told[code] = text_of(viewer.get(f"/jobs/{job.pk}/"))
        assert not any(one in told[code] for one in ("did not replace", "It removed the files", "never a mixture"))
    assert f".sa-{job.uid}.orig" in told[protocol.BOTH_KEPT]
    assert f".sa-{job.uid}.orig" not in told[protocol.STRANGERS_KEPT]


REWRITES = {
    *("reclaim", "flatten", "convert", "check", "undo", "settle_leftover"),
    *("rebase", "relink", "grow", "shrink", "bitmaps", "keys", "sparsify", "export"),
}


@pytest.mark.parametrize("method", ["", "in_place", "remove", "check"])
@pytest.mark.parametrize("kind", [one.name for one in kinds.every() if one.rewrites or one.measures])
def test_what_is_said_of_a_lost_job_goes_for_its_kind_and_method(
    viewer: Client, filled: Filled, kind: str, method: str
) -> None:
    """That an image is the one file or the other is only true where one takes the other's place."""
    Job.objects.filter(pk=filled.running.pk).update(
        kind=kind,
        plan={"method": method},
        rewrites=kinds.get(kind).rewrites,
        heartbeat=timezone.now() - 2 * claims.LEASE,
    )
    assert reaper.reap() == 1
    job = Job.objects.get(pk=filled.running.pk)
    said = kinds.unsuccessful(job)
    by_swap = kind in REWRITES and method not in kinds.get(kind).unsuccessful.keys() - {""}
    assert ("never a mixture" in said.cut_off) == by_swap
    assert ("did not replace" in said.ended) == (by_swap and kind not in {"undo", "settle_leftover"})
    assert said.cut_off != JobKind.unsuccessful[""].cut_off
    assert said.cut_off in job.error_detail
    text = text_of(viewer.get(f"/jobs/{job.pk}/"))
    assert (job.needs_recovery, text.count(said.cut_off)) == (True, 2)
    Job.objects.filter(pk=job.pk).update(needs_recovery=False, error_code="busy", error_detail="-", state="failed")
    text = text_of(viewer.get(f"/jobs/{job.pk}/"))
    assert (said.ended in text, said.cut_off in text) == (True, said.cut_off == said.ended)


def test_the_log_comes_line_by_line(viewer: Client, filled: Filled) -> None:
    address = polls(viewer.get(f"/jobs/{filled.running.pk}/").content.decode())[1]
    assert viewer.get(address, headers=HTMX).status_code == 204
    line = JobLogFactory.create(job=filled.running, text="verifying <b>now</b>")
    fragment = viewer.get(address, headers=HTMX).content.decode()
    assert "verifying &lt;b&gt;now&lt;/b&gt;" in fragment
    assert polls(fragment) == [f"/jobs/{filled.running.pk}/log/?after={line.pk}"]


def test_a_nonsense_place_in_the_log_starts_at_its_beginning(viewer: Client, filled: Filled) -> None:
    for after in ("x", "-1", "9" * 5000, "²"):
        answer = viewer.get(f"/jobs/{filled.running.pk}/log/", {"after": after}, headers=HTMX)
        assert "looking at" in answer.content.decode()


def test_a_finished_job_says_what_was_predicted_what_came_and_what_is_held(viewer: Client, filled: Filled) -> None:
    text = text_of(viewer.get(f"/jobs/{filled.done.pk}/"))
    assert "4 GiB → 2 GiB" in text
    assert "Predicted about 2 GiB 2,147,483,648" in text
    assert "Held by the undo copy 4 GiB 4,294,967,296" in text
    assert "Freed 0 B" in text


def test_a_job_that_won_nothing_says_that_the_original_was_kept(viewer: Client, filled: Filled) -> None:
    result = (filled.done.result or {}) | {"swapped": False, "freed_bytes": 0}
    Job.objects.filter(pk=filled.done.pk).update(result=result, undo_state="none")
    assert "the original was kept" in viewer.get(f"/jobs/{filled.done.pk}/").content.decode()


def test_discarding_an_undo_copy_needs_an_admin_and_the_jobs_name(
    browser_of: Callable[[str], Client], filled: Filled
) -> None:
    address = f"/jobs/{filled.done.pk}/discard-undo/"
    assert browser_of("operator").post(address, {"confirm": f"job {filled.done.pk}"}).status_code == 403
    admin = browser_of("admin")
    assert "Not confirmed" in admin.post(address, {"confirm": "yes"}, follow=True).content.decode()
    assert not Job.objects.filter(kind="discard_undo").exists()
    admin.post(address, {"confirm": f"job {filled.done.pk}"})
    assert Job.objects.filter(kind="discard_undo", target_id=filled.done.pk).exists()


def test_an_operator_undoes_and_only_an_admin_forces(browser_of: Callable[[str], Client], filled: Filled) -> None:
    address = f"/jobs/{filled.done.pk}/undo/"
    operator = browser_of("operator")
    assert operator.post(address, {"force": "1", "confirm": f"job {filled.done.pk}"}).status_code == 403
    assert not Job.objects.filter(kind="undo").exists()
    operator.post(address)
    assert Job.objects.get(kind="undo").target_id == filled.done.pk


def test_who_cancels_in_the_list_stays_there_and_reads_that_it_is_done(operator: Client, filled: Filled) -> None:
    queued = JobFactory.create(kind="reclaim", target=filled.image, state="queued")
    page = operator.get("/jobs/?state=queued").content.decode()
    back = [found["value"] for _, found in tags_of(page) if found.get("name") == "next"]
    assert back == ["/jobs/?state=queued"]
    answer = operator.post(f"/jobs/{queued.pk}/cancel/", {"next": back[0]}, follow=True)
    assert answer.redirect_chain == [("/jobs/?state=queued", 302)]
    assert f"Job {queued.pk} is cancelled." in text_of(answer)
    assert reread(queued).state == "cancelled"


def test_a_running_job_is_said_to_be_stopping_and_what_has_ended_has_no_button(
    operator: Client, viewer: Client, filled: Filled
) -> None:
    page = operator.get("/jobs/").content.decode()
    buttons = [found["id"] for tag, found in tags_of(page) if tag == "button" and found.get("id")]
    assert buttons == [f"cancel-{filled.running.pk}"]
    assert "cancel-" not in viewer.get("/jobs/").content.decode()
    answer = operator.post(f"/jobs/{filled.running.pk}/cancel/", {"next": "/jobs/?"}, follow=True)
    assert f"Job {filled.running.pk} is being cancelled." in text_of(answer)


@pytest.mark.parametrize("back", ["", "https://example.org/jobs/?", "//example.org/jobs/?", "/logout/", "/jobs/"])
def test_nobody_is_led_elsewhere(operator: Client, filled: Filled, back: str) -> None:
    answer = operator.post(f"/jobs/{filled.running.pk}/cancel/", {"next": back})
    assert answer["Location"] == f"/jobs/{filled.running.pk}/"
