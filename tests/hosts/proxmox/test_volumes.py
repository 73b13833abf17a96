"""Volume ids and their paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_admin.hosts.proxmox import volumes
from storage_admin.hosts.proxmox.storages import StorageFacts, parse_file
from tests.harness.proxmox.world import files, recorded

STORAGES = {one.name: one for one in parse_file(files()["storage.cfg"].decode())[0]} | {
    "bt": StorageFacts("bt", "btrfs", "/mnt/bt"),
    "odd": StorageFacts("odd", "dir", "/odd", subfolders={"images": "disks", "iso": "cds"}),
    "thick": StorageFacts("thick", "lvm", group="vg0"),
}


def test_paths_are_those_that_proxmox_recorded() -> None:
    base = "/mnt/pve/store/images"
    assert volumes.path("store:100/vm-100-disk-0.qcow2", STORAGES) == f"{base}/100/vm-100-disk-0.qcow2"
    linked = "store:101/base-101-disk-0.qcow2/102/vm-102-disk-0.qcow2"
    assert volumes.path(linked, STORAGES) == f"{base}/102/vm-102-disk-0.qcow2"
    assert volumes.path("store:102/vm-102-disk-0.qcow2", STORAGES) == f"{base}/102/vm-102-disk-0.qcow2"
    assert volumes.path("store:iso/debian-12.iso", STORAGES) == "/mnt/pve/store/template/iso/debian-12.iso"


@pytest.mark.parametrize(
    ("volume", "path"),
    [
        ("store:200/vm-100-disk-9.qcow2", "/mnt/pve/store/images/200/vm-100-disk-9.qcow2"),
        ("store:100/old-backup.qcow2", "/mnt/pve/store/images/100/old-backup.qcow2"),
        ("store:300/subvol-300-disk-1.subvol", "/mnt/pve/store/images/300/subvol-300-disk-1.subvol"),
        ("store:vztmpl/debian-12.tar.zst", "/mnt/pve/store/template/cache/debian-12.tar.zst"),
        ("store:backup/vzdump-qemu-100-x.vma.zst", "/mnt/pve/store/dump/vzdump-qemu-100-x.vma.zst"),
        ("store:snippets/user.yaml", "/mnt/pve/store/snippets/user.yaml"),
        ("store:import/x.vmdk", "/mnt/pve/store/import/x.vmdk"),
        ("bt:100/vm-100-disk-0.raw", "/mnt/bt/images/100/vm-100-disk-0/disk.raw"),
        ("bt:100/vm-100-disk-0.qcow2", "/mnt/bt/images/100/vm-100-disk-0.qcow2"),
        ("odd:100/vm-100-disk-0.raw", "/odd/disks/100/vm-100-disk-0.raw"),
        ("odd:iso/a.iso", "/odd/cds/a.iso"),
        ("local-lvm:vm-110-disk-0", "/dev/pve/vm-110-disk-0"),
        ("thick:vm-110-disk-0.qcow2", "/dev/vg0/vm-110-disk-0.qcow2"),
        ("tank:vm-110-disk-1", "/dev/zvol/rpool/data/vm-110-disk-1"),
        ("tank:base-9-disk-0/vm-110-disk-1", "/dev/zvol/rpool/data/vm-110-disk-1"),
        ("tank:subvol-300-disk-0", "/rpool/data/subvol-300-disk-0"),
        ("/dev/sdb", "/dev/sdb"),
        ("ceph:vm-110-disk-2", ""),
        ("nosuch:vm-1-disk-0", ""),
        ("store:cloudinit", ""),
        ("none", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_every_kind_of_storage_has_its_paths(volume: str, path: str) -> None:
    assert volumes.path(volume, STORAGES) == path


@pytest.mark.parametrize(
    "volume",
    [
        "store:100/../../../etc/shadow", "store:100/..", "store:100/.raw/../x.raw", "store:../100/x.raw",
        "store:100/a b.raw", "store:100/snap-x-vm-100-disk-0.qcow2", "store:iso/../x.iso", "store:iso/..",
        "store:snippets/..", "store:snippets/.", "store:101/base/102/vm.raw", "store:100/vm-100-disk-0.txt",
        "store:100//etc/x.raw", "store:/etc/x.raw", "local-lvm:../../etc/x", "tank:vm-1-disk-0/../../x",
        "store:\u0661/x.raw", "store:1/x.raw/2/../../y.raw",
    ],
)  # fmt: skip
def test_no_id_leads_out_of_its_storage(volume: str) -> None:
    assert volumes.path(volume, STORAGES) == ""


@given(st.text(max_size=40), st.sampled_from(sorted(STORAGES)))
def test_whatever_the_name_the_path_stays_in_its_storage(name: str, storage: str) -> None:
    found = volumes.path(f"{storage}:{name}", STORAGES)
    one = STORAGES[storage]
    above = one.path if one.is_folder else f"/dev/{one.group}" if one.type != "zfspool" else "/"
    assert not found or (found.startswith(above.rstrip("/") + "/") and ".." not in found.split("/"))


def test_what_a_listing_names_is_understood() -> None:
    for row in recorded()["volumes"]:
        found = volumes.parse(row["volid"], STORAGES["store"])
        assert found is not None
        assert (found.content, found.vmid, found.format) == ("images", row["vmid"], row["format"])
    linked = volumes.parse("store:101/base-101-disk-0.qcow2/102/vm-102-disk-0.qcow2", STORAGES["store"])
    assert linked == volumes.Volume(
        "store", "images", "vm-102-disk-0.qcow2", 102, "base-101-disk-0.qcow2", 101, "qcow2"
    )


def test_a_linked_clone_has_two_ids() -> None:
    linked, own = "store:101/base-101-disk-0.qcow2/102/vm-102-disk-0.qcow2", "store:102/vm-102-disk-0.qcow2"
    assert volumes.own_id(linked) == volumes.own_id(own) == own
    for volume in ("local-lvm:vm-1-disk-0", "/dev/sdb", "none", "store:iso/a.iso"):
        assert volumes.own_id(volume) == volume
