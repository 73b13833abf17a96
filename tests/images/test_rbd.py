"""Images of Ceph as rows: by the real agent, and what Ceph said on a real cluster (16.2.15)."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images.kinds.scan import Scan
from images.models import Image
from images.scan import minutes
from images.scan.run import ScanRun
from images.selectors.overview import overview
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from tests.agent.test_rbd import DATA, FSID, MIB, Says, ceph
from tests.factories import HostFactory, ImageFactory, StoragePoolFactory
from tests.guests.test_other_pools import RBD, Node, disk, domain, image, node
from tests.images.test_lvm import listed, pools
from tests.working import ADMIN, client_as, codes, scan, scanned_machine, this_machine

__all__ = ["ceph", "node"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet"), pytest.mark.sql]

NAMES = {"vm-100-disk-0", "base-101-disk-0", "vm-102-disk-0", "slow", "<script>"}
VMS = RBD.replace("<name>disks</name>", "<name>vms</name>").replace("disks/vm-2", "vms/vm-102-disk-0")


@pytest.fixture
def on_a_node(ceph: Says, monkeypatch: pytest.MonkeyPatch) -> Says:
    """The same, in which scans take that folder for the machine's /etc/pve, and the machine for no node."""
    etc, request, take = ceph(), Scan.request, ScanRun.take

    def at_the_folder(kind: Scan, job: Job) -> dict[str, Any]:
        return request(kind, job) | {"etc_pve": str(etc)}

    def no_node(run: ScanRun, event: dict[str, Any]) -> None:
        no = {"proxmox": False, "proxmox_storages": []}
        take(run, event | no if event["event"] == "host" else event)

    monkeypatch.setattr(Scan, "request", at_the_folder)
    monkeypatch.setattr(ScanRun, "take", no_node)
    return ceph


def proxmox(host: Host, **more: Any) -> StoragePool:
    values = {"name": "ceph", "kind": "rbd", "path": "rbd vms", "path_bytes": b"", "path_key": "ceph"}
    return StoragePoolFactory.create(**(values | {"host": host, "source": "proxmox", "network": True} | more))


def test_a_pool_of_ceph_is_a_pool_and_its_images_are_images(on_a_node: Says) -> None:
    host = this_machine()
    assert scan(host)["images"] == 6
    vms = pools()["vms"]
    assert (vms.kind, vms.source, vms.state, vms.path) == ("rbd", "rbd", "ok", "rbd vms")
    assert (vms.used_bytes, vms.available_bytes) == (58720632, 2761433344)
    facts = vms.volume_facts or {}
    assert (facts["raw_allocated_bytes"], facts["raw_bytes"]) == (58777600, 3221225472)
    assert (vms.images_count, pools()["vms/tenant"].images_count) == (5, 1)
    clone, base, slow = image("vm-102-disk-0"), image("base-101-disk-0"), image("slow")
    assert (clone.path, clone.backing, clone.virtual_size) == ("rbd:vms/vm-102-disk-0", base, 64 * MIB)
    assert (clone.allocated_size, clone.exclusive_bytes, clone.snapshot_bytes) == (4 * MIB, 4 * MIB, 0)
    assert (base.allocated_size, base.exclusive_bytes, base.snapshot_bytes) == (0, None, 16 * MIB)
    assert (slow.allocated_size, slow.exclusive_bytes, slow.snapshot_bytes) == (None, None, None)
    assert (clone.in_use, base.in_use) == (True, None)
    assert {one.orphan for one in Image.objects.all()} <= {None, False}
    assert {one.state for one in Image.objects.all()} == {"ok"}
    assert scan(host)["read"] == 0


def test_what_takes_the_space_is_known_where_all_images_are_measured(on_a_node: Says) -> None:
    host = scanned_machine()
    assert (pools()["vms"].shares["remainder"], pools()["vms"].shares["images"]) == (None, None)
    assert pools()["vms/tenant"].shares == {}
    Image.objects.filter(name="slow").delete()
    on_a_node(rf"""case "$*" in *--pool=vms\ ls*) sed 's/{{"image":"slow"[^}}]*}},//' {DATA}/ls-vms.json |
        if [ "${{*#*--long}}" = "$*" ]; then grep -o '"image":"[^"]*"' | sort -u | sed 's/"image"://;s/$/,/;1s/^/[/;$s/,$/]/'
        else cat; fi; exit ;; esac""")
    scan(host)
    # The 8 MiB of the image that is left out are in the remainder, with what the pool keeps for itself.
    assert pools()["vms"].shares == {
        "used": 58720632, "images": 12 * MIB, "snapshots": 36 * MIB, "remainder": 58720632 - 48 * MIB,
    }  # fmt: skip


def test_a_look_each_minute_takes_what_ceph_says_of_the_room_now(
    on_a_node: Says, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scan(this_machine())
    ask = asking.ask

    def at_the_folder(host: Host, verb: str, args: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        return ask(host, verb, args | {"etc_pve": str(tmp_path / "pve")}, seconds=seconds)

    monkeypatch.setattr(asking, "ask", at_the_folder)
    (tmp_path / "bin/ceph.asked").unlink()
    on_a_node(rf"""case "$*" in *df*) sed s/2761433344/1000000000/ {DATA}/df.json; exit ;; esac""")
    minutes.look(now := timezone.now())
    vms, tenant = pools()["vms"], pools()["vms/tenant"]
    assert (vms.used_bytes, vms.available_bytes, tenant.available_bytes) == (58720632, 1000000000, 1000000000)
    assert vms.space_at is not None
    assert vms.space_at >= now
    asked = (tmp_path / "bin/ceph.asked").read_text().split("\n")
    assert sum("df" in line for line in asked) == 1, "both storages are in one pool of Ceph"
    on_a_node("exit 1")
    minutes.look(now + timedelta(hours=1))
    assert (pools()["vms"].available_bytes, pools()["vms"].space_at) == (1000000000, vms.space_at)


def test_two_pools_of_one_cluster_have_its_free_space_once(on_a_node: Says) -> None:
    scan(this_machine())
    StoragePool.objects.filter(name="vms/tenant").update(fs_key=f"ceph {FSID}/other")
    found = overview(ADMIN).totals
    assert (found.available_bytes, found.used_bytes) == (2761433344, 2 * 58720632)


def test_hosts_that_name_one_pool_have_its_images_once_in_sums(on_a_node: Says) -> None:
    for host in (this_machine(), HostFactory.create(slug="other", kind="local", last_seen=None, capabilities={})):
        scan(host)
        assert overview(ADMIN).totals.images_count == 6


def test_pages_and_rest_show_hostile_names_and_what_ceph_says(on_a_node: Says) -> None:
    scan(this_machine())
    client = client_as(role="admin")
    told = client.get(f"/api/v1/pools/{pools()['vms'].pk}/").json()
    assert (told["kind"], told["source"], told["shares"]["used"]) == ("rbd", "rbd", 58720632)
    for page in (f"/pools/{pools()['vms'].pk}/", "/images/", f"/images/{image('<script>').pk}/"):
        shown = client.get(page).content.decode()
        assert "&lt;script&gt;" in shown
        assert "rbd:vms/<script>" not in shown


def test_a_pool_of_libvirt_gets_the_facts_and_its_guests_their_images(node: Node, on_a_node: Says) -> None:
    node(VMS, domain("db", disk("protocol='rbd' name='vms/vm-100-disk-0'", "vda", kind="network")))
    host = scanned_machine()
    assert {name: pool.source for name, pool in pools().items()} == {"ceph": "libvirt", "vms/tenant": "rbd"}
    assert {name for name, pool in listed().items() if pool == "ceph"} == NAMES
    volume = image("vm-100-disk-0")
    assert [use.disk.guest.name for use in volume.uses.all()] == ["db"]
    assert (volume.in_use, volume.orphan) == (True, False)
    assert scan(host)["read"] == 0


@pytest.mark.parametrize("is_held", [False, True])
def test_a_storage_that_nodes_share_is_listed_by_one_of_them(on_a_node: Says, is_held: bool) -> None:
    first = this_machine()
    Host.objects.filter(pk=first.pk).update(cluster="site")
    other = HostFactory.create(slug="other", kind="proxmox", cluster="site", transport="api+ssh")
    own, theirs = proxmox(first), proxmox(other, last_scanned=timezone.now(), state="ok")
    if is_held:
        ImageFactory.create(host=other, pool=theirs)
    scan(first)
    own.refresh_from_db()
    assert Image.objects.filter(pool=own).count() == (0 if is_held else 5)
    assert (own.network, bool(own.shares)) == (True, not is_held)


def test_where_ceph_does_not_answer_all_is_as_last_seen(on_a_node: Says) -> None:
    host = scanned_machine()
    before = listed()
    on_a_node("exit 1")
    assert scan(host)["vanished"] == 0
    assert {pool.state for pool in pools().values()} == {"unreadable"}
    assert (listed(), pools()["vms"].used_bytes) == (before, 58720632)


def test_an_image_that_ceph_cannot_open_is_damaged_and_not_gone(on_a_node: Says) -> None:
    host = scanned_machine()
    on_a_node(
        f"""case "$*" in *--pool=vms*--long*) sed 's/{{"image":"slow"[^}}]*}},//' {DATA}/ls-vms.json; exit ;; esac"""
    )
    assert scan(host)["vanished"] == 0
    assert image("slow").state == "unreadable"
    on_a_node()
    scan(host)
    assert image("slow").state == "ok"


@pytest.mark.parametrize("kind", ["convert", "check", "analyze", "commit", "grow"])
def test_no_job_on_files_works_on_an_image_of_ceph(on_a_node: Says, kind: str) -> None:
    scan(this_machine())
    given: dict[str, dict[str, Any]] = {"convert": {"format": "qcow2"}, "grow": {"size_bytes": 128 * MIB}}
    assert "unsupported_pool" in codes(kind, image("vm-102-disk-0"), ADMIN, **given.get(kind, {}))
