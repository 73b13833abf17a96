"""Confirm is for the plan that the page had shown: where facts have changed since, the new plan is shown instead."""

from typing import Any
from unittest import mock

import pytest
from django.test import Client

from images.kinds.reclaim import Reclaim
from images.kinds.undo import Undo
from images.models import Image
from storage_admin.jobs.models import Job
from storage_admin.web.page import NOT_PLANNED
from tests.factories import GIB, ImageFactory
from tests.web.confirming import planned
from tests.web.conftest import Filled

BULK = "/images/reclaim/"
#: What takes the undo copy out of a plan that is left to ``auto``.
CHANGES = [{"nlink": 2}, {"snapshots": [{"id": "1", "name": "before the update"}]}]


@pytest.fixture
def image(filled: Filled) -> Image:
    return ImageFactory.create(pool=filled.pool, allocated_size=GIB)


def said(answer: Any) -> list[str]:
    return [str(one) for one in answer.context["messages"]]


def reclaimed() -> dict[int, tuple[str, bool]]:
    jobs = Job.objects.filter(kind="reclaim", state="queued")
    return {job.target_id: (job.plan["method"], bool(job.plan["undo_bytes"])) for job in jobs}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_facts_have_changed_is_shown_again_and_not_started(
    operator: Client, image: Image, change: dict[str, Any]
) -> None:
    address = f"/images/{image.pk}/reclaim/"
    shown = planned(operator.get(address))
    Image.objects.filter(pk=image.pk).update(**change)
    answer = operator.post(address, shown)
    assert (answer.status_code, said(answer)) == (200, [NOT_PLANNED])
    assert (answer.context["plan"].method, reclaimed()) == ("in_place", {})
    assert operator.post(address, planned(answer)).status_code == 302
    assert reclaimed() == {image.pk: ("in_place", False)}


@pytest.mark.parametrize("change", CHANGES)
def test_many_plans_are_shown_again_where_one_of_them_has_changed(
    operator: Client, image: Image, change: dict[str, Any]
) -> None:
    other = ImageFactory.create(pool=image.pool, allocated_size=GIB)
    form: dict[str, Any] = {"image": [image.pk, other.pk]}
    shown = planned(operator.post(BULK, form))
    Image.objects.filter(pk=image.pk).update(**change)
    answer = operator.post(BULK, form | shown | {"confirmed": "1"})
    assert (answer.status_code, said(answer), reclaimed()) == (200, [NOT_PLANNED], {})
    again = form | planned(answer) | {"confirmed": "1"}
    for _twice in range(2):
        assert operator.post(BULK, again).status_code == 302
    assert reclaimed() == {image.pk: ("in_place", False), other.pk: ("compress", True)}


def test_an_image_that_the_page_had_refused_is_not_started_with_the_others(operator: Client, image: Image) -> None:
    other = ImageFactory.create(pool=image.pool, allocated_size=GIB, in_use=True, in_use_detail="process 7 (tar)")
    form: dict[str, Any] = {"image": [image.pk, other.pk]}
    shown = planned(operator.post(BULK, form))
    Image.objects.filter(pk=other.pk).update(in_use=False, in_use_detail="")
    answer = operator.post(BULK, form | shown | {"confirmed": "1"})
    assert (answer.status_code, said(answer), reclaimed()) == (200, [NOT_PLANNED], {})


def test_a_reclaim_is_planned_once_when_it_is_confirmed(operator: Client, image: Image) -> None:
    address = f"/images/{image.pk}/reclaim/"
    shown = planned(operator.get(address))
    with mock.patch.object(Reclaim, "plan_for", autospec=True, side_effect=Reclaim.plan_for) as plans:
        assert operator.post(address, shown).status_code == 302
    assert (plans.call_count, len(reclaimed())) == (1, 1)


def test_what_a_look_tells_of_an_undo_is_planned_once(operator: Client, filled: Filled) -> None:
    with mock.patch.object(Undo, "plan", autospec=True, side_effect=Undo.plan) as plans:
        assert operator.get(f"/jobs/{filled.done.pk}/undo/", headers={"HX-Request": "true"}).status_code == 200
    assert plans.call_count == 1
