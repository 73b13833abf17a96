"""LVM of a real host: each figure of the dashboard is what LVM says, and a scan activates nothing."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.utils import timezone

from images.alert_rules.looking import look, look_at_space
from images.models import Image
from images.scan import minutes
from storage_admin.events.models import Alert
from storage_admin.hosts import asking
from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts
from storage_admin.hosts.libvirt import reader
from storage_admin.hosts.libvirt.reader import LibvirtFacts
from storage_admin.hosts.models import Host as Row
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import runner
from tests.factories import HostFactory
from tests.machines.host import MIB, Host, host
from tests.working import image_at, reread, scan

__all__ = ["host"]

pytestmark = [pytest.mark.machines, pytest.mark.django_db, pytest.mark.usefixtures("quiet")]

ATTACH = "for one in 1 2; do losetup -f /root/pv$one; done; udevadm settle"
DETACH = "udevadm settle; losetup -D; udevadm settle"
DISKS = "$(losetup -j /root/pv1 | cut -d: -f1) $(losetup -j /root/pv2 | cut -d: -f1)"
#: Below which nothing is activated or written without that these change.
STATE = "udevadm settle; dmsetup ls | sort; vgs --noheadings -o vg_seqno,vg_free; lvs -a --noheadings -o name,lv_active"


@pytest.fixture
def group(host: Host) -> Iterator[Host]:
    """A group ``vg`` on two disks: thick, mirrored and inactive volumes, a thin pool with a volume and snapshots."""
    host.run(f"truncate -s 256M /root/pv1 /root/pv2; {ATTACH}")
    host.run(f"pvcreate -q {DISKS}; vgcreate -q vg {DISKS}")
    host.run("lvcreate -q -y -L 32M -n thick vg; lvcreate -q -y --type raid1 -m1 --nosync -L 16M -n mirrored vg")
    host.run("lvcreate -q -y -L 24M -n idle vg; lvcreate -q -y -s -L 8M -n classic vg/thick; lvchange -an vg/idle")
    host.run("lvcreate -q -L 64M -T vg/pool; lvcreate -q -V 40M -T vg/pool -n thin")
    host.run("dd if=/dev/urandom of=/dev/vg/thin bs=1M count=5 oflag=direct status=none")
    host.run("lvcreate -q -s -n kept -K -ay vg/thin; lvcreate -q -s -n away vg/thin; udevadm settle")
    yield host
    host.run(f"umount /mnt/volume 2>/dev/null || true; vgremove -q -f vg; {DETACH}; rm /root/pv1 /root/pv2")


@pytest.fixture
def row(host: Host, monkeypatch: pytest.MonkeyPatch) -> Row:
    """The machine as a host of the dashboard, on which libvirt has one guest, by the other name of its disk."""
    command = host.machine.command("python3 /root/agent.pyz")
    for module in (runner, asking):
        monkeypatch.setattr(module, "agent_command", lambda *_: contextlib.nullcontext(command))
    guest = GuestFacts("domain", "u1", "web", "shut off", (DiskFacts("vda", "disk", "/dev/mapper/vg-thick", "raw"),))
    monkeypatch.setattr(reader, "read", lambda host: LibvirtFacts(domains=(guest,)))
    return HostFactory.create(slug="far", kind="ssh", transport="forced", last_seen=None, capabilities={})


def said(host: Host, what: str, columns: str) -> dict[str, list[str]]:
    """Lines of a report of LVM, by their first column."""
    report = f"--noheadings --separator '|' --units b --nosuffix -o {columns}"
    lines = [line.strip().split("|") for line in host.run(f"{what} {report}").splitlines()]
    return {first: rest for first, *rest in lines}


def percent(part: int | None, whole: int | None) -> str:
    return "" if part is None or whole is None else f"{100 * part / whole:.2f}"


def test_each_figure_is_what_lvm_says_and_a_scan_changes_nothing(group: Host, row: Row) -> None:
    before = group.run(STATE)
    scan(row)
    assert group.run(STATE) == before
    volumes = {one.name: one for one in Image.objects.select_related("pool", "backing")}
    assert set(volumes) == {"thick", "mirrored", "idle", "classic", "thin", "kept", "away"}
    for name, (size, data, origin, pool) in said(group, "lvs", "name,lv_size,data_percent,origin,pool_lv").items():
        if name == "pool":
            continue
        one = volumes[name]
        assert one.pool.name == ("vg/pool" if pool else "vg"), name
        assert (one.backing.name if one.backing else "") == origin, name
        assert one.exclusive_bytes == (None if pool else one.allocated_size), name
        if pool:
            assert (one.virtual_size, percent(one.allocated_size, one.virtual_size)) == (int(size), data), name
        elif name != "mirrored":
            assert one.allocated_size == int(size), name
    assert volumes["classic"].virtual_size == volumes["thick"].virtual_size == 32 * MIB
    assert (volumes["mirrored"].virtual_size, volumes["mirrored"].allocated_size) == (16 * MIB, 40 * MIB)
    assert (volumes["away"].allocated_size, volumes["kept"].allocated_size) == (None, 5 * MIB)
    whole, thin = StoragePool.objects.get(name="vg"), StoragePool.objects.get(name="vg/pool")
    sizes = said(group, "vgs", "name,vg_size,vg_free")["vg"]
    assert [whole.capacity_bytes, whole.available_bytes] == list(map(int, sizes))
    size, metadata, *shares = said(group, "lvs", "name,lv_size,lv_metadata_size,data_percent,metadata_percent")["pool"]
    assert (thin.capacity_bytes, thin.metadata_bytes) == (int(size), int(metadata))
    assert [f"{thin.used_percent:.2f}", f"{thin.metadata_percent:.2f}"] == shares
    assert {one.orphan for one in volumes.values()} <= {None, False}


def test_what_deleting_a_volume_frees_is_what_was_said(group: Host, row: Row) -> None:
    scan(row)
    for name in ("classic", "mirrored", "thick", "idle"):
        expected = image_at(f"/dev/vg/{name}".encode()).exclusive_bytes
        free = int(said(group, "vgs", "name,vg_free")["vg"][0])
        group.run(f"lvremove -q -f vg/{name}")
        assert int(said(group, "vgs", "name,vg_free")["vg"][0]) - free == expected, name
    assert scan(row)["vanished"] == 4


def test_a_thin_pool_that_runs_to_95_percent_is_told_of_as_a_danger(group: Host, row: Row) -> None:
    scan(row)
    look(timezone.now())
    thin = StoragePool.objects.get(name="vg/pool")
    alerts = Alert.objects.filter(closed=None, key=f"pool_over_threshold:{thin.pk}")
    assert not alerts.exists()
    group.run("lvcreate -q -V 60M -T vg/pool -n full; udevadm settle")
    group.run("dd if=/dev/urandom of=/dev/vg/full bs=1M count=56 oflag=direct status=none")
    scan(row)
    look(timezone.now())
    assert f"{reread(thin).used_percent:.2f}" == said(group, "lvs", "name,data_percent")["pool"][0] == "95.31"
    assert [one.severity for one in alerts] == ["danger"]
    assert alerts.get().detail.startswith("Data of the thin pool")


def test_a_thin_pool_that_is_run_full_is_told_of_before_and_looks_activate_nothing(
    group: Host, row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.run("lvchange -q --errorwhenfull y vg/pool; lvcreate -q -V 100M -T vg/pool -n full; udevadm settle")
    scan(row)
    for limit in ("ANSWER", "ROUND"):
        monkeypatch.setattr(minutes, limit, 120.0)  # an emulated machine is slow
    thin, state, now, told_at = StoragePool.objects.get(name="vg/pool"), group.run(STATE), timezone.now(), 0.0
    alerts = Alert.objects.filter(closed=None, key=f"pool_days_until_full:{thin.pk}")
    for step in range(1, 20):
        at = now + timedelta(minutes=step)
        monkeypatch.setattr(timezone, "now", lambda at=at: at)
        StoragePool.objects.update(space_due=None)  # else it is looked at each minute only once that is known to pay
        minutes.look(at)
        look_at_space(at)
        status = group.run("dmsetup status --noflush vg-pool-tpool").split()
        used, whole = map(int, status[5].split("/"))
        assert reread(thin).space_at == at
        assert thin.used_bytes == thin.capacity_bytes * used // whole  # type: ignore[operator]
        assert thin.metadata_used_bytes == pytest.approx(4096 * int(status[4].split("/")[0]), abs=500)
        told_at = told_at or (thin.used_percent or 0.0 if alerts.exists() else 0.0)
        if status[7] == "out_of_data_space":
            break
        group.run(f"dd if=/dev/urandom of=/dev/vg/full bs=1M seek={5 * step} count=5 oflag=direct status=none || true")
    assert 50 < told_at < 80
    assert (thin.volume_facts or {})["mode"] == "out_of_data_space"
    assert group.run(STATE) == state


def test_guests_are_found_by_any_name_and_what_is_open_is_in_use(group: Host, row: Row) -> None:
    for active in ("y", "n"):
        group.run(f"lvchange -q -a{active} vg/thick; udevadm settle")
        scan(row)
        thick = image_at(b"/dev/vg/thick")
        assert [use.disk.guest.name for use in thick.uses.all()] == ["web"], active
        assert thick.in_use is not True
    group.run("mkfs.ext4 -q /dev/vg/thin; mkdir -p /mnt/volume; mount /dev/vg/thin /mnt/volume")
    scan(row)
    assert (image_at(b"/dev/vg/thin").in_use, image_at(b"/dev/vg/kept").in_use) == (True, None)


def test_volumes_of_a_group_on_a_disk_that_is_away_stay_as_last_seen(group: Host, row: Row) -> None:
    scan(row)
    group.run(f"vgchange -q -an vg; {DETACH}")
    assert scan(row)["vanished"] == 0
    assert set(StoragePool.objects.values_list("state", flat=True)) == {"missing"}
    group.run(f"{ATTACH}; vgchange -q -an vg")
    scan(row)
    assert set(StoragePool.objects.values_list("state", flat=True)) == {"ok"}
    assert image_at(b"/dev/vg/thin").allocated_size is None
    assert group.run("dmsetup ls") == "No devices found\n"
