"""An image has grown back by what was written into it, not by what later jobs made of its file."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from images.models import Image
from storage_admin.jobs.models import Job
from tests.factories import GIB, ImageSampleFactory, JobFactory, PolicyFactory
from tests.policies.test_rules import NOW, code_of, image, look, reclaimed

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def rewritten(one: Image, *, days_ago: float, before: int, after: int, **columns: Any) -> Job:
    finished = NOW - timedelta(days=days_ago)
    result = {"before_bytes": before, "after_bytes": after, "swapped": True} | columns.pop("result", {})
    values = {"kind": "flatten", "started": finished - timedelta(hours=1), "finished": finished, "result": result}
    return JobFactory.create(target=one, **{"state": "succeeded"} | values | columns)


def undone(job: Job, *, days_ago: float, before: int, after: int) -> None:
    Job.objects.filter(pk=job.pk).update(undo_state="undone")
    result = {"before_bytes": before, "after_bytes": after}
    finished = NOW - timedelta(days=days_ago)
    JobFactory.create(kind="undo", target=job, state="succeeded", finished=finished, result=result)


def sample(one: Image, *, days_ago: float, size: int) -> datetime:
    at = NOW - timedelta(days=days_ago)
    ImageSampleFactory.create(image=one, at=at, allocated_size=size)
    return at


def takes(one: Image, size: int) -> None:
    Image.objects.filter(pk=one.pk).update(allocated_size=size)


@pytest.mark.parametrize("kind", ["flatten", "convert", "check"])
def test_what_a_later_job_added_to_the_file_is_no_growth(kind: str) -> None:
    one = image(allocated_size=5 * GIB)
    reclaimed(one, days_ago=20)
    rewritten(one, days_ago=10, before=GIB, after=5 * GIB, kind=kind)
    sample(one, days_ago=10, size=5 * GIB)
    assert code_of(PolicyFactory.create(), one) == ""


def test_what_was_written_beside_is_growth_and_told_without_what_the_job_added() -> None:
    one = image(allocated_size=8 * GIB)
    reclaimed(one, days_ago=20)
    rewritten(one, days_ago=15, before=GIB, after=5 * GIB)
    sample(one, days_ago=15, size=5 * GIB)
    sample(one, days_ago=10, size=8 * GIB)
    assert code_of(PolicyFactory.create(), one) == "decayed"
    reason = look(PolicyFactory.create()).skips[0].reason
    assert "freed 3 GiB" in reason
    assert "10 days later it had grown by 3 GiB again" in reason


def test_how_much_it_grew_is_told_as_of_when_that_was_found() -> None:
    one = image(allocated_size=6 * GIB)
    reclaimed(one, days_ago=100)
    sample(one, days_ago=90, size=4 * GIB)
    sample(one, days_ago=50, size=6 * GIB)
    assert code_of(PolicyFactory.create(), one) == "decayed"
    assert "10 days later it had grown by 3 GiB again" in look(PolicyFactory.create()).skips[0].reason


def test_growth_after_thirty_days_is_none_however_large_a_job_had_made_the_file_before() -> None:
    one = image(allocated_size=8 * GIB)
    reclaimed(one, days_ago=60)
    rewritten(one, days_ago=50, before=GIB, after=5 * GIB)
    sample(one, days_ago=50, size=5 * GIB)
    sample(one, days_ago=5, size=8 * GIB)
    assert code_of(PolicyFactory.create(), one) == ""


def test_a_job_that_was_undone_has_added_nothing_but_while_it_stood() -> None:
    one = image(allocated_size=4 * GIB)
    reclaimed(one, days_ago=60)
    flatten = rewritten(one, days_ago=55, before=GIB, after=6 * GIB)
    sample(one, days_ago=55, size=6 * GIB)
    undone(flatten, days_ago=50, before=6 * GIB, after=GIB)
    sample(one, days_ago=50, size=GIB)
    sample(one, days_ago=5, size=4 * GIB)
    assert code_of(PolicyFactory.create(), one) == ""  # it took its time
    sample(one, days_ago=40, size=4 * GIB)
    assert code_of(PolicyFactory.create(), one) == "decayed"


def test_a_file_from_before_an_older_job_that_came_back_is_no_growth() -> None:
    one = image(allocated_size=4 * GIB)
    older = rewritten(one, days_ago=21, before=4 * GIB, after=4 * GIB)
    reclaimed(one, days_ago=20)
    undone(older, days_ago=10, before=GIB, after=4 * GIB)
    assert code_of(PolicyFactory.create(), one) == ""
    takes(one, 7 * GIB)
    assert code_of(PolicyFactory.create(), one) == "decayed"


@pytest.mark.parametrize(
    "columns",
    [
        {"result": {"swapped": False}, "kind": "convert"},  # a new file beside the image
        {"state": "failed"},
        {"days_ago": 30},  # before the reclaim
    ],
)
def test_a_job_that_did_not_make_the_file_larger_since_explains_no_growth(columns: dict[str, Any]) -> None:
    one = image(allocated_size=4 * GIB)
    reclaimed(one, days_ago=20)
    rewritten(one, **{"days_ago": 10, "before": GIB, "after": 4 * GIB} | columns)
    assert code_of(PolicyFactory.create(), one) == "decayed"


def test_a_job_that_made_the_file_smaller_takes_no_growth_away() -> None:
    one = image(allocated_size=4 * GIB)
    reclaimed(one, days_ago=20)
    rewritten(one, days_ago=18, before=2 * GIB, after=GIB, kind="check")
    assert code_of(PolicyFactory.create(), one) == "decayed"
    takes(one, 2 * GIB)
    assert code_of(PolicyFactory.create(), one) == ""
