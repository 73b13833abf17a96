"""Which plans are told of where a pool has too little space, and in which order; on the alert's page and over REST."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from rest_framework.test import APIClient

from images.alert_rules.looking import look
from images.selectors.what_frees import MOST, TRIMS, what_frees
from storage_admin.accounts.models import SYSTEM, Actor, Role
from storage_admin.events.models import Alert
from storage_admin.hosts.models import StoragePool
from tests.factories import GIB, GuestDiskFactory, HostFactory, ImageFactory, ImageUseFactory, JobFactory, TokenFactory
from tests.factories import StoragePoolFactory as Pools
from tests.working import client_as

pytestmark = pytest.mark.django_db


@pytest.fixture
def pool() -> StoragePool:
    """A nearly full pool with a plan of each kind, and another on its filesystem with one more."""
    now = timezone.now()
    host = HostFactory.create(slug="alpha", capabilities={"libvirt": "present"})
    pool = Pools.create(host=host, fs_key="one", available_bytes=4 * GIB)
    beside = Pools.create(host=host, fs_key="one", available_bytes=4 * GIB)
    can = {"reclaimable_bytes": 9 * GIB, "reclaimable_method": "copy", "declared_format": "qcow2", "orphan": False}
    image = ImageFactory.create(host=host, pool=pool, name="full-of-zeros", allocated_size=20 * GIB, **can)
    ImageFactory.create(host=host, pool=beside, name="beside", **can | {"reclaimable_bytes": 2 * GIB})
    ImageFactory.create(host=host, name="elsewhere", **can | {"reclaimable_bytes": 99 * GIB})
    ImageFactory.create(host=host, pool=pool, name="unused", allocated_size=7 * GIB, orphan=True)
    old = {"aside_since": now - timedelta(days=20), "orphan": False}
    ImageFactory.create(
        host=host, pool=pool, name="aside", allocated_size=8 * GIB, aside_until=now - timedelta(days=1), **old
    )
    ImageFactory.create(
        host=host, pool=pool, name="later", allocated_size=80 * GIB, aside_until=now + timedelta(days=1), **old
    )
    JobFactory.create(
        kind="reclaim", target=image, state="succeeded", undo_state="available", undo_bytes=4 * GIB,
        undo_expires=now + timedelta(days=1),
    )  # fmt: skip
    disk = GuestDiskFactory.create(guest__host=host, guest__state="running", guest__name="web")
    ImageUseFactory.create(image=image, disk=disk)
    return pool


def test_plans_of_the_whole_filesystem_are_told_of_and_what_frees_most_comes_first(pool: StoragePool) -> None:
    found = [(one.kind, (one.bytes or 0) // GIB, one.at_once) for one in what_frees(SYSTEM, pool)]
    assert found == [
        ("reclaim", 9, False), ("delete_aside", 8, True), ("set_aside", 7, False), ("discard_undo", 4, True),
        ("reclaim", 2, False), ("trim", 0, True),
    ]  # fmt: skip
    assert [one.bytes for one in what_frees(SYSTEM, pool)][-1] is None
    assert what_frees(Actor("x", Role.VIEWER, frozenset({"other"})), pool) == []


def test_space_that_other_files_or_names_have_as_well_is_told_by_none(pool: StoragePool) -> None:
    before, yesterday = what_frees(SYSTEM, pool), timezone.now() - timedelta(days=1)
    states: dict[str, Any] = {"unused": {"orphan": True}, "aside": {"aside_since": yesterday, "aside_until": yesterday}}
    for name, state in states.items():
        clone = {"estimate": {"basis": {"shared_bytes": 99 * GIB}}}
        for kind, more in (("clone", clone), ("one", {"nlink": 2}), ("other", {"nlink": 2})):
            ImageFactory.create(pool=pool, name=f"{kind}-{name}", allocated_size=100 * GIB, **state, **more)
    found = {(one.label, one.bytes) for one in what_frees(SYSTEM, pool) if one not in before}
    assert found == {("clone-unused", GIB), ("clone-aside", GIB)}


def test_what_frees_most_is_found_behind_larger_images_that_share_their_space(pool: StoragePool) -> None:
    shared = {"estimate": {"basis": {"shared_bytes": 90 * GIB - 1}}}
    for number in range(3 * MOST):
        ImageFactory.create(pool=pool, name=f"clone{number}", allocated_size=90 * GIB, orphan=True, **shared)
    ImageFactory.create(pool=pool, name="alone", allocated_size=30 * GIB, orphan=True)
    assert next((one.label, one.bytes) for one in what_frees(SYSTEM, pool)) == ("alone", 30 * GIB)


def test_trims_are_of_guests_that_exist_for_whoever_asks(pool: StoragePool) -> None:
    elsewhere = HostFactory.create(slug="beta")
    for number in range(4 * TRIMS):  # larger than that of one's own
        image = ImageFactory.create(host=pool.host, pool=pool, name=f"{number}", allocated_size=30 * GIB)
        disk = GuestDiskFactory.create(guest__host=elsewhere, guest__state="running", guest__name="payroll")
        ImageUseFactory.create(image=image, disk=disk)
    limited = Actor("x", Role.VIEWER, frozenset({"alpha"}))
    assert [one.label for one in what_frees(limited, pool) if one.kind == "trim"] == ["web"]
    assert [one.label for one in what_frees(SYSTEM, pool) if one.kind == "trim"] == ["payroll"] * TRIMS


def test_of_a_volume_only_what_it_does_not_share_with_its_snapshots_is_freed() -> None:
    host = HostFactory.create(capabilities={"proxmox": True})
    thin = Pools.create(host=host, kind="lvmthin", volume_facts={}, path_bytes=b"")
    for name, alone in (("measured", 2 * GIB), ("unknown", None)):
        ImageFactory.create(pool=thin, name=name, allocated_size=7 * GIB, orphan=True, alone_bytes=alone)
    assert [(one.label, one.bytes) for one in what_frees(SYSTEM, thin)] == [("measured", 2 * GIB), ("unknown", None)]


def test_the_page_of_an_alert_links_to_each_plan_and_rest_lists_them(pool: StoragePool) -> None:
    look(timezone.now())
    alert = Alert.objects.get(kind="pool_over_threshold")
    browser = client_as(role="admin")
    text = browser.get(f"/alerts/{alert.pk}/").content.decode()
    TokenFactory.create(secret="sa_viewer")
    api = APIClient()
    api.credentials(HTTP_AUTHORIZATION="Bearer sa_viewer")
    told = api.get(f"/api/v1/pools/{pool.pk}/frees/").json()
    assert [one["bytes"] for one in told] == [one.bytes for one in what_frees(SYSTEM, pool)]
    addresses = {"reclaim": "images/{}/reclaim/", "delete_aside": "images/{}/delete/", "trim": "guests/{}/trim/"}
    addresses |= {"set_aside": "images/{}/set-aside/", "discard_undo": "jobs/{}/"}
    for one in told:
        address = f"/{addresses[one['kind']].format(one['target']['id'])}"
        assert address in text
        assert browser.get(address).status_code == 200, address
    StoragePool.objects.update(available_bytes=90 * GIB)
    look(timezone.now())
    assert "/reclaim/" not in browser.get(f"/alerts/{alert.pk}/").content.decode()
