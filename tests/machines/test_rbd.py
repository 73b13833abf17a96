"""Ceph of a real cluster: each figure of the dashboard is what Ceph says, and a scan writes nothing."""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from images.models import Image
from storage_admin.agent import bundle
from storage_admin.hosts import asking
from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.libvirt.reader import LibvirtFacts
from storage_admin.hosts.models import Host as Row
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import runner
from tests.factories import HostFactory
from tests.harness.debian_trees import Booted, Tree
from tests.working import scan

pytestmark = [pytest.mark.services, pytest.mark.night, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

MIB = 1 << 20
PACKAGES = (
    "ceph-mon", "ceph-osd", "ceph-mgr", "ceph-common", "qemu-utils", "qemu-block-extra", "python3", "util-linux",
    "systemd-sysv", "procps",
)  # fmt: skip
POOL = "<pool type='rbd'><name>{0}</name><source><name>{1}</name><auth type='ceph' username='{2}'/></source></pool>"
#: The user ``vm`` may do with the pool what libvirt's and Proxmox VE's may, and with no other.
MADE = """
io() { qemu-io -f raw -c "$1" "rbd:vms/$2" >/dev/null; }
ceph auth get-or-create client.vm mon 'profile rbd' osd 'profile rbd pool=vms' -o /etc/ceph/ceph.client.vm.keyring
rbd create --size 64M vms/vm-100-disk-0
rbd create --size 64M vms/base-101-disk-0
rbd create --size 32M --image-feature layering vms/slow
rbd create --size 32M "--image=$(printf 'bad\\377\\033[31m')" --pool=vms
rbd create --size 8M --image=-f --pool=vms
rbd namespace create vms/tenant
rbd create --size 16M vms/tenant/vm-104-disk-0
io 'write -P 1 0 20M' vm-100-disk-0
io 'write -P 2 0 16M' base-101-disk-0
io 'write -P 3 0 8M' slow
rbd snap create --no-progress vms/base-101-disk-0@__base__
rbd snap protect vms/base-101-disk-0@__base__
rbd clone vms/base-101-disk-0@__base__ vms/vm-102-disk-0
rbd snap create --no-progress vms/vm-100-disk-0@s1
io 'write -P 4 0 8M' vm-100-disk-0
io 'write -P 5 1M 100k' vm-102-disk-0
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Booted]:
    """A tree of Debian in which a cluster runs, and libvirt's definitions name its pools."""
    folder = Path(tempfile.mkdtemp(prefix="ceph-"))
    try:
        tree = Tree(folder / "tree", "bookworm", PACKAGES)
        shutil.copy(Path(__file__).with_name("ceph.sh"), tree.folder / "root")
        shutil.copy(bundle.build(folder).path, tree.folder / "root/agent.pyz")
        (tree.folder / "etc/libvirt/storage").mkdir(parents=True)
        for name, source, user in (("vms", "vms", "vm"), ("tenant", "vms/tenant", "admin"), ("none", "none", "admin")):
            (tree.folder / f"etc/libvirt/storage/{name}.xml").write_text(POOL.format(name, source, user))
        with Booted(tree, folder / "log") as booted:
            booted.run("sh /root/ceph.sh || { cat /var/log/ceph/up.log; exit 1; }")
            booted.run(MADE)
            yield booted
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def row(cluster: Booted, monkeypatch: pytest.MonkeyPatch) -> Row:
    """The tree as a host of the dashboard, on which libvirt has one guest."""
    command = cluster.command("exec python3 /root/agent.pyz")
    for module in (runner, asking):
        monkeypatch.setattr(module, "agent_command", lambda *_: contextlib.nullcontext(command))
    disk = DiskFacts("vda", "disk", "rbd:vms/vm-100-disk-0", "raw")
    guest = GuestFacts("domain", "u1", "web", "shut off", (disk,))
    monkeypatch.setattr(reader, "read", lambda host: LibvirtFacts(domains=(guest,)))
    return HostFactory.create(slug="far", kind="ssh", transport="forced", last_seen=None, capabilities={})


def said(cluster: Booted, line: str) -> Any:
    return json.loads(cluster.run(f"{line} --format=json 2>/dev/null").encode("utf-8", "replace"))


def pools() -> dict[str, StoragePool]:
    return {pool.name: pool for pool in StoragePool.objects.all()}


def counted(cluster: Booted) -> tuple[int, int]:
    """What Ceph counts as taken in the pool, and as available there."""
    told = next(pool["stats"] for pool in said(cluster, "ceph df")["pools"] if pool["name"] == "vms")
    return told["stored"], told["max_avail"]


def settled(cluster: Booted, row: Row) -> tuple[int, int]:
    """The same, where it was so before and after the last scan: Ceph's monitors hear of it seconds late."""
    for _ in range(20):
        before = counted(cluster)
        scan(row)
        if counted(cluster) == before:
            return before
    raise AssertionError("it never was the same")


def test_each_figure_is_what_ceph_says_and_a_scan_changes_nothing(cluster: Booted, row: Row) -> None:
    # What is counted for a pool comes seconds late, and counts what is read; this is the last write of each part of it.
    parts = "ceph pg ls-by-pool vms | grep -o '^[0-9]*[.][0-9a-f]*'"
    state = f"for part in $({parts}); do ceph pg $part query | grep '\"last_update\"'; done"
    before = cluster.run(state)
    assert before.count("last_update") == 8
    scan(row)
    assert cluster.run(state) == before
    images = {one.name: one for one in Image.objects.select_related("pool", "backing")}
    assert set(images) == {
        "vm-100-disk-0", "base-101-disk-0", "vm-102-disk-0", "slow", r"bad\xff\x1b[31m", "-f", "vm-104-disk-0",
    }  # fmt: skip
    for name in ("vm-100-disk-0", "base-101-disk-0", "vm-102-disk-0"):
        entries = said(cluster, f"rbd du vms/{name}")["images"]
        own = sum(one["used_size"] for one in entries if "snapshot" not in one)
        kept = sum(one["used_size"] for one in entries if "snapshot" in one)
        assert (images[name].allocated_size, images[name].snapshot_bytes) == (own, kept), name
        assert images[name].exclusive_bytes == (own if name == "vm-102-disk-0" else None), name
    assert (images["slow"].allocated_size, images["slow"].virtual_size) == (None, 32 * MIB)
    assert images["vm-102-disk-0"].backing == images["base-101-disk-0"]
    taken = settled(cluster, row)
    assert (pools()["vms"].used_bytes, pools()["vms"].available_bytes) == taken
    assert {name: pool.state for name, pool in pools().items()} == {"vms": "ok", "vms/tenant": "ok"}
    assert [use.disk.guest.name for use in images["vm-100-disk-0"].uses.all()] == ["web"]
    assert scan(row)["read"] == 0


def test_what_deleting_an_image_frees_is_what_was_said(cluster: Booted, row: Row) -> None:
    cluster.run("rbd create --size 32M vms/gone; qemu-io -f raw -c 'write -P 1 0 12M' rbd:vms/gone >/dev/null")
    scan(row)
    assert Image.objects.get(name="gone").exclusive_bytes == 12 * MIB
    objects = "rados -p vms ls | grep -c rbd_data"
    before = int(cluster.run(objects))
    cluster.run("rbd rm --no-progress vms/gone")
    assert (before - int(cluster.run(objects))) * 4 * MIB == 12 * MIB
    assert scan(row)["vanished"] == 1


def test_an_image_that_has_watchers_is_in_use(cluster: Booted, row: Row) -> None:
    cluster.run("(qemu-io -f raw -c 'sleep 600000' rbd:vms/vm-102-disk-0 >/dev/null 2>&1 & echo $! >/root/sleeper)")
    cluster.wait_until("rbd status vms/vm-102-disk-0 | grep -q watcher=")
    scan(row)
    used = {one.name for one in Image.objects.filter(in_use=True)}
    cluster.run("kill -9 $(cat /root/sleeper)")
    assert used == {"vm-102-disk-0"}


def test_where_the_cluster_is_away_all_is_as_last_seen(cluster: Booted, row: Row) -> None:
    scan(row)
    count = Image.objects.filter(missing_since=None).count()
    cluster.run("kill -STOP $(pidof ceph-mon)")
    try:
        assert scan(row)["vanished"] == 0
    finally:
        cluster.run("kill -CONT $(pidof ceph-mon)")
    assert {pool.state for pool in pools().values()} == {"unreadable"}
    assert Image.objects.filter(missing_since=None).count() == count
