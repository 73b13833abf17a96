"""Snapshots that are files: named as Proxmox VE itself named them, which was recorded."""

import json
from typing import Any

import pytest

from storage_admin.hosts.proxmox import conffiles, storages, volumes
from storage_admin.hosts.proxmox.storages import StorageFacts
from tests.harness.proxmox.schema import DATA

RECORDED: dict[str, Any] = json.loads((DATA / "volume_chain.json").read_text())
SNAPSHOTS = {path: base for path, base in RECORDED["files"].items() if "/snap-" in path}


def files(**changed: str) -> dict[str, bytes]:
    texts = RECORDED["configurations"] | {name.removeprefix("n"): text for name, text in changed.items()}
    found = {f"nodes/pve1/qemu-server/{number}.conf": text.encode() for number, text in texts.items()}
    return found | {"storage.cfg": RECORDED["storage.cfg"].encode()}


def test_the_flag_is_read_from_the_file_and_from_the_api() -> None:
    by_file = {one.name: one for one in storages.parse_file(RECORDED["storage.cfg"])[0]}
    assert (by_file["chain"].volume_chains, by_file["local"].volume_chains) == (True, False)
    assert storages.of_definition(RECORDED["storage"]).volume_chains is True


def test_each_snapshot_is_the_file_that_was_recorded_and_stands_on_what_its_header_said() -> None:
    guests = conffiles.of_files(files(), node="pve1").guests
    assert {path: base for guest in guests for path, base in guest.stands_on.items()} == SNAPSHOTS
    named = {disk.path: disk.only_in for guest in guests for disk in guest.facts.disks if disk.only_in}
    assert named == {path: path.rpartition("snap-")[2].partition("-vm-1")[0] for path in SNAPSHOTS} | {
        path: "a-vm-1" for path in SNAPSHOTS if "a-vm-1" in path
    }


def test_while_snapshots_change_nobody_says_what_they_stand_on() -> None:
    text = "lock: snapshot-delete\n" + RECORDED["configurations"]["130"]
    guest = next(one for one in conffiles.of_files(files(n130=text), node="pve1").guests if one.vmid == 130)
    assert set(guest.stands_on.values()) == {None}


@pytest.mark.parametrize(
    ("volume", "named"),
    [
        ("thick:vm-100-disk-0.qcow2", "thick:snap_vm-100-disk-0_s1.qcow2"),
        ("thick:vm-100-disk-0", ""),
        ("plain:100/vm-100-disk-0.qcow2", ""),
        ("store:100/vm-100-disk-0.raw", ""),
        ("store:100/data.qcow2", "store:100/snap-s1-data.qcow2"),
        ("store:iso/debian.iso", ""),
        ("/dev/sda", ""),
    ],
)
def test_the_name_of_a_snapshot_by_its_storage(volume: str, named: str) -> None:
    known = {
        "store": StorageFacts("store", "dir", "/srv", volume_chains=True),
        "plain": StorageFacts("plain", "dir", "/srv"),
        "thick": StorageFacts("thick", "lvm", group="vg", volume_chains=True),
    }
    assert volumes.snapshot_id(volume, "s1", known) == named
    expected = {"thick": f"/dev/vg/{named[6:]}", "store": f"/srv/images/100/{named.rpartition('/')[2]}"}
    assert volumes.snapshot_path(volume, "s1", known) == (expected[named.partition(":")[0]] if named else "")
