"""What a mount of NFS can do: on the pool's page, over REST, and in what plans offer and refuse."""

from typing import Any

import pytest

from images.models import Image
from images.rewrite import mount
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from tests.factories import HostFactory, ImageFactory, StoragePoolFactory
from tests.working import ADMIN, client_as, codes

pytestmark = pytest.mark.django_db

FACTS: dict[str, Any] = {
    "version": "4.2", "addresses": ["192.0.2.1"], "fsid": "7", "inode": 128, "dev": "41", "soft": False,
    "writable": True, "locks": True, "holes": None, "reserves": False, "root_writes": True,
    "shared_key": "nfs:nas:/vm/", "fs_key": "nfs:nas:/vm",
}  # fmt: skip


def pool(**facts: Any) -> StoragePool:
    return StoragePoolFactory.create(
        host=HostFactory.create(slug="local"), network=True, all_hosts_registered=True, filesystem="nfs 4.2",
        kind=StoragePool.Kind.NFS, mount=FACTS | facts,
    )  # fmt: skip


def test_the_page_and_rest_tell_what_the_kernel_told() -> None:
    row = pool(soft=True)
    admin = client_as(role="admin")
    told = admin.get(f"/api/v1/pools/{row.pk}/").json()
    assert told["mount"] == {name: FACTS[name] for name in told["mount"]} | {"soft": True}
    assert told["may_be_shared"] is False
    page = admin.get(f"/pools/{row.pk}/").content.decode()
    shown = [value for _name, value, _about in mount.facts(row)]
    assert all(value in page for value in shown)
    assert (shown[0], len(shown)) == ("4.2", 6)
    StoragePool.objects.update(mount={})
    assert admin.get(f"/api/v1/pools/{row.pk}/").json()["mount"] is None


@pytest.mark.parametrize(
    ("facts", "code"),
    [({"locks": False}, "locks_missing"), ({"writable": False}, "immutable"), ({"root_writes": False}, "immutable")],
)
def test_a_mount_without_locks_or_write_access_refuses_what_would_fail_there(facts: dict[str, Any], code: str) -> None:
    row = pool(**facts)
    image: Image = ImageFactory.create(pool=row)
    assert code in codes("reclaim", image, ADMIN, method="copy")
    assert code in codes("set_aside", image, ADMIN)
    makes = codes("create", row, ADMIN, name="new.qcow2", virtual_size=1 << 30)
    assert (code in makes) == (code == "immutable")
    assert code not in codes("check", image, ADMIN, repair="none")
    StoragePool.objects.update(mount=FACTS)
    assert code not in codes("reclaim", image, ADMIN, method="copy") | codes("set_aside", image, ADMIN)


def test_space_that_a_server_cannot_reserve_is_said_to_be_written() -> None:
    row = pool()
    asked = {"name": "new.raw", "format": "raw", "virtual_size": 1 << 20, "format_options": {"preallocation": "falloc"}}
    warned = len(services.plan(ADMIN, "create", row.pk, asked).warnings)
    StoragePool.objects.update(mount=FACTS | {"reserves": None})
    assert len(services.plan(ADMIN, "create", row.pk, asked).warnings) == warned - 1


@pytest.mark.parametrize(
    ("filesystem", "holes", "has_none"),
    [("nfs 4.2", False, True), ("nfs 4.2", None, False), ("nfs 4.2", True, False), ("nfs 3", None, True)],
)
def test_a_server_that_has_refused_holes_has_none(filesystem: str, holes: bool | None, has_none: bool) -> None:
    row = pool(holes=holes)
    row.filesystem = filesystem
    assert mount.has_no_holes(row) == has_none
