"""Logical volumes of a real host: images become volumes and come back; what is in use is refused."""

from collections.abc import Iterator
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from tests.agent.harness import NO_RESERVE
from tests.machines.host import MIB, POOL, Host, host

__all__ = ["host"]

pytestmark = pytest.mark.machines

SIZE = 32 * MIB


@pytest.fixture
def group(host: Host) -> Iterator[Host]:
    """A volume group ``vg`` with volumes ``thick`` and ``thin``, and an image ``vm.qcow2`` with noise and zeros."""
    host.run(f"rm -rf {POOL}/* {POOL}/.sa-*; rm -f /root/pv; truncate -s 256M /root/pv")
    host.run("pvcreate -q $(losetup -f --show /root/pv); vgcreate -q vg $(losetup -j /root/pv | cut -d: -f1)")
    host.run("lvcreate -q -y -L 32M -n thick vg; lvcreate -q -L 64M -T vg/pool; lvcreate -q -V 40M -T vg/pool -n thin")
    host.run(f"cd {POOL}; dd if=/dev/urandom of=raw bs=1M count=5 status=none; truncate -s {SIZE} raw")
    host.run(f"cd {POOL}; qemu-img convert -f raw -O qcow2 raw vm.qcow2; mv raw /root/expected; sync")
    yield host
    host.run("umount /mnt/volume 2>/dev/null || true; vgremove -q -f vg; losetup -D; rm /root/pv")


def written(host: Host, device: str, **more: Any) -> dict[str, Any]:
    args = host.args("vm.qcow2", SIZE, device_b64=b64(device.encode()), reserve=NO_RESERVE, idle_io=False, **more)
    return host.ask("to_device", args)


def read(host: Host, device: str, name: str = "back.qcow2") -> dict[str, Any]:
    target = {"pool_path_b64": b64(POOL.encode()), "path_b64": b64(f"{POOL}/{name}".encode()), "format": "qcow2"}
    return host.ask("from_device", {"device_b64": b64(device.encode()), "target": target, "reserve": NO_RESERVE})


@pytest.mark.parametrize("device", ["/dev/vg/thin", "/dev/mapper/over"])
def test_a_thin_pool_that_others_fill_meanwhile_ends_it_before_that_is_full(group: Host, device: str) -> None:
    group.run("lvcreate -q -V 60M -T vg/pool -n other; udevadm settle")
    group.run('dmsetup create over --table "0 $(blockdev --getsz /dev/vg/thin) linear /dev/vg/thin 0"; udevadm settle')
    if device == "/dev/vg/thin":
        group.run("dmsetup remove over")
    before = group.run(f"sha256sum <{POOL}/vm.qcow2")
    more = {"idle_io": False, "bandwidth_bytes_sec": MIB // 4, "reserve": {"percent": 0.0, "bytes": 30 * MIB}}
    try:
        with group.agent() as agent:
            agent.request("to_device", group.args("vm.qcow2", SIZE, device_b64=b64(device.encode()), **more), "j1")
            agent.until("ready")
            agent.say("go", generation=agent.generation)
            agent.until("progress", stage="copying")
            group.run("dd if=/dev/urandom of=/dev/vg/other bs=1M count=35 oflag=direct conv=notrunc status=none")
            assert agent.answer()["code"] == "not_enough_space"
        group.run("lvremove -q -y vg/other")
        assert written(group, device, overwrite=True).get("virtual_size") == SIZE
        assert group.run(f"sha256sum <{POOL}/vm.qcow2") == before
    finally:
        group.run("dmsetup remove over || true")


def rows(host: Host, *devices: str) -> list[tuple[Any, ...]]:
    told = host.ask("beneath", {"paths_b64": [b64(one.encode()) for one in devices]})["devices"]
    return [(one["target"], one["discards"], one["passes_on"]) for one in told]


@pytest.mark.parametrize("volume", ["thick", "thin"])
def test_an_image_becomes_a_volume_and_a_volume_an_image(group: Host, volume: str) -> None:
    group.run(f"dd if=/dev/zero bs=1M count=32 status=none | tr '\\0' x >/dev/vg/{volume}; sync")
    told = written(group, f"/dev/vg/{volume}")
    assert told.get("virtual_size") == SIZE, told
    assert group.run(f"cmp -n {SIZE} /dev/vg/{volume} /root/expected && echo same") == "same\n"
    before = group.run(f"sha256sum </dev/vg/{volume}")
    back = read(group, f"/dev/vg/{volume}")
    assert back.get("device_bytes") == (SIZE if volume == "thick" else 40 * MIB), back
    group.run(f"qemu-img compare -f raw -F qcow2 /dev/vg/{volume} {POOL}/back.qcow2")
    assert back["after_bytes"] < (9 if volume == "thick" else 18) * MIB
    assert group.run(f"sha256sum </dev/vg/{volume}") == before


def test_a_volume_that_is_in_use_is_neither_read_nor_written(group: Host) -> None:
    group.run("mkfs.ext4 -q /dev/vg/thick; mkdir -p /mnt/volume; mount /dev/vg/thick /mnt/volume")
    physical = group.run("losetup -j /root/pv | cut -d: -f1").strip()
    for device in ("/dev/vg/thick", "/dev/mapper/vg-pool_tdata", physical):
        assert read(group, device)["code"] == "device_in_use", device
        assert written(group, device, overwrite=True)["code"] == "device_in_use", device
    group.run("umount /mnt/volume")
    assert written(group, "/dev/vg/thick")["code"] == "target_exists"
    group.run("lvchange -an vg/thick")
    assert written(group, "/dev/vg/thick")["code"] == "stale_plan"


@pytest.fixture
def paths(group: Host) -> Iterator[tuple[Host, list[str]]]:
    """A disk of two partitions that the kernel has twice, as over two cables that no multipath joins: its names."""
    group.run("modprobe scsi_debug add_host=2 vpd_use_hostno=0 dev_size_mb=80 num_parts=2; udevadm settle")
    found = group.run("lsblk -dnro NAME,VENDOR | sed -n 's/ Linux.*//p'").split()
    assert len(found) == 2
    yield group, [f"/dev/{name}" for name in found]
    group.run("umount /mnt/volume 2>/dev/null || true; until rmmod scsi_debug; do sleep 1; done")


def test_what_has_another_path_to_the_disk_in_use_is_seen(paths: tuple[Host, list[str]]) -> None:
    host, (one, other) = paths
    host.run(f"mkfs.ext4 -q {one}1; mkdir -p /mnt/volume; mount {one}1 /mnt/volume")
    for device, code in ((other, "device_in_use"), (f"{other}1", "device_in_use"), (f"{other}2", None)):
        assert written(host, device, overwrite=True).get("code") == code, device
        assert read(host, device, "back.qcow2").get("code") == code, device
    host.run(f"rm {POOL}/back.qcow2; umount /mnt/volume; sleep 300 <{one}1 >/dev/null 2>&1 & echo $! >/root/sleeper")
    assert written(host, f"{other}1", overwrite=True)["code"] == "device_in_use"
    host.run("kill $(cat /root/sleeper)")
    assert written(host, f"{other}1", overwrite=True).get("virtual_size") == SIZE


def test_what_nvme_over_fabrics_gives_to_others_is_in_use(group: Host) -> None:
    made = "/sys/kernel/config/nvmet/subsystems/one"
    group.run("modprobe nvmet; mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config")
    group.run(f"mkdir -p {made}/namespaces/1; echo /dev/vg/thick >{made}/namespaces/1/device_path")
    group.run(f"echo 1 >{made}/namespaces/1/enable")
    try:
        for device in ("/dev/vg/thick", "/dev/mapper/vg-thick"):
            assert written(group, device, overwrite=True)["code"] == "device_in_use"
    finally:
        group.run(f"rmdir {made}/namespaces/1 {made}; rmmod nvmet")
    assert written(group, "/dev/vg/thick", overwrite=True).get("virtual_size") == SIZE


def test_a_snapshot_of_the_volume_keeps_what_was_there(group: Host) -> None:
    group.run("printf before >/dev/vg/thin; sync; lvcreate -q -s -n kept -K -ay vg/thin")
    assert written(group, "/dev/vg/thin").get("virtual_size") == SIZE
    assert group.run("head -c 6 /dev/vg/kept") == "before"


def test_what_a_volume_does_with_discards_is_what_lvm_says(group: Host) -> None:
    assert rows(group, "/dev/vg/thick", "/dev/vg/thin", "/dev/vg/none") == [
        ("linear", True, None), ("thin", True, True), ("", None, None),
    ]  # fmt: skip
    group.run("lvchange -q --discards nopassdown vg/pool")
    assert rows(group, "/dev/vg/thin") == [("thin", True, False)]
    group.run("lvchange -q -an vg/thin vg/pool; lvchange -q --discards ignore vg/pool; lvchange -q -ay vg/thin")
    [(target, discards, passes_on)] = rows(group, "/dev/vg/thin")
    assert (target, discards, passes_on) == ("thin", False, False)
