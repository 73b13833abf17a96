"""Pages cost a bounded number of queries, however many rows there are."""

import pytest
from django.test import Client
from pytest_django import DjangoAssertNumQueries

from tests.factories import GuestDiskFactory, GuestFactory, ImageFactory, ImageUseFactory, JobFactory
from tests.web.conftest import Filled


@pytest.mark.parametrize(
    ("address", "most"),
    [("/images/", 15), ("/images/?search=x&ordering=-reclaimable_bytes&state=ok", 15), ("/guests/", 12), ("/jobs/", 8)],
)
def test_lists_stay_within_their_budget(
    admin: Client, filled: Filled, address: str, most: int, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    for number in range(30):
        image = ImageFactory.create(pool=filled.pool, name=f"x{number}.qcow2")
        guest = GuestFactory.create(host=filled.host)
        ImageUseFactory.create(image=image, disk__guest=guest)
        GuestDiskFactory.create(guest=guest)
        JobFactory.create(kind="reclaim", target=image)
    with django_assert_max_num_queries(most):
        assert admin.get(address).status_code == 200


def test_an_image_with_many_overlays_stays_within_its_budget(
    admin: Client, filled: Filled, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    for number in range(200):
        ImageFactory.create(backing=filled.base, name=f"clone-{number:03}.qcow2")
    with django_assert_max_num_queries(60):
        page = admin.get(f"/images/{filled.image.pk}/").content.decode()
    assert filled.image.name in page
    assert "more are not shown" in page


@pytest.mark.parametrize("page", ["/", "/hosts/"])
def test_the_first_page_stays_within_its_budget(
    admin: Client, filled: Filled, page: str, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    with django_assert_max_num_queries(40):
        assert admin.get(page).status_code == 200
