"""Pools of libvirt whose volumes are no files: listed with what libvirt tells of them, and never touched.

libvirt's own test driver stands for the storages that a test machine cannot have.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from images.models import Image
from storage_admin.agent.host import mounts
from storage_admin.agent.protocol import unb64
from storage_admin.guests.models import Guest
from storage_admin.hosts.libvirt import reader, uri
from storage_admin.hosts.libvirt.reader import LibvirtFacts, PoolFacts, VolumeFacts
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.kinds import get
from storage_admin.jobs.models import Job
from tests.factories import HostFactory
from tests.working import OPERATOR, refused_as, reread, run, scan, scanned_machine, this_machine

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet")]

GIB = 1 << 30
LOGICAL = f"""
<pool type='logical'><name>vg0</name><capacity>{100 * GIB}</capacity><allocation>{50 * GIB}</allocation>
  <source><name>vg0</name><format type='lvm2'/></source><target><path>/dev/vg0</path></target>
  <volume type='block'><name>vm-1</name><key>1</key><capacity>{10 * GIB}</capacity><allocation>{10 * GIB}</allocation>
    <target><path>/dev/vg0/vm-1</path></target></volume>
  <volume type='block'><name>snap</name><key>2</key><capacity>{10 * GIB}</capacity><allocation>{GIB}</allocation>
    <target><path>/dev/vg0/snap</path></target><backingStore><path>/dev/vg0/vm-1</path></backingStore></volume>
  <volume type='block'><name>thin</name><key>3</key><capacity>{5 * GIB}</capacity><allocation>{GIB}</allocation>
    <target><path>/dev/vg0/thin</path></target><backingStore><path>/dev/vg0/pool_tdata</path></backingStore></volume>
</pool>"""
RBD = """
<pool type='rbd'><name>ceph</name><source><host name='mon1' port='6789'/><name>disks</name></source>
  <volume type='network'><name>vm-2</name><key>4</key><capacity>1048576</capacity><allocation>4096</allocation>
    <target><path>disks/vm-2</path></target></volume></pool>"""
NETFS = """
<pool type='netfs'><name>nas</name><source><host name='{host}'/><dir path='{folder}'/><format type='{format}'/></source>
  <target><path>/mnt/nas</path></target>
  <volume type='file'><name>n.qcow2</name><key>5</key><capacity>1048576</capacity><allocation>4096</allocation>
    <target><path>/mnt/nas/n.qcow2</path><format type='qcow2'/></target></volume></pool>"""
OTHERS = """
<pool type='iscsi'><name>san</name><source><host name='192.0.2.1'/><device path='iqn.2013-06.com.example:t'/></source>
  <target><path>/dev/disk/by-path</path></target></pool>
<pool type='scsi'><name>hba</name><source><adapter type='scsi_host' name='host0'/></source>
  <target><path>/dev/disk/by-path</path></target></pool>
<pool type='mpath'><name>mp</name><target><path>/dev/mapper</path></target></pool>
<pool type='zfs'><name>tank</name><source><name>tank</name></source><target><path>/dev/zvol/tank</path></target></pool>
<pool type='gluster'><name>gl</name><source><host name='g1'/><name>vol1</name><dir path='/x'/></source></pool>
<pool type='vstorage'><name>vz</name><source><name>cl</name></source><target><path>/mnt/vz</path></target></pool>
<pool type='disk'><name>dsk</name><source><device path='/dev/sdc'/><format type='gpt'/></source>
  <target><path>/dev</path></target></pool>
<pool type='sheepdog'><name>sd</name><source><host name='h'/><name>x</name></source></pool>"""


def domain(name: str, *disks: str) -> str:
    uid = f"11111111-1111-4111-8111-{int.from_bytes(name.encode()[:6]):012d}"
    return (
        f"<domain type='test'><name>{name}</name><uuid>{uid}</uuid><memory>65536</memory><os><type>hvm</type></os>"
        f"<devices>{''.join(disks)}</devices></domain>"
    )


def disk(source: str, target: str, form: str = "raw", kind: str = "block") -> str:
    return (
        f"<disk type='{kind}' device='disk'><driver name='qemu' type='{form}'/><source {source}/>"
        f"<target dev='{target}' bus='virtio'/></disk>"
    )


Node = Callable[..., None]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """``node(xml, ...)``: libvirt has these pools and domains from now on."""
    path = tmp_path / "node.xml"

    @contextlib.contextmanager
    def uri_of(host: Host) -> Iterator[str]:
        yield f"test://{path}"

    for module in (reader, uri):
        monkeypatch.setattr(module, "uri_of", uri_of)

    def write(*parts: str) -> None:
        path.write_text(f"<node>{''.join(parts)}</node>")

    return write


def pools() -> dict[str, StoragePool]:
    return {pool.name: pool for pool in StoragePool.objects.filter(source="libvirt")}


def image(name: str) -> Image:
    return Image.objects.select_related("pool", "backing", "host").get(name=name)


def test_logical_volumes_are_listed_beside_the_files_of_the_agent(node: Node, tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool/a.raw").write_bytes(b"x" * 4096)
    node(LOGICAL, domain("web", disk("dev='/dev/vg0/vm-1'", "vda")))
    host = this_machine(tmp_path / "pool")
    result = scan(host)
    assert (result["images"], result["read"]) == (4, 4)
    row = pools()["vg0"]
    assert (row.kind, row.path, row.state, row.capacity_bytes) == ("lvm", "/dev/vg0", "ok", 100 * GIB)
    assert (row.images_count, row.allocated_bytes, row.virtual_bytes) == (3, 12 * GIB, 25 * GIB)
    volume = image("vm-1")
    assert (volume.virtual_size, volume.allocated_size, volume.format, volume.state) == (
        10 * GIB,
        10 * GIB,
        "raw",
        "ok",
    )
    assert [use.disk.guest.name for use in volume.uses.all()] == ["web"]
    assert (volume.in_use, volume.orphan) == (True, False)  # libvirt's test guests run
    assert scan(host)["read"] == 0


def test_a_snapshot_stands_on_its_origin_and_a_thin_volume_on_no_image(node: Node) -> None:
    node(LOGICAL)
    scanned_machine()
    assert (image("snap").backing, image("snap").chain_depth) == (image("vm-1"), 2)
    assert (image("thin").backing, image("thin").state) == (None, "ok")


def test_that_no_guest_names_a_volume_does_not_make_it_an_orphan(node: Node) -> None:
    node(LOGICAL)
    scanned_machine()
    thin = image("thin")
    assert (thin.in_use, thin.orphan) == (None, None)
    assert "under another name" in thin.orphan_evidence[0]


def test_a_volume_that_its_guest_declares_as_qcow2_does_not_contradict_it(node: Node) -> None:
    node(LOGICAL, domain("web", disk("dev='/dev/vg0/thin'", "vda", "qcow2")))
    scanned_machine()
    assert (image("thin").format, image("thin").declared_format, image("thin").state) == ("qcow2", "qcow2", "ok")


@pytest.mark.parametrize("kind", ["reclaim", "flatten", "convert", "check", "analyze"])
def test_no_job_reads_or_rewrites_a_volume(node: Node, kind: str) -> None:
    node(LOGICAL)
    scanned_machine()
    options = {"format": "qcow2"} if kind == "convert" else {}
    assert refused_as(services.submit, OPERATOR, kind, image("thin").pk, options) == "unsupported_pool"
    assert not Job.objects.exclude(kind="scan").exists()


def test_every_type_that_libvirt_has_is_a_pool_of_a_kind(node: Node) -> None:
    node(LOGICAL, RBD, OTHERS)
    scanned_machine()
    kinds = {name: (pool.kind, pool.path) for name, pool in pools().items()}
    assert kinds == {
        "vg0": ("lvm", "/dev/vg0"), "ceph": ("rbd", "rbd disks"), "san": ("other", "/dev/disk/by-path"),
        "hba": ("other", "/dev/disk/by-path"), "mp": ("other", "/dev/mapper"), "tank": ("zfs", "/dev/zvol/tank"),
        "gl": ("other", ""), "vz": ("other", "/mnt/vz"), "dsk": ("other", "/dev"), "sd": ("other", ""),
    }  # fmt: skip
    assert {pool.state for pool in pools().values()} == {"ok"}
    assert image("vm-2").path == "rbd:disks/vm-2"
    assert image("vm-2").virtual_size == 1 << 20


def test_neither_a_scan_nor_a_recovery_sends_the_agent_to_a_pool_that_is_no_folder(node: Node, tmp_path: Path) -> None:
    node(LOGICAL, RBD, OTHERS)
    host = scanned_machine(tmp_path)
    job = services.submit(OPERATOR, "scan", host.pk, {})
    request = get("scan").request(job)
    assert [unb64(pool["path_b64"]) for pool in request["pools"]] == [bytes(tmp_path)]
    request = get("recover").request(job)
    assert [unb64(pool["path_b64"]) for pool in request["pools"]] == [bytes(tmp_path)]
    assert run(job).state == "succeeded"


def test_a_volume_and_a_pool_that_libvirt_forgets_go(node: Node) -> None:
    host = this_machine()
    node(LOGICAL, RBD)
    scan(host)
    node(LOGICAL.replace("/dev/vg0/thin", "/dev/vg0/other").replace("<name>thin", "<name>other"))
    assert scan(host)["vanished"] == 1
    assert image("thin").state == "missing"
    assert set(pools()) == {"vg0"}
    assert not Image.objects.filter(name="vm-2").exists()


def test_two_pools_that_list_one_device_have_one_image(node: Node) -> None:
    again = LOGICAL.replace("'logical'", "'mpath'").replace("<name>vg0", "<name>again", 1)
    node(LOGICAL, again.replace("<source><name>vg0</name><format type='lvm2'/></source>", ""))
    host = this_machine()
    assert scan(host)["images"] == 3
    assert set(pools()) == {"vg0", "again"}
    assert Image.objects.count() == 3
    assert scan(host)["read"] == 0


def test_a_disk_on_a_network_or_in_a_pool_keeps_its_storages_name(node: Node) -> None:
    node(
        NETFS.format(host="nas", folder="/export/vm", format="nfs"),
        domain(
            "db",
            disk("protocol='rbd' name='disks/vm-2'", "vda", kind="network"),
            disk("pool='nas' volume='n.qcow2'", "vdb", "qcow2", kind="volume"),
            disk("pool='nas' volume='gone'", "vdc", kind="volume"),
        ),
    )
    scanned_machine()
    guest = Guest.objects.get(name="db")
    disks = {row.target: (row.path, row.volume) for row in guest.disks.all()}
    assert disks == {
        "vda": ("rbd:disks/vm-2", "rbd:disks/vm-2"), "vdb": ("/mnt/nas/n.qcow2", "nas/n.qcow2"),
        "vdc": ("", "nas/gone"),
    }  # fmt: skip
    assert guest.unread == ["vdc: volume gone of the pool nas"]


def test_what_a_line_that_is_not_understood_may_name_is_no_orphan(node: Node, tmp_path: Path) -> None:
    (tmp_path / "a.raw").write_bytes(b"x" * 4096)
    node(domain("db", disk("pool='nas' volume='gone'", "vdc", kind="volume")))
    host = scanned_machine(tmp_path)
    assert (image("a.raw").in_use, image("a.raw").orphan) == (False, None)
    assert "vdc: volume gone of the pool nas (db)" in image("a.raw").orphan_evidence[0]
    node(domain("db"))
    scan(host)
    assert image("a.raw").orphan is True


def alone() -> Host:
    return HostFactory.create(slug="far", kind="libvirt", transport="tls", address="192.0.2.1", capabilities={})


@pytest.mark.parametrize(
    ("host", "folder", "form", "source", "filesystem"),
    [
        ("nas", "/export/vm", "nfs", b"nas:/export/vm", "nfs4"),
        ("nas", "/export/vm/", "auto", b"nas:/export/vm", "nfs"),
        ("192.0.2.9", "/", "nfs", b"192.0.2.9:/", "nfs4"),
        ("win", "share", "cifs", b"//win/share", "cifs"),
        ("g1", "vol", "glusterfs", b"g1:/vol", "fuse.glusterfs"),
    ],
)
def test_one_export_has_the_same_keys_with_and_without_an_agent(
    node: Node, host: str, folder: str, form: str, source: bytes, filesystem: str
) -> None:
    node(NETFS.format(host=host, folder=folder, format=form))
    scan(alone())
    row = pools()["nas"]
    mounted = mounts.parse(b"30 22 0:40 / /mnt/nas rw - %s %s rw\n" % (filesystem.encode(), source))[0]
    assert (row.fs_key, row.shared_key) == mounts.Mounts([mounted]).keys(mounted, b"/mnt/nas", "machine")
    assert (row.network, row.kind) == (True, "nfs" if "nfs" in filesystem else "dir")
    assert "network filesystem" in row.owners_unknown


def told(monkeypatch: pytest.MonkeyPatch, pool: PoolFacts, *volumes: VolumeFacts) -> StoragePool:
    """The row of a pool after libvirt told just this."""
    monkeypatch.setattr(reader, "read", lambda host: LibvirtFacts((pool,)))
    monkeypatch.setattr(reader, "read_volumes", lambda host, names: dict.fromkeys(names, volumes))
    scanned_machine()
    return StoragePool.objects.get(source="libvirt")


def test_a_capacity_that_is_not_known_is_none_and_not_0(monkeypatch: pytest.MonkeyPatch) -> None:
    row = told(monkeypatch, PoolFacts("san", "iscsi", "/dev/disk/by-path", True, 0, 0))
    assert (row.state, row.capacity_bytes, row.available_bytes) == ("ok", None, None)


def test_numbers_that_cannot_be_are_told_and_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = (1 << 64) - 1
    pool = PoolFacts("vg0", "logical", "/dev/vg0", True, huge, huge)
    volume = VolumeFacts("a", "/dev/vg0/a", "block", huge, huge, huge, mtime="x.y", ctime="-1.5", cluster_size=0)
    row = told(monkeypatch, pool, volume, VolumeFacts("b", "/dev/vg0/b", unreadable="I/O error"))
    assert (row.capacity_bytes, row.available_bytes) == ((1 << 63) - 1, (1 << 63) - 1)
    assert (image("a").state, image("a").virtual_size, image("a").mtime_ns) == ("unreadable", None, 0)
    assert (image("b").state, image("b").state_detail) == ("unreadable", "I/O error")


NAMES = (
    "-f", "a,b", "nbd:x", "json:{}", "<script>alert(1)</script>", "tab\there", "line\nbreak", "\x1b[31m", "\udcff",
    "..", "%s %(x)s {0}", "' OR 1=1 --", "\u202eexe", "x" * 4000,
)  # fmt: skip


def test_hostile_names_are_shown_as_they_are_and_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    volumes = [VolumeFacts(name, f"/dev/vg0/{name}", "block", 1 << 20, 4096) for name in NAMES]
    told(monkeypatch, PoolFacts("-f <b>\x1b", "logical", "/dev/vg0", True, 1 << 30, 0), *volumes)
    rows = {bytes(row.path_bytes): row for row in Image.objects.all()}
    assert set(rows) == {f"/dev/vg0/{name}".encode("utf-8", "surrogateescape") for name in NAMES}
    assert all(row.path.isprintable() for row in rows.values())
    assert rows[b"/dev/vg0/\x1b[31m"].path == "/dev/vg0/\\x1b[31m"


def test_volumes_that_cannot_be_listed_stay_and_the_guests_are_known_all_the_same(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(LOGICAL, RBD, domain("web", disk("dev='/dev/vg0/vm-1'", "vda")))
    host = scanned_machine()
    monkeypatch.setattr(reader, "VOLUMES_TIMEOUT", 0.001)
    assert scan(host)["vanished"] == 0
    assert (pools()["vg0"].state, reread(host).owners_unknown) == ("unreadable", "")
    assert "it stopped responding at the pool" in pools()["ceph"].state_detail
    assert image("thin").state == "ok"
    assert Guest.objects.filter(name="web").exists()


def test_of_what_libvirt_lists_nothing_is_told_twice_in_sums(node: Node) -> None:
    node(LOGICAL, RBD)
    host = scanned_machine()
    scan(host)
    assert {name: (pool.images_count, pool.allocated_bytes) for name, pool in pools().items()} == {
        "ceph": (1, 4096), "vg0": (3, 12 * GIB),
    }  # fmt: skip
