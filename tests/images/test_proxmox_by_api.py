"""Images of nodes of Proxmox VE that are reached by their API alone: what it tells, once, and never more than that."""

from datetime import timedelta

import pytest
from django.utils import timezone

from images import selectors
from images.models import Image
from images.scan import minutes, shared_storages, stopped_guests
from images.scan.run import ScanRun
from storage_admin.events.models import Alert
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, PoolMinute, StoragePool
from storage_admin.jobs import services
from tests.factories import ImageFactory, StoragePoolFactory
from tests.harness.patching import do_before
from tests.harness.proxmox.cluster import SHARED
from tests.harness.proxmox.server import ProxmoxServer
from tests.harness.proxmox.world import ALL, AUDITOR
from tests.images.by_api import STORE, add, add_and_scan, at, nodes, scan, server
from tests.working import OPERATOR, codes, refused_as, reread, run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

__all__ = ["nodes", "server"]


def test_the_images_of_a_folder_are_listed_with_what_the_api_tells(server: ProxmoxServer) -> None:
    host = add(server)
    told = server.world.volumes["store"]
    result = scan(host)
    assert (result["images"], result["vanished"]) == (len(told), 0)
    image = at(f"{STORE}/100/vm-100-disk-0.qcow2")
    assert (image.virtual_size, image.allocated_size, image.file_size) == (34359738368, 59199488, None)
    assert (image.format, image.declared_format, image.state) == ("qcow2", "qcow2", "ok")
    assert [use.disk.guest.name for use in image.uses.all()] == ["db1"]
    assert (image.in_use, image.orphan) == (None, False)
    left = at(f"{STORE}/999/vm-999-disk-0.qcow2")
    assert (left.in_use, left.orphan) == (None, None)
    pool = image.pool
    assert (pool.name, pool.images_count) == ("store", len(told))
    assert pool.allocated_bytes == sum(one["used"] for one in told)
    told_of = next(one for one in server.world.statuses if one["storage"] == "store")
    assert (pool.used_bytes, pool.available_bytes) == (told_of["used"], told_of["avail"])
    assert pool.last_scanned is not None
    assert scan(host)["read"] == 0


def test_a_look_each_minute_takes_what_the_api_says_of_the_room_now(server: ProxmoxServer) -> None:
    host = add_and_scan(server)
    pool = host.pools.get(name="store")
    before = [pool.used_bytes or 0, pool.available_bytes or 0]
    for one in server.world.statuses:
        if one["storage"] == "store":
            one |= {"used": one["used"] + 10**10, "avail": one["avail"] - 10**10}
    minutes.look(now := timezone.now())
    seen = StoragePool.objects.get(pk=pool.pk)
    assert [seen.used_bytes, seen.available_bytes] == [before[0] + 10**10, before[1] - 10**10]
    assert PoolMinute.objects.filter(pool=pool).count() == 1
    for one in server.world.statuses:
        one["active"] = 0
    minutes.look(now + timedelta(hours=1))
    assert (reread(pool).available_bytes, reread(pool).space_seen) == (seen.available_bytes, seen.space_seen)


def test_a_linked_clone_stands_on_its_base(server: ProxmoxServer) -> None:
    scan(add(server))
    base, clone = at(f"{STORE}/101/base-101-disk-0.qcow2"), at(f"{STORE}/102/vm-102-disk-0.qcow2")
    assert (clone.backing, clone.chain_depth, clone.state) == (base, 2, "ok")
    assert (base.overlays_count, base.orphan) == (1, False)


def test_a_base_that_is_not_listed_and_one_that_is_no_file_are_said(server: ProxmoxServer) -> None:
    rows = server.world.volumes["store"]
    clone = next(row for row in rows if row["vmid"] == 102)
    rows[:] = [row for row in rows if row["vmid"] != 101] + [
        clone | {"volid": "store:103/vm-103-disk-0.qcow2", "vmid": 103, "parent": 'json:{"driver":"nbd"}'}
    ]
    scan(add(server))
    for place in (f"{STORE}/102/vm-102-disk-0.qcow2", f"{STORE}/103/vm-103-disk-0.qcow2"):
        assert (at(place).state, at(place).backing) == ("outside_pool", None)
    assert "is not among the volumes" in at(f"{STORE}/102/vm-102-disk-0.qcow2").state_detail


def test_what_the_api_does_not_tell_is_unknown_and_not_0(server: ProxmoxServer) -> None:
    world = server.world
    active = {"active": 1, "total": 10**11, "used": 10**10, "avail": 9 * 10**10}
    world.statuses = [one | (active if one["type"] in ("lvmthin", "rbd") else {}) for one in world.statuses]
    world.volumes["local-lvm"] = [
        {"volid": "local-lvm:vm-110-disk-0", "content": "images", "format": "raw", "size": 4 << 30, "vmid": 110}
    ]
    world.volumes["ceph"] = [
        {"volid": "ceph:base-101-disk-9", "content": "images", "format": "raw", "size": 1 << 30, "vmid": 101},
        {"volid": "ceph:base-101-disk-9/vm-110-disk-2", "content": "images", "format": "raw", "size": 1 << 30,
         "vmid": 110, "parent": "base-101-disk-9@__base__"},
    ]  # fmt: skip
    world.volumes["store"][0]["used"] = 0
    scan(add(server))
    volume = at("/dev/pve/vm-110-disk-0")
    assert (volume.virtual_size, volume.allocated_size, volume.name) == (4 << 30, None, "vm-110-disk-0")
    assert volume.pool.allocated_bytes is None
    assert at("rbd:rbd/vm-110-disk-2").backing == at("rbd:rbd/base-101-disk-9")
    assert at(f"{STORE}/{world.volumes['store'][0]['volid'].partition(':')[2]}").allocated_size == 0
    totals = selectors.overview(OPERATOR).totals
    assert (totals.measured_count, totals.images_count) == (12, 15)
    chain = selectors.chain_of(volume)
    assert (chain.allocated_size, chain.virtual_size) == (None, 4 << 30)
    assert services.plan(OPERATOR, "reclaim", volume.pk, {}).before_bytes is None
    assert codes("reclaim", volume) == {"tool_missing"}


def test_a_file_that_is_not_what_its_name_says_has_no_size(server: ProxmoxServer) -> None:
    row = next(row for row in server.world.volumes["store"] if row["vmid"] == 104)
    row |= {"format": "invalid", "size": 0}
    scan(add(server))
    image = at(f"{STORE}/104/vm-104-disk-0.qcow2")
    assert (image.state, image.virtual_size) == ("unreadable", None)


@pytest.mark.parametrize("kind", ["reclaim", "flatten", "convert", "check", "analyze"])
def test_every_job_there_is_refused_with_what_to_do(server: ProxmoxServer, kind: str) -> None:
    scan(add(server))
    image = at(f"{STORE}/102/vm-102-disk-0.qcow2")
    options = {"format": "raw"} if kind == "convert" else {}
    assert refused_as(services.submit, OPERATOR, kind, image.pk, options) == "tool_missing"


@pytest.mark.parametrize("kind", ["recover", "sample"])
def test_work_on_the_whole_node_is_refused_as_well(server: ProxmoxServer, kind: str) -> None:
    assert refused_as(services.submit, OPERATOR, kind, add(server).pk, {}) == "tool_missing"


def test_what_went_has_vanished_and_what_changed_is_written_again(server: ProxmoxServer) -> None:
    host = add_and_scan(server)
    rows = server.world.volumes["store"]
    gone = rows.pop()
    rows[0]["used"] += 4096
    result = scan(host)
    assert (result["read"], result["vanished"]) == (1, 1)
    assert at(f"{STORE}/{gone['volid'].partition(':')[2]}").state == "missing"


WITHOUT_STORAGES = tuple(right for right in ALL if not right.startswith("Datastore."))


@pytest.mark.parametrize(
    ("left", "named"),
    [(AUDITOR, "VM.Config.Disk on /vms"), (WITHOUT_STORAGES, "Datastore.Audit")],
    ids=["an auditor", "without storages"],
)
def test_images_that_the_token_may_not_see_any_more_stay_as_they_were_last_seen(
    server: ProxmoxServer, left: tuple[str, ...], named: str
) -> None:
    host = add_and_scan(server)
    before = {image.path: image.last_scanned for image in Image.objects.select_related("pool")}
    server.world.allow(*left)
    assert scan(host)["vanished"] == 0
    pool = StoragePool.objects.get(host=host, name="store")
    assert (pool.state, pool.images_count) == ("unreadable", len(before))
    assert named in pool.state_detail
    assert (host.status, named in host.status_detail) == ("degraded", True)
    assert {image.path: image.last_scanned for image in Image.objects.select_related("pool")} == before
    assert {image.state for image in Image.objects.all()} == {"ok"}
    server.world.allow(*ALL)
    scan(host)
    assert (host.status, StoragePool.objects.get(pk=pool.pk).state) == ("ok", "ok")


def test_a_token_that_never_saw_them_is_not_told_that_there_are_none(server: ProxmoxServer) -> None:
    server.world.allow(*AUDITOR)
    host = add_and_scan(server)
    pool = StoragePool.objects.get(host=host, name="store")
    assert (pool.state, pool.last_scanned) == ("unreadable", None)
    assert "VM.Config.Disk" in pool.state_detail


def test_a_storage_that_hangs_keeps_its_images(server: ProxmoxServer) -> None:
    host = add_and_scan(server)
    server.world.broken["store"] = ""
    assert scan(host)["vanished"] == 0
    pool = StoragePool.objects.get(host=host, name="store")
    assert (pool.state, "did not answer" in pool.state_detail, pool.images_count) == ("unreadable", True, 12)


def test_a_storage_that_two_nodes_share_is_one_set_of_images(nodes: tuple[Host, Host]) -> None:
    first, second = nodes
    for host in (first, second, first, second):
        scan(host)
    assert Guest.objects.count() == 2
    assert sorted(Image.objects.values_list("path", flat=True)) == [
        f"{SHARED}/501/vm-501-disk-0.qcow2", f"{SHARED}/502/vm-502-disk-0.qcow2",
    ]  # fmt: skip
    pools = StoragePool.objects.filter(name="nfs").order_by("host_id")
    assert [(pool.images_count, pool.allocated_bytes) for pool in pools] == [(2, 2 << 20), (2, 2 << 20)]
    assert "listed at another node" in pools[1].state_detail
    assert shared_storages.listed_in(pools[1]) == pools[0].pk
    totals = selectors.overview(OPERATOR).totals
    assert (totals.images_count, totals.allocated_bytes, totals.virtual_bytes) == (2, 2 << 20, 2 << 30)
    locals_ = StoragePool.objects.exclude(name="nfs").filter(capacity_bytes__gt=0)
    assert totals.capacity_bytes == 10**12 + sum(pool.capacity_bytes or 0 for pool in locals_)
    # A guest of the other node uses its image, though that node does not list it.
    running = at(f"{SHARED}/502/vm-502-disk-0.qcow2")
    assert ([use.disk.guest.name for use in running.uses.all()], running.in_use) == (["guest2"], True)


def test_two_nodes_that_are_scanned_at_the_same_time_list_a_shared_storage_once(
    nodes: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes
    begun: list[int] = []

    def late(run: ScanRun) -> None:
        if not begun:  # the second node's whole scan runs while that of the first is about to end
            begun.append(run.job.pk)
            scan(second)
            assert Image.objects.filter(host=second).count() == 2

    do_before(monkeypatch, ScanRun, "finish", late)
    scan(first)
    rows = [(first.pk, f"vm-{number}-disk-0.qcow2") for number in (501, 502)]
    assert sorted(Image.every.values_list("host_id", "name")) == rows
    assert "listed at another node" in StoragePool.objects.get(host=second, name="nfs").state_detail


def test_where_the_node_that_lists_falls_silent_the_other_takes_its_rows_over(nodes: tuple[Host, Host]) -> None:
    first, second = nodes
    scan(first)
    scan(second)
    ids = set(Image.objects.values_list("pk", flat=True))
    Host.objects.filter(pk=first.pk).update(port=1)
    assert run(services.submit(OPERATOR, "scan", first.pk, {})).state == "failed"
    scan(second)
    assert set(Image.objects.values_list("pk", flat=True)) == ids
    assert set(Image.objects.values_list("host_id", flat=True)) == {second.pk}
    assert at(f"{SHARED}/502/vm-502-disk-0.qcow2").in_use is True


def test_where_an_agent_walks_the_shared_folder_its_facts_win(nodes: tuple[Host, Host]) -> None:
    first, second = nodes
    scan(second)
    assert Image.objects.filter(host=second).count() == 2
    scan(first)
    Host.objects.filter(pk=first.pk).update(transport="api+ssh")
    StoragePool.objects.filter(host=first).delete()
    walked = StoragePoolFactory.create(
        host=first, name="renamed", path="/mnt/pve/nfs", path_bytes=b"/mnt/pve/nfs", source="proxmox", network=True,
        shared_key="nfs4:192.0.2.9:/vms/", fs_key="nfs4:192.0.2.9:/vms",
    )  # fmt: skip
    image = ImageFactory.create(pool=walked, host=first, path=f"{SHARED}/501/vm-501-disk-0.qcow2")
    scan(second)
    assert list(Image.objects.all()) == [image]
    pool = StoragePool.objects.get(host=second, name="nfs")
    assert (pool.shared_key, pool.fs_key) == ("nfs4:192.0.2.9:/vms/", "nfs4:192.0.2.9:/vms")
    assert selectors.overview(OPERATOR).totals.images_count == 1


def test_what_an_agent_has_walked_is_counted_once_as_soon_as_its_scan_ends(nodes: tuple[Host, Host]) -> None:
    first, second = nodes
    scan(second)
    Host.objects.filter(pk=first.pk).update(transport="api+ssh")
    walked = StoragePoolFactory.create(
        host=first, name="nfs", path="/mnt/pve/nfs", path_bytes=b"/mnt/pve/nfs", source="proxmox", network=True,
        shared_key="nfs4:192.0.2.9:/vms/", fs_key="nfs4:192.0.2.9:/vms", state="ok", capacity_bytes=10**12,
    )  # fmt: skip
    image = ImageFactory.create(pool=walked, host=first, path=f"{SHARED}/501/vm-501-disk-0.qcow2")
    shared_storages.settle(reread(first))  # as its scan does in the end
    assert list(Image.every.all()) == [image]
    pool = StoragePool.objects.get(host=second, name="nfs")
    assert (pool.shared_key, pool.fs_key) == (walked.shared_key, walked.fs_key)
    assert shared_storages.listed_in(pool) == walked.pk


def test_a_vm_that_is_paused_by_an_io_error_is_named_with_its_disks_until_it_goes_on(server: ProxmoxServer) -> None:
    host = add_and_scan(server)
    guest = Guest.objects.get(host=host, name="db1")
    stopped_guests.look()
    assert not Alert.objects.exists()
    vm = server.world.guests["vm", int(guest.uid)]
    vm.running, vm.qmp = True, "io-error"
    stopped_guests.look()
    alert = Alert.objects.get(closed=None)
    assert (alert.kind, alert.target_id, alert.severity) == ("guest_io_error", guest.pk, "danger")
    assert "vm-100-disk-0.qcow2 in pool store" in alert.detail
    vm.qmp = "running"
    stopped_guests.look()
    assert not Alert.objects.filter(closed=None).exists()
