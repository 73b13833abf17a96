"""Every factory makes a row that the database takes."""

import inspect
from typing import Any

import pytest

from tests import factories
from tests.benchmarks import factories as of_benchmarks

pytestmark = pytest.mark.sql

FACTORIES = [
    made
    for _, made in sorted((vars(factories) | vars(of_benchmarks)).items())
    if inspect.isclass(made) and issubclass(made, factories.Rows) and made is not factories.Rows
]


@pytest.mark.django_db
@pytest.mark.parametrize("made_by", FACTORIES)
def test_makes_rows_that_are_kept(made_by: type[factories.Rows[Any]]) -> None:
    first, second = made_by.create(), made_by.create()
    model = type(first)
    assert model._default_manager.filter(pk__in=[first.pk, second.pk]).count() == 2


@pytest.mark.django_db
def test_an_overlay_stands_on_its_base_in_one_tree() -> None:
    base = factories.ImageFactory.create()
    overlay = factories.ImageFactory.create(backing=base)
    overlay.refresh_from_db()
    assert (overlay.chain_depth, overlay.root_id) == (2, base.pk)


@pytest.mark.django_db
def test_an_images_host_is_its_pools() -> None:
    use = factories.ImageUseFactory.create()
    assert use.image.host == use.image.pool.host == use.disk.guest.host
