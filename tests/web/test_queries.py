"""Pages cost a bounded number of queries, however many rows there are."""

import pytest
from django.test import Client

from images.models import Image
from tests.factories import AlertFactory, GuestDiskFactory, GuestFactory, ImageFactory, ImageUseFactory, JobFactory
from tests.web.conftest import Filled
from tests.working import at_most_queries

pytestmark = pytest.mark.sql


@pytest.mark.parametrize(
    ("address", "most"),
    [
        ("/images/", 15),
        ("/images/?search=x&ordering=-reclaimable_bytes&state=ok", 15),
        ("/guests/", 15),
        ("/jobs/", 14),
        ("/alerts/", 12),
    ],
)
def test_lists_stay_within_their_budget(admin: Client, filled: Filled, address: str, most: int) -> None:
    for number in range(30):
        image = ImageFactory.create(pool=filled.pool, name=f"x{number}.qcow2")
        guest = GuestFactory.create(host=filled.host)
        ImageUseFactory.create(image=image, disk__guest=guest)
        GuestDiskFactory.create(guest=guest)
        JobFactory.create(kind="reclaim", target=image)
        AlertFactory.create(target_kind="pool", target_id=1, target_label="a / images")
    with at_most_queries(most):
        assert admin.get(address).status_code == 200


def test_an_image_with_many_overlays_stays_within_its_budget(admin: Client, filled: Filled) -> None:
    for number in range(200):
        ImageFactory.create(backing=filled.base, name=f"clone-{number:03}.qcow2")
    with at_most_queries(30):
        page = admin.get(f"/images/{filled.image.pk}/").content.decode()
    assert filled.image.name in page
    assert "more not shown" in page


def chain(base: Image, depth: int) -> list[Image]:
    """Images that stand on each other, the lowest first, each the disk of a guest."""
    images = [base]
    while len(images) < depth:
        images.append(ImageFactory.create(backing=images[-1], overlays_count=1))
    for image in images:
        ImageUseFactory.create(image=image)
    return images


@pytest.mark.parametrize("which", [0, 5, 9])
def test_an_image_deep_in_a_chain_stays_within_its_budget(admin: Client, filled: Filled, which: int) -> None:
    image = chain(ImageFactory.create(pool=filled.pool, overlays_count=1), 10)[which]
    with at_most_queries(26):
        assert admin.get(f"/images/{image.pk}/").status_code == 200


@pytest.mark.parametrize("kind", ["reclaim", "flatten", "convert", "check"])
def test_a_plan_of_an_image_deep_in_a_chain_stays_within_its_budget(admin: Client, filled: Filled, kind: str) -> None:
    image = chain(ImageFactory.create(pool=filled.pool), 10)[5]
    with at_most_queries(23):
        assert admin.get(f"/images/{image.pk}/{kind}/").status_code == 200


@pytest.mark.parametrize("method", ["auto", "compress", "in_place"])
def test_a_hundred_plans_cost_hardly_more_queries_than_two(admin: Client, filled: Filled, method: str) -> None:
    images = [image for _ in range(20) for image in chain(ImageFactory.create(pool=filled.pool), 5)]
    Image.every.filter(pk=images[7].pk).update(in_use=True)
    form = {"image": [image.pk for image in images], "method": method}
    with at_most_queries(16):
        assert b"Reclaim 100 images" in admin.post("/images/reclaim/", form).content


@pytest.mark.parametrize("page", ["/", "/hosts/"])
def test_the_first_page_stays_within_its_budget(admin: Client, filled: Filled, page: str) -> None:
    with at_most_queries(40):
        assert admin.get(page).status_code == 200
