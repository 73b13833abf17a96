"""Causes that a definition and an image tell, each by its name, and none where nothing is wrong."""

import pytest

from images.live import doctor
from images.models import Image
from storage_admin.hosts.live_facts import FSTRIM, AgentNow, DeviceNow, DiskNow, Filesystem, GuestNow, trimmed
from storage_admin.hosts.models import StoragePool

AGENT = AgentNow(configured=True, answers=True, commands=frozenset({FSTRIM}))
GOOD = {"target": "vda", "bus": "virtio", "chain": ("/pool/a",), "discard": "unmap", "detect_zeroes": "unmap"}


def image(filesystem: str = "ext4", **facts: object) -> Image:
    made = {"format": "qcow2", "cluster_size": 65536} | facts
    return Image(pool=StoragePool(filesystem=filesystem), **made)


def found(
    disk: dict[str, object], of: Image | None = None, agent: AgentNow = AGENT, machine: str = "pc-q35-7.2"
) -> set[str]:
    guest = GuestNow("running", machine, agent, (DiskNow(**GOOD | disk),))  # type: ignore[arg-type]
    return {cause.code for cause in doctor.causes(guest, {} if of is None else {"vda": of})}


def test_nothing_is_said_of_a_disk_that_frees_everything() -> None:
    assert found({}, image()) == set()
    assert found({"granularity": 65536}, image()) == set()
    assert found({"bus": "sata"}, image(), machine="pc-i440fx-2.9") == set()


@pytest.mark.parametrize(
    ("disk", "code"),
    [
        ({"discard": "ignore"}, "discard_ignored"),
        ({"discard": ""}, "discard_ignored"),
        ({"detect_zeroes": "on"}, "zeroes_kept"),
        ({"detect_zeroes": ""}, "zeroes_kept"),
        ({"keeps_clusters": True}, "clusters_kept"),
        ({"bus": "usb"}, "bus_without_discard"),
        ({"bus": "fdc"}, "bus_without_discard"),
        ({"chain": ("/pool/a", "/pool/b")}, "held_by_base"),
        ({"granularity": 131072}, "coarse_granularity"),
    ],
)
def test_a_definition_tells(disk: dict[str, object], code: str) -> None:
    assert found(disk, image()) == {code}


@pytest.mark.parametrize(
    ("of", "code"),
    [
        (image(snapshots=[{"name": "before"}]), "held_by_snapshot"),
        (image(cluster_size=1 << 21), "large_clusters"),
        (image("nfs 3"), "nfs_without_holes"),
        (image("nfs 4.1"), "nfs_without_holes"),
        (image("vfat"), "filesystem_without_holes"),
    ],
)
def test_an_image_tells(of: Image, code: str) -> None:
    assert found({}, of) == {code}


@pytest.mark.parametrize("filesystem", ["nfs 4.2", "nfs4", "xfs", "zfs", "btrfs", "cifs"])
def test_nothing_is_said_of_storages_that_can_free_or_are_not_known(filesystem: str) -> None:
    assert found({}, image(filesystem)) == set()


@pytest.mark.parametrize(
    ("agent", "code"),
    [
        (AgentNow(), "no_agent"),
        (AgentNow(configured=True, answers=False, said="it is not connected"), "agent_silent"),
        (AgentNow(configured=True, answers=True, commands=frozenset({"guest-ping"})), "agent_cannot_trim"),
    ],
)
def test_an_agent_tells(agent: AgentNow, code: str) -> None:
    assert found({}, image(), agent) == {code}
    assert found({}, image(), AgentNow(configured=True)) == set(), "of one that was not asked nothing is known"


@pytest.mark.parametrize(
    ("machine", "passes"),
    [
        ("pc-q35-3.1", False),
        ("pc-i440fx-2.12", False),
        ("pc-q35-4.0", True),
        ("q35", True),
        ("pc-i440fx-rhel7.6.0", False),
        ("pc-q35-rhel8.0.0", False),
        ("pc-q35-rhel8.1.0", True),
        ("pc-i440fx-bionic", False),
        ("pc-q35-disco-hpb", False),
        ("pc-q35-focal", True),
    ],
)
def test_virtio_disks_pass_discards_since_machine_type_4(machine: str, passes: bool) -> None:
    assert found({}, image(), machine=machine) == (set() if passes else {"bus_without_discard"})
    assert found({"bus": "scsi"}, image(), machine=machine) == set()


@pytest.mark.parametrize(
    ("device", "codes"),
    [
        (DeviceNow("thin", discards=True, passes_on=True), set()),
        (DeviceNow("thin", discards=True, passes_on=False), {"thin_pool_keeps"}),
        (DeviceNow("thin", discards=False, passes_on=False), {"device_without_discard"}),
        (DeviceNow("linear", discards=True), {"thick_volume"}),
        (DeviceNow("", discards=False), {"device_without_discard"}),
        (DeviceNow("", discards=True), set()),
        (DeviceNow(), set()),
    ],
)
def test_what_lies_below_a_device_tells(device: DeviceNow, codes: set[str]) -> None:
    guest = GuestNow("running", "", AGENT, (DiskNow(**GOOD | {"kind": "block", "chain": ("/dev/vg/lv",)}),))  # type: ignore[arg-type]
    assert {cause.code for cause in doctor.causes(guest, {}, {"vda": device})} == codes


@pytest.mark.parametrize(
    ("disks", "codes"), [((("vda",),), set()), ((("vdb",),), {"not_mounted"}), ((("vdb",), ()), set()), ((), set())]
)
def test_a_disk_without_a_mounted_filesystem_is_told_where_all_are_known(
    disks: tuple[tuple[str, ...], ...], codes: set[str]
) -> None:
    mounted = tuple(Filesystem(f"/{number}", disks=targets) for number, targets in enumerate(disks))
    guest = GuestNow("running", "", AGENT, (DiskNow(**GOOD),), mounted)  # type: ignore[arg-type]
    assert {cause.code for cause in doctor.causes(guest, {"vda": image()})} == codes


def test_what_a_hostile_agent_tells_is_kept_short() -> None:
    told = trimmed([{"path": "/" * 10**6, "trimmed": "much", "error": 7}, "x", *({"path": "/"} for _ in range(10**4))])
    assert (len(told) < 201, len(told[0].path), told[0].trimmed_bytes, told[0].error) == (True, 1000, None, "7")
    for other in (None, "x", {"path": "/"}, 7):
        with pytest.raises(ValueError, match=r"."):
            trimmed(other)
