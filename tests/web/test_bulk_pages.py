"""Many images selected, planned on one page, and queued as one job each."""

from typing import Any

import pytest
from django.test import Client

from images.models import Image
from images.views.bulk import Line, needs_of, sums_of
from storage_admin.jobs.models import Job
from storage_admin.jobs.plans import Plan, Refusal
from tests.factories import GIB, ImageFactory
from tests.web.conftest import Filled
from tests.web.html import text_of
from tests.web.test_image_and_reclaim_pages import hidden

ADDRESS = "/images/reclaim/"


def estimate(after: int, before: int = 4 * GIB) -> dict[str, object]:
    won = before - after
    numbers = {"predicted_after_bytes": after, "predicted_low": after, "predicted_high": after + GIB}
    return {"methods": {"compress": numbers | dict.fromkeys(("reclaimable_bytes", "reclaimable_low"), won)}}


@pytest.fixture
def chosen(filled: Filled) -> list[Image]:
    """Two that can be reclaimed, and one that is in use."""
    fields: dict[str, Any] = {"pool": filled.pool, "reclaimable_method": "compress"}
    return [
        ImageFactory.create(**fields, name="one.qcow2", reclaimable_bytes=3 * GIB, estimate=estimate(GIB)),
        ImageFactory.create(**fields, name="two.qcow2", reclaimable_bytes=2 * GIB, estimate=estimate(2 * GIB)),
        ImageFactory.create(**fields, name="busy.qcow2", in_use=True, in_use_detail="mounted at /mnt"),
    ]


def ids(images: list[Image]) -> list[str]:
    return [str(image.pk) for image in images]


def test_one_page_has_the_sums_and_each_refusal(operator: Client, chosen: list[Image]) -> None:
    text = text_of(operator.post(ADDRESS, {"image": ids(chosen)}).content.decode())
    assert "Reclaim 3 images" in text
    assert "Would win 5 GiB" in text
    assert "Free as the jobs end 0 B" in text
    assert "Held by undo copies 8 GiB 5 GiB more are free when they go" in text
    assert "5 GiB" in text.split("Scratch at the worst moment")[1][:60]  # 2 GiB and 3 GiB
    assert "image_in_use" in text
    assert "Reclaim 2 images" in text
    assert not Job.objects.filter(kind="reclaim", target_id__in=ids(chosen)).exists()


def test_confirming_queues_one_job_each_and_only_once(operator: Client, chosen: list[Image]) -> None:
    page = operator.post(ADDRESS, {"image": ids(chosen), "undo_hours": "5", "method": "compress"}).content.decode()
    form = {"image": ids(chosen), "undo_hours": "5", "method": "compress", "key": hidden(page)["key"], "confirmed": "1"}
    assert operator.post(ADDRESS, form).status_code == 302
    operator.post(ADDRESS, form)
    jobs = Job.objects.filter(kind="reclaim", target_id__in=ids(chosen))
    assert sorted(jobs.values_list("target_label", flat=True)) == ["one.qcow2", "two.qcow2"]
    assert {job.options["undo_hours"] for job in jobs} == {5}


def test_a_viewer_cannot_and_nothing_selected_says_so(viewer: Client, operator: Client, chosen: list[Image]) -> None:
    assert viewer.post(ADDRESS, {"image": ids(chosen)}).status_code == 403
    answer = operator.post(ADDRESS, {"image": ["x", "-1", "99999999"]}, follow=True)
    assert "No image was selected." in answer.content.decode()


def test_nonsense_in_an_option_changes_nothing(operator: Client, chosen: list[Image]) -> None:
    page = text_of(
        operator.post(ADDRESS, {"image": ids(chosen), "undo_hours": "much", "confirmed": "1"}).content.decode()
    )
    assert "Nothing was changed." in page
    assert not Job.objects.filter(kind="reclaim", target_id__in=ids(chosen)).exists()


def test_copies_beside_undo_copies_add_up_and_others_pass(chosen: list[Image]) -> None:
    def lines(undo: int) -> list[Line]:
        plan: dict[str, Any] = {
            "before_bytes": 4 * GIB,
            "predicted_after_bytes": GIB,
            "scratch_bytes": 2 * GIB,
            "undo_bytes": undo,
        }
        refused = Plan(**plan, refusals=(Refusal("busy", "x"),))
        return [Line(chosen[0], Plan(**plan)), Line(chosen[1], Plan(**plan)), Line(chosen[2], refused)]

    assert needs_of(lines(4 * GIB))[0].scratch_bytes == 4 * GIB
    assert needs_of(lines(0))[0].scratch_bytes == 2 * GIB  # one at a time
    assert (sums_of(lines(0)).freed_bytes, sums_of(lines(0)).held_bytes) == (6 * GIB, 0)
    assert (sums_of(lines(4 * GIB)).freed_bytes, sums_of(lines(4 * GIB)).later_bytes) == (0, 6 * GIB)
