"""A node of Proxmox VE as its agent finds it: guests by the files of /etc/pve, and what they keep from being done."""

from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from images.scan import hypervisors
from storage_admin.agent.protocol import RefusedError
from storage_admin.guests.models import Guest
from storage_admin.hosts import secrets
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from tests.harness.proxmox.server import ProxmoxServer, server
from tests.harness.proxmox.world import SECRET, TOKEN_ID
from tests.images.by_api import add, scan
from tests.images.node import NODE, config, scanned
from tests.working import ADMIN, OPERATOR, create, image_at, refused_as, reread, run, succeeded, this_machine, work

__all__ = ["server"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_reserve")]


def disk(pve: Path, name: str = "vm-100-disk-0.qcow2") -> Path:
    path = pve.parents[2] / "store/images/100" / name
    return create(path)


def test_guests_of_a_node_are_known_and_their_disks_are_no_orphans(pve: Path) -> None:
    path, left = disk(pve), disk(pve, "vm-100-disk-9.qcow2")
    only = disk(pve, "vm-100-disk-1.qcow2")
    config(
        pve,
        "name: web\nscsi0: store:100/vm-100-disk-0.qcow2,size=8M\nmemory: 512\n\n"
        "[before]\nscsi1: store:100/vm-100-disk-1.qcow2,size=8M\n",
    )
    host = this_machine()
    scanned(host)
    assert reread(host).owners_unknown == ""
    assert StoragePool.objects.get(host=host).name == "store"
    guest = Guest.objects.get(host=host)
    assert (guest.kind, guest.uid, guest.name, guest.state) == ("vm", "100", "web", "shut off")
    assert [image_at(one).orphan for one in (path, only, left)] == [False, False, True]
    assert [use.disk.guest.name for use in image_at(path).uses.all()] == ["web"]
    succeeded(work("reclaim", image_at(path).pk, OPERATOR, method="copy"))


def test_a_locked_guest_keeps_its_disks_as_they_are(pve: Path) -> None:
    path = disk(pve)
    config(pve, "name: web\nlock: backup\nscsi0: store:100/vm-100-disk-0.qcow2\n")
    scanned(this_machine())
    assert refused_as(services.submit, OPERATOR, "reclaim", image_at(path).pk, {}) == "guest_locked"


def test_a_guest_that_was_started_or_locked_since_the_scan_stops_the_job(pve: Path) -> None:
    path = disk(pve)
    config(pve, "name: web\nscsi0: store:100/vm-100-disk-0.qcow2\n")
    host = this_machine()
    scanned(host)
    job = services.submit(OPERATOR, "reclaim", image_at(path).pk, {"method": "copy"})
    config(pve, "name: web\nlock: migrate\nscsi0: store:100/vm-100-disk-0.qcow2\n")
    ended = run(job)
    assert (ended.state, ended.error_code) == ("failed", "guest_locked")


def test_a_file_that_cannot_be_read_leaves_unknown_who_uses_what(pve: Path) -> None:
    path = disk(pve)
    (pve / f"nodes/{NODE}/qemu-server/102.conf").mkdir()
    scanned(this_machine())
    assert image_at(path).in_use is None
    assert "102.conf" in Host.objects.get().owners_unknown
    assert refused_as(services.submit, OPERATOR, "reclaim", image_at(path).pk, {}) == "guests_unknown"


def test_the_files_are_asked_for_where_the_last_scan_saw_proxmox(pve: Path) -> None:
    host = this_machine()
    assert not hypervisors.were_missed(host, [])
    scanned(host)
    assert hypervisors.were_missed(reread(host), [])


def test_beside_an_agent_the_api_lists_what_is_no_file_and_nothing_twice(pve: Path, server: ProxmoxServer) -> None:
    path = disk(pve)
    lvm(server)
    (pve / "nodes/pve1/qemu-server").mkdir(parents=True)
    config(pve, "name: blocks\nscsi0: local-lvm:vm-110-disk-0,size=4G\n", vmid=110, node="pve1")
    host = with_api(server, "pve1")
    scanned(host)
    scanned(host)
    assert not [one for one in server.seen if one.path.endswith("/store/content") and "content" not in one.params]
    assert sorted(Image.objects.values_list("path", "allocated_size")) == [
        ("/dev/pve/vm-110-disk-0", None),
        (str(path), path.stat().st_blocks * 512),
    ]
    assert image_at(b"/dev/pve/vm-110-disk-0").uses.get().disk.guest.uid == "110"


def is_this_node(server: ProxmoxServer) -> None:
    server.world.node, server.world.cluster_status = NODE, []
    server.world.nodes = [{"node": NODE, "status": "online"}]


def with_api(server: ProxmoxServer, node: str = NODE) -> Host:
    """This machine, with the API of a node beside its agent."""
    host = this_machine()
    if node == NODE:
        is_this_node(server)
    host.address, host.port, host.tls_fingerprint = server.address, server.port, server.fingerprint
    host.token_id, host.token_locked, host.node = TOKEN_ID, secrets.lock(SECRET), node
    host.save()
    return host


def lvm(server: ProxmoxServer) -> None:
    """A storage that is no folder, which only the API lists, with one volume."""
    for one in server.world.statuses:
        if one["type"] == "lvmthin":
            one |= {"active": 1, "total": 10**11, "used": 10**10, "avail": 9 * 10**10}
    server.world.volumes["local-lvm"] = [
        {"volid": "local-lvm:vm-110-disk-0", "content": "images", "format": "raw", "size": 4 << 30, "vmid": 110}
    ]


def test_one_scan_is_enough_for_the_images_and_guests_of_a_node(pve: Path) -> None:
    path, left = disk(pve), disk(pve, "vm-100-disk-9.qcow2")
    config(pve, "name: web\nscsi0: store:100/vm-100-disk-0.qcow2,size=8M\n")
    host = this_machine()
    assert scan(host)["images"] == 2
    assert not Job.objects.filter(kind="scan", state="queued").exists()
    assert (reread(host).status, host.owners_unknown) == ("ok", "")
    assert [image_at(one).orphan for one in (path, left)] == [False, True]
    assert image_at(path).uses.get().disk.guest.name == "web"


def test_a_storage_that_came_since_the_last_scan_is_walked_by_the_next_one(pve: Path, tmp_path: Path) -> None:
    scan(this_machine())
    (tmp_path / "more/images/200").mkdir(parents=True)
    with (pve / "storage.cfg").open("a") as file:
        file.write(f"\ndir: more\n\tpath {tmp_path}/more\n\ndir: far\n\tpath {tmp_path}/far\n\tnodes other\n")
    path = create(tmp_path / "more/images/200/vm-200-disk-0.qcow2")
    assert scan(Host.objects.get())["images"] == 1
    assert image_at(path).pool.name == "more"
    # What another node alone has is no storage of this one that is missing.
    assert set(StoragePool.objects.values_list("name", flat=True)) == {"store", "more"}
    assert not Job.objects.filter(kind="scan", state="queued").exists()


@pytest.mark.parametrize("how", ["gone", "token refused"])
def test_an_api_that_tells_nothing_costs_what_only_it_tells(pve: Path, server: ProxmoxServer, how: str) -> None:
    path = disk(pve)
    config(pve, "name: web\nscsi0: store:100/vm-100-disk-0.qcow2\n")
    lvm(server)
    server.world.guests = {}
    host = with_api(server)
    scan(host)
    before: dict[str, Any] = dict(StoragePool.objects.values().get(name="local-lvm"))
    assert (before["state"], before["images_count"]) == ("ok", 1)
    lacking = Host.objects.get().capabilities["missing_rights"]
    if how == "gone":
        Host.objects.filter(pk=host.pk).update(port=1)
    else:
        Host.objects.filter(pk=host.pk).update(token_locked=secrets.lock("0" * 36))
    new = disk(pve, "vm-100-disk-1.qcow2")
    assert scan(reread(host))["images"] == 3
    assert (reread(host).status, host.owners_unknown) == ("degraded", "")
    assert ("cannot be reached" if how == "gone" else "rejected the API token") in host.status_detail
    assert host.capabilities["missing_rights"] == lacking
    after: dict[str, Any] = dict(StoragePool.objects.values().get(name="local-lvm"))
    assert after["state"] == "unreadable"
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"state", "state_detail"}
    assert image_at(b"/dev/pve/vm-110-disk-0").missing_since is None
    assert image_at(new).orphan is True
    succeeded(work("reclaim", image_at(path).pk, OPERATOR, method="copy"))
    Host.objects.filter(pk=host.pk).update(port=server.port, token_locked=secrets.lock(SECRET))
    scan(reread(host))
    assert (reread(host).status, host.status_detail) == ("ok", "")
    assert StoragePool.objects.get(name="local-lvm").state == "ok"


@pytest.mark.parametrize("hidden", ["all of them", "this one"])
def test_a_storage_that_the_token_may_not_see_says_which_right_is_missing(
    pve: Path, server: ProxmoxServer, hidden: str
) -> None:
    with (pve / "storage.cfg").open("a") as file:
        file.write("\nlvmthin: local-lvm\n\tthinpool data\n\tvgname pve\n\tcontent images,rootdir\n")
    lvm(server)
    if hidden == "this one":
        server.world.rights["/storage/local-lvm"] = {}
    else:
        server.world.allow("Sys.Audit", "VM.Audit")
    server.world.guests = {}
    scan(with_api(server))
    pool = StoragePool.objects.get(name="local-lvm")
    assert pool.state == "unreadable"
    where = "/storage/local-lvm" if hidden == "this one" else "/storage"
    assert f"needs Datastore.Audit or Datastore.AllocateSpace on {where}." in pool.state_detail
    assert (pool.capacity_bytes, Host.objects.get().owners_unknown) == (None, "")


def test_with_a_token_beside_it_a_disk_of_another_nodes_guest_is_no_orphan_nor_after_a_move(
    pve: Path, tmp_path: Path, server: ProxmoxServer
) -> None:
    there, moved = disk(pve), disk(pve, "vm-100-disk-1.qcow2")
    with (pve / "storage.cfg").open("a") as file:
        file.write("\tshared 1\n")
    (pve / "nodes/pve1/qemu-server").mkdir(parents=True)
    config(pve, "name: away\nscsi0: store:100/vm-100-disk-0.qcow2\n", vmid=501, node="other")
    config(pve, "name: moves\nscsi0: store:100/vm-100-disk-1.qcow2\n", vmid=502, node="pve1")
    server.world.guests = {}
    store = next(one for one in server.world.storages if one["storage"] == "store")
    store |= {"path": str(tmp_path / "store"), "shared": 1}
    host = with_api(server, "pve1")
    scanned(host)
    scanned(host)
    assert [image_at(one).orphan for one in (there, moved)] == [False, False]
    (pve / "nodes/pve1/qemu-server/502.conf").rename(pve / "nodes/other/qemu-server/502.conf")
    scanned(host)
    for one in (there, moved):
        assert image_at(one).orphan is False
        with pytest.raises(RefusedError):
            services.submit(ADMIN, "set_aside", image_at(one).pk, {})
    assert {guest.uid: guest.name for guest in Guest.objects.filter(host=host)} == {"501": "away", "502": "moves"}


def test_where_a_node_gets_an_agent_the_rows_of_its_storages_go_on(
    pve: Path, tmp_path: Path, server: ProxmoxServer
) -> None:
    path, store = disk(pve), tmp_path / "store"
    config(pve, "name: web\nscsi0: store:100/vm-100-disk-0.qcow2\n")
    defined = next(one for one in server.world.storages if one["storage"] == "store")
    defined["path"] = str(store)
    volume = {"content": "images", "format": "qcow2", "size": 8 << 20, "used": 4096, "vmid": 100}
    server.world.volumes = {"store": [{"volid": "store:100/vm-100-disk-0.qcow2", **volume}]}
    is_this_node(server)
    host = add(server)
    scan(host)
    before, pool = image_at(path), StoragePool.objects.get(host=host, name="store")
    assert (before.inode == str(path.stat().st_ino), bytes(pool.path_bytes)) == (False, b"")
    samples = pool.samples.count()
    # The row of this machine, as by ssh: an agent runs there from now on.
    Host.objects.filter(pk=host.pk).update(kind="local", transport="local", slug="local")
    scanned(reread(host))
    scanned(host)
    after = image_at(path)
    assert (after.pk, after.first_seen, after.state) == (before.pk, before.first_seen, "ok")
    assert after.inode == str(path.stat().st_ino)
    assert list(StoragePool.objects.filter(host=host, name="store").values_list("pk", "path")) == [
        (pool.pk, str(store))
    ]
    assert pool.samples.count() >= samples
    assert Image.objects.filter(host=host, missing_since=None).count() == 1
