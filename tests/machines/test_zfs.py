"""ZFS of a real host: each figure of the dashboard is what ZFS says, and a scan writes nothing."""

import contextlib
from collections.abc import Iterator

import pytest

from images.models import Image
from storage_admin.hosts import asking
from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.libvirt.reader import LibvirtFacts
from storage_admin.hosts.models import Host as Row
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import runner
from tests.factories import HostFactory, StoragePoolFactory
from tests.machines.host import MIB, Host, host
from tests.working import image_at, scan

__all__ = ["host"]

pytestmark = [pytest.mark.machines, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

WRITE = "dd if=/dev/urandom bs=1M oflag=direct status=none conv=notrunc"
MADE = f"""
modprobe zfs
truncate -s 1G /root/zd1
zpool create -o ashift=12 -O compression=lz4 -m /tank tank /root/zd1
zfs create -o mountpoint=/vms tank/data
zfs create tank/iso
zfs create -V 64M tank/data/vm-100-disk-0
zfs create -s -V 64M -b 16k tank/data/base-101-disk-0
zfs create -o refquota=32M tank/data/subvol-103-disk-0
zfs create -o quota=200M tank/small
zfs create -s -V 16M tank/small/vm-104-disk-0
zfs create -s -V 32M 'tank/plain disk'
udevadm settle
{WRITE} count=20 of=/dev/zvol/tank/data/vm-100-disk-0
{WRITE} count=16 of=/dev/zvol/tank/data/base-101-disk-0
{WRITE} count=5 of='/dev/zvol/tank/plain+disk'
dd if=/dev/urandom bs=1M count=7 of=/tank/iso/a.iso status=none
dd if=/dev/urandom bs=1M count=3 of=/vms/subvol-103-disk-0/file status=none
zfs snapshot tank/data/base-101-disk-0@__base__
zfs clone tank/data/base-101-disk-0@__base__ tank/data/vm-102-disk-0
zfs snapshot tank/data/vm-100-disk-0@s1
udevadm settle
{WRITE} count=8 of=/dev/zvol/tank/data/vm-100-disk-0
{WRITE} count=2 of=/dev/zvol/tank/data/vm-102-disk-0
sync
zpool sync
udevadm settle
"""
#: What any write would change.
STATE = "zpool sync; zfs list -Hp -t all -o name,used,written,referenced,mounted; zpool history -i tank | wc -l"
VOLUMES = {
    "vm-100-disk-0": "tank/data/vm-100-disk-0", "base-101-disk-0": "tank/data/base-101-disk-0",
    "vm-102-disk-0": "tank/data/vm-102-disk-0", "subvol-103-disk-0": "tank/data/subvol-103-disk-0",
    "vm-104-disk-0": "tank/small/vm-104-disk-0", "plain+disk": "tank/plain disk",
}  # fmt: skip


@pytest.fixture
def tank(host: Host) -> Iterator[Host]:
    """A ZFS pool ``tank``: thick and thin volumes, a clone, snapshots, a container's filesystem, other datasets."""
    host.run(MADE)
    yield host
    host.run("umount /mnt/volume 2>/dev/null || true; zpool import -d /root tank 2>/dev/null || true")
    host.run("udevadm settle; zpool destroy -f tank; rm /root/zd1")


@pytest.fixture
def row(host: Host, monkeypatch: pytest.MonkeyPatch) -> Row:
    """The machine as a host of the dashboard, on which libvirt has one guest, by the device itself."""
    command = host.machine.command("python3 /root/agent.pyz")
    for module in (runner, asking):
        monkeypatch.setattr(module, "agent_command", lambda *_: contextlib.nullcontext(command))
    disk = DiskFacts("vda", "disk", "/dev/zvol/tank/data/vm-102-disk-0", "raw")
    guest = GuestFacts("domain", "u1", "web", "shut off", (disk,))
    monkeypatch.setattr(reader, "read", lambda host: LibvirtFacts(domains=(guest,)))
    return HostFactory.create(slug="far", kind="ssh", transport="forced", last_seen=None, capabilities={})


def said(host: Host, columns: str, of: str = "") -> dict[str, list[int]]:
    """Numbers of ``zfs list`` by the dataset."""
    lines = host.run(f"zfs list -Hp -t filesystem,volume -o name,{columns} {of}").splitlines()
    return {name: [int(one) for one in rest] for name, *rest in (line.split("\t") for line in lines)}


def pools() -> dict[str, StoragePool]:
    return {pool.name: pool for pool in StoragePool.objects.order_by("pk")}


def test_each_figure_is_what_zfs_says_and_a_scan_changes_nothing(tank: Host, row: Row) -> None:
    before = tank.run(STATE)
    scan(row)
    assert tank.run(STATE) == before
    told = said(tank, "usedbydataset,usedbysnapshots,usedbyrefreservation,used,available")
    volumes = {one.name: one for one in Image.objects.select_related("pool", "backing")}
    assert set(volumes) == set(VOLUMES)
    for name, dataset in VOLUMES.items():
        one, (data, snapshots, reserved, *_) = volumes[name], told[dataset]
        assert (one.allocated_size, one.snapshot_bytes, one.reservation_bytes) == (data, snapshots, reserved), name
        assert one.exclusive_bytes == (None if name in {"vm-100-disk-0", "base-101-disk-0"} else data), name
    sizes = {name: one.virtual_size for name, one in volumes.items()}
    assert sizes == {
        "vm-100-disk-0": 64 * MIB, "base-101-disk-0": 64 * MIB, "vm-102-disk-0": 64 * MIB,
        "subvol-103-disk-0": 32 * MIB, "vm-104-disk-0": 16 * MIB, "plain+disk": 32 * MIB,
    }  # fmt: skip
    assert volumes["vm-102-disk-0"].backing == volumes["base-101-disk-0"]
    assert (volumes["vm-100-disk-0"].snapshot_bytes or 0) > 7 * MIB
    whole = pools()["tank"]
    *_, used, available = told["tank"]
    assert (whole.capacity_bytes, whole.available_bytes) == (used + available, available)
    size, allocated = map(int, tank.run("zpool list -Hp -o size,allocated tank").split())
    assert whole.volume_facts is not None
    assert (whole.volume_facts["raw_bytes"], whole.volume_facts["health"]) == (size, "ONLINE")
    shares = whole.shares
    assert shares["used"] == used
    assert 0 <= (shares["remainder"] or -1) < used / 100
    # Of a pool on one disk without parity, what is on it is the same, but for what is only kept free.
    taken = [shares[name] or 0 for name in ("images", "snapshots", "others")]
    assert 0 <= allocated - sum(taken) < allocated / 50
    assert {one.orphan for one in volumes.values()} <= {None, False}


def test_what_deleting_a_volume_frees_is_what_was_said(tank: Host, row: Row) -> None:
    scan(row)
    for name in ("plain+disk", "vm-102-disk-0", "subvol-103-disk-0"):
        one = Image.objects.get(name=name)
        before = said(tank, "used", "tank")["tank"][0]
        tank.run(f"udevadm settle; zfs destroy '{VOLUMES[name]}'; zpool sync")
        tank.run("while [ $(zpool get -Hpo value freeing tank) != 0 ]; do sleep 0.5; done; zpool sync")
        freed = before - said(tank, "used", "tank")["tank"][0]
        assert abs(freed - (one.exclusive_bytes or 0) - (one.reservation_bytes or 0)) < 256 << 10, (name, freed)
    assert scan(row)["vanished"] == 3


@pytest.mark.parametrize("disks", [(4, 1), (6, 2), (5, 3)])
def test_what_a_full_volume_takes_on_raidz_is_foretold_within_three_percent(
    host: Host, row: Row, disks: tuple[int, int]
) -> None:
    count, parity = disks
    files = " ".join(f"/root/r{number}" for number in range(count))
    volumes = {f"vm-{number}-disk-0": f"{size}k" for number, size in ((100, 4), (101, 8), (102, 16), (103, 64))}
    made = f"zpool create -o ashift=12 -O compression=off tank raidz{parity} {files}"
    host.run(f"modprobe zfs; truncate -s 200M {files}; {made}")
    try:
        for name, block in volumes.items():
            host.run(f"zfs create -s -V 16M -b {block} tank/{name}; udevadm settle")
            host.run(f"{WRITE} count=16 of=/dev/zvol/tank/{name}")
        host.run("sync; zpool sync; udevadm settle")
        scan(row)
        for name in volumes:
            one = Image.objects.select_related("pool").get(name=name)
            assert one.full_bytes is not None
            assert 0 <= (one.allocated_size or 0) - one.full_bytes < one.full_bytes * 0.03, name
    finally:
        host.run(f"udevadm settle; zpool destroy -f tank; rm {files}")


def test_storages_of_proxmox_have_the_volumes_that_lie_in_their_datasets(tank: Host, row: Row) -> None:
    for name, path in (("local-zfs", "/vms"), ("small", "/tank/small")):
        StoragePoolFactory.create(volumes=True, host=row, name=name, kind="zfs", path=path)
    scan(row)
    found = pools()
    assert {name: pool.images_count for name, pool in found.items()} == {"local-zfs": 4, "small": 1, "tank": 1}
    used, available = said(tank, "used,available", "tank/small")["tank/small"]
    assert (found["small"].capacity_bytes, found["small"].available_bytes) == (used + available, available)
    assert found["local-zfs"].capacity_bytes == found["tank"].capacity_bytes
    assert found["local-zfs"].shares["used"] == said(tank, "used", "tank/data")["tank/data"][0]
    assert scan(row)["read"] == 0


def test_guests_are_found_by_any_name_and_what_is_open_is_in_use(tank: Host, row: Row) -> None:
    scan(row)
    clone = image_at(b"/dev/zvol/tank/data/vm-102-disk-0")
    assert [use.disk.guest.name for use in clone.uses.all()] == ["web"]
    assert clone.in_use is not True
    tank.run(
        "mkfs.ext4 -q '/dev/zvol/tank/plain+disk'; mkdir -p /mnt/volume; mount '/dev/zvol/tank/plain+disk' /mnt/volume"
    )
    tank.run("(sleep 1000 </dev/zvol/tank/small/vm-104-disk-0 >/dev/null 2>&1 & echo $! >/root/sleeper)")
    scan(row)
    names = {one.name: one.in_use for one in Image.objects.all()}
    tank.run("kill $(cat /root/sleeper); umount /mnt/volume")
    assert names == dict.fromkeys(VOLUMES) | {"plain+disk": True, "vm-104-disk-0": True}
    scan(row)
    assert {one.in_use for one in Image.objects.all()} == {None}


def test_volumes_of_a_pool_that_is_exported_stay_as_last_seen(tank: Host, row: Row) -> None:
    scan(row)
    tank.run("udevadm settle; zpool export tank")
    assert scan(row)["vanished"] == 0
    assert [pool.state for pool in pools().values()] == ["missing"]
    assert Image.objects.filter(missing_since=None).count() == len(VOLUMES)
    tank.run("zpool import -d /root tank; udevadm settle")
    scan(row)
    assert [pool.state for pool in pools().values()] == ["ok"]
