"""Many images selected, planned on one page, and queued as one job each."""

from typing import Any

import pytest
from django.test import Client

from images.models import Image
from images.rewrite.space import Admitted
from storage_admin.jobs.models import Job
from storage_admin.web.pages.reclaim_many import Line, needs_of, planned, sums_of
from tests.factories import GIB, ImageFactory
from tests.web.confirming import planned as shown
from tests.web.conftest import Filled
from tests.web.html import text_of
from tests.working import OPERATOR

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
    text = text_of(operator.post(ADDRESS, {"image": ids(chosen)}))
    assert "Reclaim 3 images" in text
    assert "Expected savings 5 GiB" in text
    assert "Freed when jobs finish 0 B" in text
    assert "Held by undo copies 8 GiB 5 GiB more freed when they expire" in text
    assert "5 GiB" in text.split("Peak scratch space")[1][:60]  # 2 GiB and 3 GiB
    assert "image_in_use" in text
    assert "Reclaim 2 images" in text
    assert not Job.objects.filter(kind="reclaim", target_id__in=ids(chosen)).exists()


def test_a_viewer_cannot_and_nothing_selected_says_so(viewer: Client, operator: Client, chosen: list[Image]) -> None:
    assert viewer.post(ADDRESS, {"image": ids(chosen)}).status_code == 403
    answer = operator.post(ADDRESS, {"image": ["x", "-1", "99999999"]}, follow=True)
    assert "No image was selected." in answer.content.decode()


def test_nonsense_in_an_option_changes_nothing(operator: Client, chosen: list[Image]) -> None:
    page = text_of(operator.post(ADDRESS, {"image": ids(chosen), "undo_hours": "much", "confirmed": "1"}))
    assert "Nothing was changed. Undo hours: Enter a number." in page
    assert not Job.objects.filter(kind="reclaim", target_id__in=ids(chosen)).exists()


def test_what_does_not_fit_beside_the_others_is_refused_on_the_page_already(
    operator: Client, chosen: list[Image]
) -> None:
    pool = chosen[0].pool
    more = [ImageFactory.create(pool=pool, name=f"more-{number:02}.qcow2") for number in range(10)]
    queued = [ImageFactory.create(pool=pool) for _ in range(2)]
    form: dict[str, Any] = {"image": ids(more), "method": "compress", "undo_hours": "1"}
    other = {**form, "image": ids(queued)}
    operator.post(ADDRESS, other | shown(operator.post(ADDRESS, other)) | {"confirmed": "1"})
    page = operator.post(ADDRESS, form).content.decode()
    text = text_of(page)
    assert "Reclaim 6 images" in text  # of 4 GiB each, 35 GiB may be used, and 8 GiB of them are reserved
    assert "24 GiB plus up to 8 GiB for queued and running jobs" in text
    assert text.count("not_enough_space") == 4
    form |= shown(page) | {"confirmed": "1"}
    assert "6 queued." in operator.post(ADDRESS, form, follow=True).content.decode()
    assert "6 queued." in operator.post(ADDRESS, form, follow=True).content.decode()  # pressed twice
    jobs = Job.objects.filter(kind="reclaim", target_id__in=[image.pk for image in more])
    assert sorted(jobs.values_list("target_label", flat=True)) == [image.name for image in more[:6]]


def test_copies_beside_undo_copies_add_up_and_others_pass(operator: Client, chosen: list[Image]) -> None:
    def lines(undo_hours: int) -> tuple[list[Line], Admitted]:
        options, admitted = {"method": "compress", "undo_hours": undo_hours}, Admitted()
        return planned(OPERATOR, chosen, options, admitted), admitted

    kept, passing = lines(4), lines(0)
    assert needs_of(*kept)[0].scratch_bytes == 5 * GIB
    assert needs_of(*passing)[0].scratch_bytes == 3 * GIB  # one at a time
    assert (sums_of(passing[0]).freed_bytes, sums_of(passing[0]).held_bytes) == (5 * GIB, 0)
    assert (sums_of(kept[0]).freed_bytes, sums_of(kept[0]).later_bytes) == (0, 5 * GIB)
