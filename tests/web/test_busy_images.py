"""An image that a job has says so wherever it is shown, and what a job would refuse is not offered meanwhile."""

import re
from collections.abc import Callable

import pytest
from django.test import Client
from django.urls import reverse

from images.models import Image
from images.rewrite import record
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job
from tests.factories import GIB, ImageFactory, ImageUseFactory, JobFactory, PolicyFactory, ResourceLockFactory
from tests.web.confirming import hidden
from tests.web.conftest import Filled
from tests.web.html import flat
from tests.working import OPERATOR

pytestmark = pytest.mark.sql


@pytest.fixture
def busy(filled: Filled) -> tuple[Image, Job]:
    """An orphan with something to win, on a base, which a job has."""
    image = ImageFactory.create(
        pool=filled.pool, name="busy.qcow2", orphan=True, backing=filled.base, allocated_size=9 * GIB,
        reclaimable_bytes=3 * GIB, reclaimable_method="compress",
    )  # fmt: skip
    job = JobFactory.create(kind="reclaim", target=image, state="running", progress=42.0)
    ImageUseFactory.create(image=image, disk__guest__kind="vm", disk__target="scsi0")
    record.write_line(JobFactory.create(kind="reclaim", target=image, state="succeeded"), image.pool, GIB, 0)
    for key, exclusive in ((image.pk, True), (filled.base.pk, False)):
        ResourceLockFactory.create(job=job, key=f"image:{key}", exclusive=exclusive)
    return image, job


PLACES: dict[str, Callable[[Image], str]] = {
    "overview": lambda image: "/",
    "images": lambda image: "/images/?search=busy",
    "image": lambda image: f"/images/{image.pk}/",
    "its base": lambda image: f"/images/{image.backing_id}/",
    "pool": lambda image: f"/pools/{image.pool_id}/",
    "orphans": lambda image: "/orphans/?everywhere=true",
    "set aside": lambda image: reverse("set_aside", args=[image.pk]),
    "reclaim": lambda image: reverse("reclaim", args=[image.pk]),
    "guests": lambda image: reverse("guests"),
    "guest": lambda image: reverse("guest", args=[image.uses.get().disk.guest_id]),
    "ledger": lambda image: f"{reverse('ledger')}?image={image.pk}",
}


@pytest.mark.parametrize("place", PLACES)
def test_every_page_that_shows_it_links_to_its_job(admin: Client, busy: tuple[Image, Job], place: str) -> None:
    image, job = busy
    page = admin.get(PLACES[place](image)).content.decode()
    chip = re.search(rf'<a class="chip info" href="{reverse("job", args=[job.pk])}">([^<]*)</a>', page)
    assert chip is not None
    assert "42 %" in chip[1]


@pytest.mark.parametrize("place", ["overview", "images", "image", "orphans"])
def test_what_it_would_refuse_is_not_offered_until_the_job_has_ended(
    admin: Client, busy: tuple[Image, Job], place: str
) -> None:
    image, job = busy
    address = PLACES[place](image)
    offers = [reverse(name, args=[image.pk]) for name in ("reclaim", "check", "set_aside")]

    def offered() -> bool:
        page = flat(admin.get(address))
        return any(re.search(rf'<a class="btn[^"]*" href="{offer}"', page) for offer in offers)

    assert not offered()
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    assert offered()


def test_what_its_guest_could_have_done_to_it_is_not_offered_either(admin: Client, busy: tuple[Image, Job]) -> None:
    image, job = busy
    address = PLACES["guest"](image)
    move = f"{reverse('move_disk', args=[image.uses.get().disk.guest_id])}?disk=scsi0"
    assert move not in admin.get(address).content.decode()
    Job.objects.filter(pk=job.pk).update(state="succeeded")
    assert move in admin.get(address).content.decode()
    own = JobFactory.create(kind="trim", target=image.uses.get().disk.guest, state="running")
    page = admin.get(address).content.decode()
    assert (move in page, f'href="{reverse("job", args=[own.pk])}"' in page) == (False, True)


def test_the_pages_hear_of_it_when_a_job_begins_or_ends_also_where_their_count_stays(
    operator: Client, busy: tuple[Image, Job]
) -> None:
    address = re.search(r'hx-get="(/jobs/count/[^"]*)"', operator.get("/").content.decode())
    assert address is not None
    assert operator.get(address[1]).status_code == 204
    Job.objects.filter(pk=busy[1].pk).update(state="succeeded")
    JobFactory.create(kind="scan", target=busy[0].host, state="queued")
    answer = operator.get(address[1])
    assert (answer.status_code, answer["HX-Trigger"]) == (200, "jobs-changed")


def test_undo_shows_its_plan_first_and_changes_nothing_by_that(operator: Client, filled: Filled) -> None:
    page = operator.get(reverse("job", args=[filled.done.pk])).content.decode()
    address = reverse("job_undo", args=[filled.done.pk])
    assert (f'href="{address}"' in page, f'action="{address}"' in page) == (True, False)
    plan = operator.get(address).content.decode()
    predicted = kinds.get("undo").plan(OPERATOR, filled.done.pk, {"force": False})
    assert (predicted.reason in plan, predicted.refusals) == (True, ())
    assert f'action="{address}"' in plan
    assert not Job.objects.filter(kind="undo").exists()
    again = operator.get(address, {"shown": hidden(plan)["shown"]}, headers={"HX-Request": "true"})
    assert again["HX-Reswap"] == "none"


def test_a_policy_is_run_from_its_preview(operator: Client, filled: Filled) -> None:
    policy = PolicyFactory.create()
    page = operator.get(reverse("policy", args=[policy.pk])).content.decode()
    begin = f'action="{reverse("policy_run_now", args=[policy.pk])}"'
    assert (reverse("policy_preview", args=[policy.pk]) in page, begin in page) == (True, False)
    assert begin in operator.get(reverse("policy_preview", args=[policy.pk])).content.decode()
