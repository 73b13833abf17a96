"""The tree around an image, and what deleting one of its files would free."""

import pytest

from images.models import Image
from images.selectors import Node, chain_of
from tests.factories import GIB, GuestDiskFactory, ImageFactory, ImageUseFactory, StoragePoolFactory
from tests.working import at_most_queries

pytestmark = [pytest.mark.django_db, pytest.mark.sql]


def node(image: Image) -> Node:
    return next(node for node in chain_of(image).nodes if node.id == image.pk)


def test_every_image_of_the_tree_sees_the_whole_tree() -> None:
    base = ImageFactory.create(allocated_size=5 * GIB)
    left, right = (ImageFactory.create(backing=base, allocated_size=GIB) for _ in range(2))
    leaf = ImageFactory.create(backing=left, allocated_size=2 * GIB)
    for image in (base, left, right, leaf):
        chain = chain_of(image)
        assert {node.id for node in chain.nodes} == {base.pk, left.pk, right.pk, leaf.pk}
        edges = {(edge.overlay, edge.base) for edge in chain.edges}
        assert edges == {(left.pk, base.pk), (right.pk, base.pk), (leaf.pk, left.pk)}
        assert (chain.allocated_size, chain.virtual_size) == (9 * GIB, 40 * GIB)


def test_a_standalone_image_is_a_tree_of_one() -> None:
    image = ImageFactory.create()
    ImageFactory.create()
    chain = chain_of(image)
    assert [node.id for node in chain.nodes] == [image.pk]
    assert chain.edges == ()


def test_members_of_a_circle_are_each_shown_once() -> None:
    one = ImageFactory.create(state="chain_cycle")
    two = ImageFactory.create(backing=one, state="chain_cycle")
    Image.objects.filter(pk=one.pk).update(backing=two, root_id=None)
    Image.objects.filter(pk=two.pk).update(root_id=None)
    assert sorted(node.id for node in chain_of(Image.objects.get(pk=one.pk)).nodes) == sorted([one.pk, two.pk])


def test_images_without_a_known_root_are_found_through_their_links() -> None:
    base = ImageFactory.create()
    middle = ImageFactory.create(backing=base)
    leaf = ImageFactory.create(backing=middle)
    Image.objects.update(root_id=None)
    assert {node.id for node in chain_of(Image.objects.get(pk=leaf.pk)).nodes} == {base.pk, middle.pk, leaf.pk}


def test_deleting_what_nothing_needs_frees_all_of_it() -> None:
    assert node(ImageFactory.create(allocated_size=GIB)).freed_if_deleted == GIB


def test_deleting_frees_nothing_of_what_other_files_share() -> None:
    shared = {"basis": {"shared_bytes": 3 * GIB}}
    image = ImageFactory.create(allocated_size=4 * GIB, estimate=shared)
    with at_most_queries(6):
        assert node(image).freed_if_deleted == GIB
    shrunk = ImageFactory.create(allocated_size=2 * GIB, estimate=shared)
    assert node(shrunk).freed_if_deleted == 0


def test_deleting_a_base_frees_nothing_as_its_overlay_needs_it() -> None:
    base = ImageFactory.create()
    overlay = ImageFactory.create(backing=base)
    assert (node(base).needed_by, node(base).freed_if_deleted) == ((overlay.pk,), 0)
    assert node(overlay).freed_if_deleted == overlay.allocated_size


def test_deleting_a_guests_disk_frees_nothing_as_the_guest_needs_it() -> None:
    use = ImageUseFactory.create(disk__guest__name="web", disk__guest__state="shut off")
    assert (node(use.image).needed_by, node(use.image).freed_if_deleted) == (("web",), 0)


def test_a_guest_with_an_image_on_two_disks_needs_it_once() -> None:
    use = ImageUseFactory.create(disk__guest__name="web")
    ImageUseFactory.create(image=use.image, disk=GuestDiskFactory.create(guest=use.disk.guest))
    assert node(use.image).needed_by == ("web",)
    assert len(node(use.image).guests) == 2


def test_a_vanished_overlay_does_not_hold_its_base() -> None:
    base = ImageFactory.create(allocated_size=GIB)
    ImageFactory.create(backing=base, state="missing")
    assert node(base).freed_if_deleted == GIB
    assert chain_of(base).allocated_size == GIB


def test_deleting_one_of_two_hard_links_frees_nothing() -> None:
    pool = StoragePoolFactory.create()
    one, two = (ImageFactory.create(pool=pool, inode="7", nlink=2, allocated_size=GIB) for _ in range(2))
    Image.objects.update(root_id=one.pk)
    assert node(one).freed_if_deleted == node(two).freed_if_deleted == 0
    assert chain_of(one).allocated_size == GIB


def test_what_a_process_holds_open_is_not_freed() -> None:
    assert node(ImageFactory.create(in_use=True)).freed_if_deleted == 0


@pytest.mark.parametrize(
    "unknown",
    [
        {"in_use": None},
        {"pool__owners_unknown": "libvirt does not answer."},
        {"pool__host__owners_unknown": "This Proxmox node's guests are not read yet."},
        {"pool__network": True},
    ],
)
def test_where_it_is_not_known_who_needs_it_nothing_is_promised(unknown: dict[str, object]) -> None:
    assert node(ImageFactory.create(**unknown)).freed_if_deleted is None


def test_a_network_pool_whose_hosts_are_all_registered_is_known() -> None:
    image = ImageFactory.create(pool__network=True, pool__all_hosts_registered=True, allocated_size=GIB)
    assert node(image).freed_if_deleted == GIB


def test_an_unknown_virtual_size_makes_the_sum_unknown() -> None:
    base = ImageFactory.create()
    ImageFactory.create(backing=base, virtual_size=None)
    assert chain_of(base).virtual_size is None


def test_the_number_of_queries_does_not_grow_with_the_clones() -> None:
    base = ImageFactory.create()
    for _ in range(40):
        ImageFactory.create(backing=base)
    with at_most_queries(10):
        assert len(chain_of(base).nodes) == 41
