"""One storage by many names, and many by one: what numbers, times and addresses of a server prove (safety.md, 2.3)."""

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from images.models import Image
from images.rewrite.neighbours import locks_on
from images.scan import same_storages, shared_storages
from images.selectors import overview
from storage_admin.accounts.models import SYSTEM
from storage_admin.hosts.models import StoragePool
from tests.factories import GIB, HostFactory, ImageFactory, StoragePoolFactory
from tests.working import reread

pytestmark = [pytest.mark.django_db, pytest.mark.sql]

KNOWN = timezone.now() - timedelta(days=2)
BEFORE_NS = int((KNOWN - timedelta(days=30)).timestamp() * 1e9)
SINCE_NS = int((KNOWN + timedelta(days=1)).timestamp() * 1e9)


def pool(key: str, *, host: Any = None, path: str = "/mnt/images", **mount: Any) -> StoragePool:
    """A pool as a scan has just told of it; unless said otherwise, the root of an XFS on some server."""
    told: dict[str, Any] = {
        "version": "4.2", "addresses": ["192.0.2.1"], "fsid": None, "inode": 128, "dev": "41", "soft": False,
        "writable": True, "locks": True, "holes": None, "reserves": None, "root_writes": True,
        "shared_key": f"{key}/", "fs_key": key,
    }  # fmt: skip
    return StoragePoolFactory.create(
        host=host or HostFactory.create(), path=path, network=True, known_since=KNOWN, mount=told | mount,
        shared_key=f"{key}/", fs_key=key, all_hosts_registered=True,
    )  # fmt: skip


def image(where: StoragePool, name: str, inode: int = 9, changed_ns: int = BEFORE_NS, **columns: Any) -> Image:
    size = {"mtime_ns": changed_ns, "ctime_ns": changed_ns, "file_size": GIB, "allocated_size": GIB}
    return ImageFactory.create(
        host=where.host, pool=where, path=f"{where.path}/{name}", name=name.rpartition("/")[2], inode=str(inode),
        dev=where.mount["dev"], **size | columns,
    )  # fmt: skip


def scanned(*pools: StoragePool) -> None:
    for one in pools:
        same_storages.settle(one.host, {one.pk})
    for one in pools:
        one.refresh_from_db()


def are_one(one: StoragePool, other: StoragePool) -> str:
    """What they are taken for once both were scanned."""
    scanned(one, other)
    return taken_for(one, other)


def taken_for(one: StoragePool, other: StoragePool) -> str:
    pairs = [pair for pair in shared_storages.shared(one.host) if pair.other.pk == other.pk]
    counted = overview(SYSTEM).totals.pools_counted
    assert len(pairs) <= 1
    if not pairs:
        assert counted == 2
        return "two"
    assert pairs[0].is_proven == (one.shared_key == other.shared_key)
    assert counted == (2 if pairs[0].is_proven else 1)
    assert overview(SYSTEM).totals.capacity_bytes == one.capacity_bytes
    return "one" if pairs[0].is_proven else "maybe"


def test_the_same_number_of_the_same_server_is_one_storage_by_whatever_path() -> None:
    one = pool("nfs:nas:/vm", fsid="b4e88f8e55655aab")
    other = pool("nfs:192.0.2.1:/srv/vm", version="3", fsid="b4e88f8e55655aab", path="/srv/other")
    assert are_one(one, other) == "one"
    assert (one.fs_key, other.fs_key) == ("nfs:nas:/vm", "nfs:nas:/vm")
    assert (other.told_fs_key, other.mount["shared_key"]) == ("nfs:192.0.2.1:/srv/vm", "nfs:192.0.2.1:/srv/vm/")


def test_servers_that_are_set_to_the_same_number_are_two() -> None:
    one, other = pool("nfs:one:/", fsid="0"), pool("nfs:two:/", fsid="0", addresses=["192.0.2.2"])
    image(one, "a.qcow2"), image(other, "b.qcow2", 10)
    assert are_one(one, other) == "two"


def test_one_name_that_leads_to_other_servers_is_not_taken_for_one_storage() -> None:
    one, other = pool("nfs:nas:/vm", fsid="1"), pool("nfs:nas:/vm", fsid="2", addresses=["192.0.2.2"])
    image(one, "a.qcow2"), image(other, "b.qcow2", 10)
    assert are_one(one, other) == "maybe"
    assert one.shared_key != other.shared_key


def test_a_server_that_was_installed_anew_is_another_one_until_both_have_mounted_it() -> None:
    before = pool("nfs:nas:/vm", fsid="1", inode=542)
    after = pool("nfs:nas:/vm", fsid="2", inode=77)
    scanned(after)
    assert taken_for(after, before) == "maybe"
    before.mount |= {"fsid": "2", "inode": 77}
    before.save()
    assert are_one(before, after) == "one"


def _two_addresses() -> tuple[StoragePool, StoragePool]:
    return pool("nfs:nas:/vm"), pool("nfs:[fd00::1]:/vm", addresses=["fd00::1"], path="/mnt/pve/nas")


def test_by_two_addresses_a_file_that_was_changed_while_both_were_known_proves_one_storage() -> None:
    one, other = _two_addresses()
    for where in (one, other):
        image(where, "a.qcow2", 9, SINCE_NS)
    assert are_one(one, other) == "one"
    assert overview(SYSTEM).totals.images_count == 1


def test_what_two_servers_have_from_one_template_proves_nothing_and_protects() -> None:
    one, other = _two_addresses()
    pairs = [(image(one, f"{number}.qcow2", number), image(other, f"{number}.qcow2", number)) for number in (9, 10)]
    assert are_one(one, other) == "maybe"
    assert overview(SYSTEM).totals.images_count == 2
    locked = {lock.key for lock in locks_on(pairs[0][0], exclusive=True)}
    assert locked & {lock.key for lock in locks_on(pairs[0][1], exclusive=True)}
    assert not locked & {lock.key for lock in locks_on(pairs[1][1], exclusive=True)}


def test_a_file_that_only_has_the_same_name_and_number_proves_nothing() -> None:
    one, other = _two_addresses()
    image(one, "a.qcow2", 9, SINCE_NS), image(other, "a.qcow2", 9, SINCE_NS + 1)
    assert are_one(one, other) == "maybe"


def test_another_number_of_the_filesystem_speaks_against_equal_files() -> None:
    one, other = pool("nfs:nas:/vm", fsid="1"), pool("nfs:copy:/vm", fsid="2", addresses=["192.0.2.2"])
    image(one, "a.qcow2", 9, SINCE_NS), image(other, "a.qcow2", 9, SINCE_NS)
    assert are_one(one, other) == "maybe"


def test_the_servers_own_folder_is_the_storage_that_others_mount() -> None:
    own = pool(
        "fs:machine:185c33b5:", version=None, addresses=["192.0.2.1", "fd00::1"], path="/srv/vm", inode=542, dev="65024"
    )
    mounted = pool("nfs:nas:/vm", inode=542)
    assert are_one(own, mounted) == "maybe"  # nothing is in it
    here, there = image(own, "a.qcow2"), image(mounted, "a.qcow2")
    assert are_one(own, mounted) == "one"
    assert shared_storages.rows_elsewhere(here) == [there.pk]


def test_what_two_addresses_do_not_prove_the_server_itself_does() -> None:
    own = pool("fs:machine:u:", version=None, addresses=["192.0.2.1", "fd00::1"], path="/srv/vm", dev="65024")
    one, other = _two_addresses()
    for where in (own, one, other):
        image(where, "a.qcow2")
    scanned(own, one, other, one)
    assert {own.shared_key} == {one.shared_key, other.shared_key}
    assert (one.may_be, other.may_be, overview(SYSTEM).totals.images_count) == ([], [], 1)


def test_own_folders_of_two_machines_are_two() -> None:
    one = pool("fs:one:u:", version=None, path="/srv/vm")
    other = pool("fs:two:u:", version=None, path="/srv/vm")
    image(one, "a.qcow2", 9, SINCE_NS), image(other, "a.qcow2", 9, SINCE_NS)
    assert are_one(one, other) == "two"


def test_a_folder_that_a_node_exports_is_not_the_folder_of_that_path_on_other_nodes() -> None:
    nodes = [HostFactory.create(kind="proxmox", cluster="c") for _ in range(2)]
    pools = [pool(f"fs:{node.pk}:u:", host=node, version=None, path="/var/lib/vz") for node in nodes]
    StoragePool.objects.update(source="proxmox")
    assert [shared_storages.siblings(reread(one)) for one in pools] == [[], []]
    StoragePool.objects.update(mount={})
    assert len(shared_storages.siblings(reread(pools[0]))) == 1


def test_a_folder_of_an_export_is_found_within_it_by_a_file() -> None:
    whole = pool("nfs:nas:/vm")
    part = pool("nfs:nas2:/export/part", inode=700, path="/mnt/part")
    image(whole, "part/a.qcow2"), image(part, "a.qcow2")
    scanned(part, whole)
    assert (part.shared_key, part.fs_key) == ("nfs:nas:/vm/part", "nfs:nas:/vm")
    pair = next(one for one in shared_storages.shared(part.host) if one.pool.pk == part.pk)
    assert (pair.before, pair.after, pair.is_proven) == (b"/mnt/images/part/", b"/mnt/part/", True)


def test_one_export_that_a_host_has_mounted_twice_is_one_and_its_images_are_one() -> None:
    one = pool("nfs:nas:/vm", fsid="5")
    other = pool("nfs:nas:/srv/vm", fsid="5", version="3", host=one.host, path="/mnt/again", dev="42")
    here, there = image(one, "a.qcow2"), image(other, "a.qcow2")
    assert are_one(one, other) == "one"
    assert shared_storages.rows_elsewhere(here) == [there.pk]
    assert overview(SYSTEM).totals.images_count == 1


def test_empty_folders_with_the_number_that_every_filesystem_begins_with_are_told_apart_by_their_size() -> None:
    one, other = pool("nfs:one:/"), pool("nfs:two:/", addresses=["192.0.2.2"])
    StoragePool.objects.filter(pk=other.pk).update(capacity_bytes=77 * GIB)
    scanned(one, other)
    assert not shared_storages.shared(one.host)
    StoragePool.objects.filter(pk=other.pk).update(capacity_bytes=one.capacity_bytes)
    assert are_one(one, other) == "maybe"
