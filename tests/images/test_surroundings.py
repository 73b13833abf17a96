"""What surrounds an image: what it stands on and what stands on it, for many images in a few queries."""

import random
from typing import Any

import pytest
from pytest_django import DjangoAssertNumQueries

from images.models import Image
from images.rewrite import neighbours
from images.rewrite.neighbours import ancestors, descendants
from tests.factories import ImageFactory, ImageUseFactory, StoragePoolFactory
from tests.working import refused_as

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def names(images: list[Image]) -> list[str]:
    return [image.name for image in images]


def tree() -> dict[str, Image]:
    """a ← b ← c ← e, and a ← d; each name is that of its row."""
    found: dict[str, Image] = {}
    for name, base in (("a", ""), ("b", "a"), ("d", "a"), ("c", "b"), ("e", "c")):
        extra: dict[str, Any] = {"backing": found[base]} if base else {"pool": StoragePoolFactory.create()}
        found[name] = ImageFactory.create(name=name, **extra)
    return {name: Image.objects.get(pk=image.pk) for name, image in found.items()}


def test_what_an_image_stands_on_comes_nearest_first() -> None:
    images = tree()
    assert names(ancestors(images["e"])) == ["c", "b", "a"]
    assert names(ancestors(images["d"])) == ["a"]
    assert ancestors(images["a"]) == []


def test_what_stands_on_an_image_comes_nearest_first_and_by_name() -> None:
    images = tree()
    assert names(descendants(images["a"])) == ["b", "d", "c", "e"]
    assert names(descendants(images["c"])) == ["e"]
    assert descendants(images["e"]) == []


def test_guests_are_those_of_the_image_and_of_what_stands_on_it() -> None:
    images = tree()
    for name in ("a", "c", "e"):
        ImageUseFactory.create(image=images[name], disk__guest__name=f"guest {name}")
    assert [guest.name for guest in neighbours.of(images["b"]).guests] == ["guest c", "guest e"]
    assert [guest.name for guest in neighbours.of(images["a"]).guests] == ["guest a", "guest c", "guest e"]


@pytest.mark.parametrize("which", ["a", "b", "c", "e", "d"])
def test_a_chain_that_comes_back_to_itself_is_refused_and_ends(which: str) -> None:
    images = tree()
    Image.every.filter(pk=images["a"].pk).update(backing=images["c"])
    image = Image.objects.get(pk=images[which].pk)
    assert refused_as(ancestors, image) == "chain_cycle"
    assert which not in names(descendants(image))


def test_a_base_whose_row_is_gone_is_a_broken_chain() -> None:
    images = tree()
    Image.every.filter(pk=images["b"].pk).update(listed=False)
    assert refused_as(ancestors, images["e"]) == "chain_broken"


def test_many_images_of_any_depth_are_fetched_together(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    pool, shape = StoragePoolFactory.create(), random.Random(7)
    images = [ImageFactory.create(pool=pool, name="0")]
    for number in range(1, 60):
        backing = shape.choice(images) if shape.random() < 0.9 else None
        images.append(ImageFactory.create(pool=pool, backing=backing, name=f"{number}"))
    rows = list(Image.objects.select_related("host", "pool"))
    neighbours.share(rows)
    with django_assert_num_queries(4):  # bases and their guests, overlays, guests
        found = {row.pk: (neighbours.of(row).below, neighbours.of(row).above) for row in rows}
        assert all(neighbours.of(row).guests == [] for row in rows)
        assert [base.pool.name for below, _ in found.values() for base in below]
    for row in rows:
        below, above = found[row.pk]
        assert (below, above) == (ancestors(row), descendants(row))
        assert [base.pk for base in below[:1]] == [row.backing_id] * bool(row.backing_id)
        assert {overlay.pk for overlay in above} == {pk for pk, (bases, _) in found.items() if row in bases}


def test_a_row_keeps_what_was_fetched_for_it_and_a_fresh_row_does_not() -> None:
    images = tree()
    assert names(neighbours.of(images["e"]).above) == []
    ImageFactory.create(backing=images["e"], name="f")
    assert names(neighbours.of(images["e"]).above) == []
    assert names(neighbours.of(Image.objects.get(pk=images["e"].pk)).above) == ["f"]
    assert names(descendants(images["e"])) == ["f"]
