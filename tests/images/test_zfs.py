"""Volumes of ZFS as rows: by the real agent, and what ZFS said on a real machine (zfs 2.1.11)."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from images.models import Image
from images.scan import minutes
from images.selectors.overview import overview
from storage_admin.errors import InvalidError
from storage_admin.hosts import services as hosts
from storage_admin.hosts.models import StoragePool
from tests.agent.test_zfs import DATASETS, MIB, POOLS, line
from tests.agent.test_zfs import listed as listed_by_zpool
from tests.factories import StoragePoolFactory
from tests.guests.test_other_pools import Node, disk, domain, image, node
from tests.images.test_lvm import listed, pools
from tests.working import ADMIN, client_as, codes, scan, scanned_machine, this_machine

__all__ = ["node"]

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet"), pytest.mark.sql]

Says = Callable[..., None]
TANK = """
<pool type='zfs'><name>{0}</name><source><name>{1}</name></source><target><path>/dev/zvol/{1}</path></target></pool>"""


@pytest.fixture
def zfs_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """``zfs_says(pools, datasets)``: what ZFS answers from now on; without pools, it fails."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    (tmp_path / "bin").mkdir()

    def says(told: list[str], datasets: list[str]) -> None:
        for tool, lines in (("zpool", told), ("zfs", datasets)):
            program = tmp_path / "bin" / tool
            (tmp_path / f"{tool}.txt").write_text("".join(f"{one}\n" for one in lines))
            program.write_text(f"#!/bin/sh\ncat {tmp_path}/{tool}.txt\n" if told or datasets else "#!/bin/sh\nexit 5")
            program.chmod(0o755)

    says(POOLS, DATASETS)
    return says


def proxmox(host: Any, *storages: tuple[str, str]) -> None:
    for name, path in storages:
        StoragePoolFactory.create(volumes=True, host=host, name=name, kind="zfs", path=path)


def column(name: str, of: str) -> int:
    """A number that ZFS told."""
    return int(line(of).split("\t")[["used", "available", "usedbydataset"].index(name) + 2])


def test_a_zfs_pool_with_nothing_in_it_is_a_pool_to_move_disks_to(zfs_says: Says) -> None:
    zfs_says(POOLS, [line("tank")])
    scan(this_machine())
    assert {(one.name, one.kind, one.images_count) for one in pools().values()} == {("tank", "zfs", 0)}


@pytest.mark.parametrize(
    ("readonly", "multihost", "is_ours"), [("off", "off", True), ("on", "off", False), ("off", "on", False)]
)
def test_no_plan_changes_a_pool_that_is_not_this_hosts_alone(
    zfs_says: Says, readonly: str, multihost: str, is_ours: bool
) -> None:
    zfs_says([POOLS[0].removesuffix("off\toff") + f"{readonly}\t{multihost}"], DATASETS)
    scan(this_machine())
    assert ("shared_pool" not in codes("set_aside", image("vm-104-disk-0"), ADMIN)) is is_ours


def test_a_look_each_minute_takes_what_zfs_says_of_the_room_now(zfs_says: Says) -> None:
    scan(this_machine())
    before = pools()["tank"]
    zfs_says(POOLS, ["tank\t700000000\t172415232"])
    minutes.look(now := timezone.now())
    tank = pools()["tank"]
    assert (tank.capacity_bytes, tank.available_bytes) == (872415232, 172415232)
    assert tank.space_at is not None
    assert tank.space_at >= now
    assert before.available_bytes != tank.available_bytes
    zfs_says([], [])
    minutes.look(now + timedelta(hours=1))
    assert (pools()["tank"].available_bytes, pools()["tank"].space_at) == (172415232, tank.space_at)


@pytest.mark.parametrize(
    ("layout", "block", "measured"),
    [
        # 16 MiB of random bytes on zfs 2.1.11 (ashift 12, no compression), as usedbydataset told.
        ("raidz1 4", 4, 24807936), ("raidz1 4", 8, 24653184), ("raidz1 4", 16, 18463104), ("raidz1 4", 64, 16867968),
        ("raidz2 6", 4, 34045440), ("raidz2 6", 8, 33832656), ("raidz2 6", 16, 16973616), ("raidz2 6", 64, 16908144),
    ],
)  # fmt: skip
def test_what_a_full_volume_takes_on_raidz_is_as_measured(
    zfs_says: Says, tmp_path: Path, layout: str, block: int, measured: int
) -> None:
    name = "tank/small/vm-104-disk-0"
    others = [one for one in DATASETS if one.split("\t")[0] != name]
    zfs_says(POOLS, [*others, line(name, volblocksize=f"{block << 10}")])
    (tmp_path / "vdevs.txt").write_text("".join(f"{one}\n" for one in listed_by_zpool(layout)))
    tool = tmp_path / "bin/zpool"
    tool.write_text(tool.read_text().replace("cat", f"case $* in *v*) cat {tmp_path}/vdevs.txt; exit ;; esac\ncat", 1))
    scan(this_machine())
    viewer = client_as(role="viewer")
    told = viewer.get(f"/api/v1/images/{image('vm-104-disk-0').pk}/").json()
    assert (told["cluster_size"], told["virtual_size"]) == (block << 10, 16 * MIB)
    assert 0 <= measured - told["full_bytes"] < 0.03 * measured
    page = viewer.get(f"/images/{image('vm-104-disk-0').pk}/").content.decode()
    assert f"{told['full_bytes']:,}" in page
    assert image("subvol-103-disk-0").full_bytes is None


def test_a_zfs_pool_is_a_pool_and_its_volumes_images(zfs_says: Says) -> None:
    host = this_machine()
    assert scan(host)["images"] == 6
    tank = pools()["tank"]
    assert (tank.kind, tank.source, tank.state, tank.path) == ("zfs", "zfs", "ok", "/dev/zvol/tank")
    assert (tank.available_bytes, tank.used_bytes) == (column("available", "tank"), column("used", "tank"))
    thick, base, clone, subvolume = (image(f"{one}-disk-0") for one in ("vm-100", "base-101", "vm-102", "subvol-103"))
    assert (thick.virtual_size, thick.exclusive_bytes, clone.backing) == (64 * MIB, None, base)
    assert thick.allocated_size == column("usedbydataset", "tank/data/vm-100-disk-0")
    assert (thick.reservation_bytes or 0) > 0
    assert (thick.snapshot_bytes or 0) > 7 * MIB
    assert (clone.exclusive_bytes, clone.snapshot_bytes) == (clone.allocated_size, 0)
    assert (subvolume.path, subvolume.format, subvolume.virtual_size) == ("/vms/subvol-103-disk-0", "subvol", 32 * MIB)
    assert image("plain+disk").path == "/dev/zvol/tank/plain+disk"
    assert {one.state for one in Image.objects.all()} == {"ok"}
    assert {one.orphan for one in Image.objects.all()} <= {None, False}
    assert scan(host)["read"] == 0


def test_volumes_snapshots_and_reservations_are_all_but_one_percent_of_what_is_used(zfs_says: Says) -> None:
    scan(this_machine())
    shares = pools()["tank"].shares
    assert set(shares) == {"used", "images", "snapshots", "reserved", "others", "remainder"}
    used, remainder = shares.pop("used") or 0, shares["remainder"] or 0
    assert sum(one or 0 for one in shares.values()) == used
    assert 0 <= remainder < used / 100
    assert shares["images"] == sum(one.allocated_size or 0 for one in Image.objects.all())
    assert shares["reserved"] == sum(one.reservation_bytes or 0 for one in Image.objects.all())


def test_where_blocks_are_shared_by_deduplication_what_deleting_frees_is_not_known(zfs_says: Says) -> None:
    zfs_says([POOLS[0].replace("\t1.00\t", "\t1.25\t")], DATASETS)
    scan(this_machine())
    assert {one.exclusive_bytes for one in Image.objects.all()} == {None}


def test_pages_and_rest_show_what_zfs_says(zfs_says: Says) -> None:
    scan(this_machine())
    client, tank, thick = client_as(role="admin"), pools()["tank"], image("vm-100-disk-0")
    told = client.get(f"/api/v1/pools/{tank.pk}/").json()
    assert (told["shares"], told["health"], told["source"]) == (tank.shares, "ONLINE", "zfs")
    page = client.get(f"/pools/{tank.pk}/").content.decode()
    shown = (tank.shares["snapshots"], tank.shares["reserved"], tank.shares["remainder"])
    assert all(f"{size:,}" in page for size in shown)
    assert f"/pools/{tank.pk}/create" not in page
    volumes = {one["name"]: one for one in client.get("/api/v1/images/").json()["results"]}
    assert volumes["vm-100-disk-0"]["snapshot_bytes"] == thick.snapshot_bytes
    assert volumes["vm-100-disk-0"]["reservation_bytes"] == thick.reservation_bytes
    page = client.get(f"/images/{thick.pk}/").content.decode()
    assert f"{thick.snapshot_bytes:,}" in page
    assert f"{thick.reservation_bytes:,}" in page


def test_storages_of_proxmox_and_pools_of_libvirt_have_the_volumes_of_their_datasets(
    node: Node, zfs_says: Says
) -> None:
    node(TANK.format("vms", "tank/small"))
    host = this_machine()
    proxmox(host, ("local-zfs", "/vms"), ("elsewhere", "/other"))
    scan(host)
    assert {name: pool.images_count for name, pool in pools().items()} == {
        "local-zfs": 4, "elsewhere": 0, "vms": 1, "tank": 1,
    }  # fmt: skip
    assert pools()["local-zfs"].capacity_bytes == pools()["tank"].capacity_bytes
    small = pools()["vms"]
    assert (small.used_bytes, small.available_bytes) == (
        column("used", "tank/small"), column("available", "tank/small"),
    )  # fmt: skip
    # A quota sets a dataset apart; both are parts of the pool, which counts once.
    assert overview(ADMIN).totals.capacity_bytes == pools()["tank"].capacity_bytes
    assert scan(host)["read"] == 0


def test_a_storage_of_a_whole_pool_takes_the_volumes_over_with_their_history(node: Node, zfs_says: Says) -> None:
    node()
    host = scanned_machine()
    known = {one.name: one.pk for one in Image.objects.all()}
    node(TANK.format("all", "tank"))
    assert scan(host)["vanished"] == 0
    assert listed() == dict.fromkeys(known, "all")
    assert {one.name: one.pk for one in Image.objects.all()} == known
    assert scan(host)["read"] == 0
    assert {pool.source for pool in StoragePool.objects.filter(kind="zfs")} == {"libvirt"}


def test_a_guest_is_linked_to_its_volume(node: Node, zfs_says: Says) -> None:
    node(domain("web", disk("dev='/dev/zvol/tank/plain+disk'", "vda")))
    scan(this_machine())
    volume = image("plain+disk")
    assert [use.disk.guest.name for use in volume.uses.all()] == ["web"]
    assert (volume.in_use, volume.orphan) == (True, False)


def test_volumes_go_and_come_and_a_pool_that_is_away_keeps_its_volumes_until_it_is_removed(zfs_says: Says) -> None:
    host = scanned_machine()
    zfs_says(POOLS, [one for one in DATASETS if not one.startswith("tank/plain")])
    assert scan(host)["vanished"] == 1
    assert image("plain+disk").state == "missing"
    zfs_says([POOLS[0].replace("tank", "other")], [])
    assert scan(host)["vanished"] == 0
    assert (pools()["tank"].state, image("vm-100-disk-0").state) == ("missing", "ok")
    zfs_says(POOLS, DATASETS)
    scan(host)
    assert (pools()["tank"].state, image("plain+disk").state) == ("ok", "ok")
    with pytest.raises(InvalidError):
        hosts.remove_pool(ADMIN, pools()["tank"])
    zfs_says([POOLS[0].replace("tank", "other")], [])
    scan(host)
    hosts.remove_pool(ADMIN, pools()["tank"])
    assert not StoragePool.objects.filter(name="tank").exists()


@pytest.mark.parametrize("how", ["silent", "failed", "cut off"])
def test_where_zfs_does_not_answer_all_is_as_last_seen(zfs_says: Says, how: str) -> None:
    host = scanned_machine()
    before, shares = listed(), pools()["tank"].shares
    answers: dict[str, tuple[list[str], list[str]]] = {
        "silent": ([], []), "failed": ([POOLS[0].replace("ONLINE", "SUSPENDED")], []),
        "cut off": (POOLS, [*DATASETS[:3], DATASETS[3][:20]]),
    }  # fmt: skip
    zfs_says(*answers[how])
    assert scan(host)["vanished"] == 0
    tank = pools()["tank"]
    assert (tank.state, tank.shares, listed()) == ("unreadable", shares, before)
    assert tank.capacity_bytes == column("used", "tank") + column("available", "tank")


@pytest.mark.parametrize("kind", ["reclaim", "flatten", "convert", "check", "analyze", "commit", "grow"])
def test_no_job_on_files_works_on_a_volume(zfs_says: Says, kind: str) -> None:
    scan(this_machine())
    given: dict[str, dict[str, Any]] = {"convert": {"format": "qcow2"}, "grow": {"size_bytes": 64 * MIB}}
    for name in ("vm-102-disk-0", "subvol-103-disk-0"):
        told = codes(kind, image(name), ADMIN, **given.get(kind, {}))
        # Clones are promoted, but not where their origin is a volume of Proxmox VE.
        others = {"vm-102-disk-0": "in_snapshot_chain", "subvol-103-disk-0": "stale_plan"}
        assert (others[name] if kind == "flatten" else "unsupported_pool") in told, (kind, name)
