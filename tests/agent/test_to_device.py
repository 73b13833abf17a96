"""An image is written onto a block device that nobody uses; the image is only read."""

import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.protocol import b64
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import DeviceNode, Node
from tests.agent.harness import AGENT, Writer, ask, at_ready, leftovers, make_image, qemu_img, rewrite_args, write
from tests.agent.recording import RecordingIO
from tests.agent.test_from_device import MIB, behind, device
from tests.harness.filesystems import loop_device, swap_area
from tests.working import create

__all__ = ["behind", "device"]

pytestmark = pytest.mark.qemu


def args_for(image: Path, device: Path, *ancestors: Path, **more: Any) -> dict[str, Any]:
    return rewrite_args(image, *ancestors, device_b64=b64(os.fsencode(device)), **more)


@pytest.fixture
def image(pool: Path) -> Path:
    path = make_image(pool / "disk.qcow2", "40M")
    write(path, 0x42, "1M", "3M")
    write(path, 0x43, "39M", "1M")
    return path


@pytest.mark.parametrize("form", ["qcow2", "raw", "vdi"])
def test_the_device_reads_as_the_image_and_keeps_what_lies_behind_it(
    pool: Path, image: Path, behind: Path, device: Path, form: str
) -> None:
    source = pool / f"source.{form}"
    qemu_img("convert", "-O", form, image, source)
    tail = behind.read_bytes()[40 * MIB :]
    result = ask("to_device", args_for(source, device, format=form))
    assert (result.get("virtual_size"), result.get("device_bytes")) == (40 * MIB, behind.stat().st_size), result
    qemu_img("convert", "-O", "raw", image, pool / "expected.raw")
    written = behind.read_bytes()
    assert written[: 40 * MIB] == (pool / "expected.raw").read_bytes()
    assert written[40 * MIB :] == tail
    assert leftovers(pool) == set()


def test_zeros_are_written_over_what_was_there_and_a_chain_is_one_disk(
    pool: Path, image: Path, behind: Path, device: Path
) -> None:
    top = create(pool / "top.qcow2", base=image)
    write(top, 0x77, "20M", "1M")
    assert "code" not in ask("to_device", args_for(top, device, image))
    written = behind.read_bytes()
    qemu_img("convert", "-O", "raw", top, pool / "expected.raw")
    assert written[: 40 * MIB] == (pool / "expected.raw").read_bytes()
    assert (written[20 * MIB : 21 * MIB], written[21 * MIB : 22 * MIB]) == (b"\x77" * MIB, bytes(MIB))


def test_what_is_told_as_written_has_reached_the_device(pool: Path, behind: Path, device: Path) -> None:
    """Else nobody would see in time that a thin pool below it fills up."""
    disk, size = pool / "disk.raw", behind.stat().st_size // MIB * MIB
    disk.write_bytes(os.urandom(size))
    os.truncate(behind, 0)
    os.truncate(behind, size)
    told = list[tuple[float, int]]()

    def tell(share: float) -> None:
        told.append((share * size, behind.stat().st_blocks * 512))

    with disk.open("rb") as image, device.open("r+b") as target:
        nodes = Node(image.fileno(), "raw", bytes(disk)), DeviceNode(target.fileno(), "raw", bytes(device), None, size)
        img.fill(RecordingIO(), *nodes, img.Effort(progress=tell), zeroed=True, bandwidth=32 * MIB)
    assert len(told) > 2
    assert [one for one in told if one[0] > one[1] + 20 * MIB] == []  # eight pieces are on their way


@pytest.mark.parametrize("what", ["ext4", "a partition table", "a LUKS volume"])
def test_a_device_that_holds_something_is_only_overwritten_where_that_is_asked_for(
    image: Path, behind: Path, device: Path, what: str
) -> None:
    device.write_bytes(bytes(behind.stat().st_size))
    if what == "ext4":
        subprocess.run(["mkfs.ext4", "-q", "-F", device], check=True)
    elif what == "a partition table":
        subprocess.run(["sfdisk", "-q", device], input=b"label: gpt\n,\n", check=True, capture_output=True)
    else:
        secret = ("--object", "secret,id=s,data=abc", "-o", "key-secret=s,iter-time=10")
        qemu_img("create", "-q", "-f", "luks", *secret, behind.parent / "luks", "4M")
        with device.open("r+b") as file:
            file.write((behind.parent / "luks").read_bytes())
    before = behind.read_bytes()
    answer = ask("to_device", args_for(image, device))
    assert answer.get("code") == "target_exists", answer
    assert {"ext4": "ext4", "a partition table": "gpt", "a LUKS volume": "LUKS"}[what] in answer["detail"]
    assert behind.read_bytes() == before
    assert ask("to_device", args_for(image, device, overwrite=True)).get("virtual_size") == 40 * MIB
    assert behind.read_bytes()[MIB : 4 * MIB] == b"\x42" * (3 * MIB)


#: Where their tools write what they know a part by (DRBD: the last 4 KiB, version 8 and later), and that.
MARKS = {
    "Ceph": (0, b"bluestore block device\n60a1b2c3-0000-4000-8000-000000000000\n"),
    "DRBD": (-4096, struct.pack(">Q52xI", 81920, 0x8374026B)),
    "VMware": (1 << 20, b"\x0d\xd0\x01\xc0"),
    "firmware": (-1024, b"Intel Raid ISM Cfg Sig. 1.3.00"),
}


def make_member(device: Path, what: str, locks: Path) -> None:
    """A part of a group, or of a cluster, of which nothing is active; LVM's locks are in a folder of their own."""
    if what.startswith("LVM"):
        only = f'devices{{filter=["a|^{device}$|","r|.*|"] use_devicesfile=0}} global{{locking_dir="{locks}"}}'
        subprocess.run(["pvcreate", "-q", "-y", "-Z", "n", "--config", only, device], check=True, capture_output=True)
    else:
        at, words = MARKS[what.partition(" ")[0]]
        with device.open("r+b") as file:
            file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
            file.write(words)


@pytest.mark.parametrize("what", ["LVM", "LVM beside ext4", "Ceph behind a partition table", *MARKS])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_part_of_a_group_or_a_cluster_is_not_overwritten_though_nothing_on_it_is_active(
    image: Path, behind: Path, device: Path, what: str, overwrite: bool
) -> None:
    device.write_bytes(bytes(behind.stat().st_size))
    if "ext4" in what:
        subprocess.run(["mkfs.ext4", "-q", "-F", device], check=True)
    if "partition" in what:
        subprocess.run(["sfdisk", "-q", device], input=b"label: gpt\n,\n", check=True, capture_output=True)
    make_member(device, what, image.parent)
    before = behind.read_bytes()
    answer = ask("to_device", args_for(image, device, overwrite=overwrite))
    assert answer.get("code") == "device_in_use", answer
    assert "wipefs" in answer["detail"]
    assert behind.read_bytes() == before
    subprocess.run(["wipefs", "-a", "-q", device], check=True)
    assert ask("to_device", args_for(image, device, overwrite=True)).get("virtual_size") == 40 * MIB


@pytest.mark.parametrize("how", ["swap", "open", "too small", "no device", "image in use", "stale"])
def test_what_stands_against_it_leaves_the_device_alone(
    pool: Path, image: Path, behind: Path, device: Path, how: str
) -> None:
    args, code = args_for(image, device), "device_in_use"
    with ExitStack() as stack:
        if how == "swap":
            stack.enter_context(swap_area(device))
        elif how == "open":
            stack.enter_context(device.open("rb"))
        elif how == "too small":
            qemu_img("resize", "-q", image, "100M")
            args, code = args_for(image, device), "not_enough_space"
        elif how == "no device":
            args, code = args_for(image, pool / "disk.qcow2"), "invalid"
        elif how == "image in use":
            stack.enter_context(Writer(image))
            code = "image_in_use"
        else:
            write(image, 0x01, "0", "64k")
            code = "stale_plan"
        before = behind.read_bytes()
        answer = ask("to_device", args)
    assert answer.get("code") == code, answer
    assert behind.read_bytes() == before


def test_nothing_is_written_before_the_controller_says_go(image: Path, behind: Path, device: Path) -> None:
    before = behind.read_bytes()
    with at_ready("to_device", args_for(image, device)) as agent:
        assert behind.read_bytes() == before
        agent.say(protocol.GO, generation=2)
        assert agent.answer()["code"] == protocol.NO_GO
    assert behind.read_bytes() == before


@pytest.fixture
def partition(device: Path) -> Iterator[Path]:
    """A partition of the device."""
    part = Path(f"{device}p1")
    subprocess.run(["addpart", device, "1", "2048", "40960"], check=True)
    try:
        number = Path(f"/sys/class/block/{part.name}/dev").read_text().split(":")
        if not part.exists():
            subprocess.run(["mknod", part, "b", *(one.strip() for one in number)], check=True)
        yield part
    finally:
        subprocess.run(["delpart", device, "1"], check=True)
        part.unlink(missing_ok=True)


def test_who_has_a_part_of_it_open_has_all_of_it(image: Path, behind: Path, device: Path, partition: Path) -> None:
    before = behind.read_bytes()
    with partition.open("rb"):
        assert ask("to_device", args_for(image, device, overwrite=True))["code"] == "device_in_use"
    small = create(image.with_name("small.qcow2"), "1M")
    with device.open("rb"):
        assert ask("to_device", args_for(small, partition, overwrite=True))["code"] == "device_in_use"
    assert behind.read_bytes() == before
    assert ask("to_device", args_for(small, partition, overwrite=True), job="j2").get("virtual_size") == MIB


def test_who_has_a_part_of_it_behind_a_loop_device_has_all_of_it(
    image: Path, behind: Path, device: Path, partition: Path
) -> None:
    small, before = create(image.with_name("small.qcow2"), "1M"), behind.read_bytes()
    with loop_device(partition):
        assert ask("to_device", args_for(image, device, overwrite=True))["code"] == "device_in_use"
        assert ask("to_device", args_for(small, partition, overwrite=True))["code"] == "device_in_use"
    with loop_device(device):
        assert ask("to_device", args_for(small, partition, overwrite=True))["code"] == "device_in_use"
    assert behind.read_bytes() == before


def test_a_device_is_left_alone_where_nobody_may_see_who_has_it_open(image: Path, behind: Path, device: Path) -> None:
    before, blind = behind.read_bytes(), ["setpriv", "--bounding-set=-sys_ptrace", *AGENT]
    somebody = ["setpriv", "--reuid=65534", "--clear-groups", "sleep", "60"]
    with device.open("rb") as file, subprocess.Popen(somebody, stdin=file) as other:
        file.close()
        assert ask("to_device", args_for(image, device, overwrite=True))["code"] == "device_in_use"
        assert ask("to_device", args_for(image, device, overwrite=True), command=blind)["code"] == "guests_unknown"
        other.kill()
    assert behind.read_bytes() == before


@pytest.mark.parametrize("what", ["LVM", "Ceph"])
def test_a_disk_is_not_overwritten_where_a_partition_is_a_part_of_a_group_or_a_cluster(
    image: Path, behind: Path, device: Path, partition: Path, what: str
) -> None:
    make_member(partition, what, image.parent)
    before = behind.read_bytes()
    answer = ask("to_device", args_for(image, device, overwrite=True))
    assert answer.get("code") == "device_in_use", answer
    assert f"wipefs -a {partition}" in answer["detail"]
    assert behind.read_bytes() == before
    subprocess.run(["wipefs", "-a", "-q", partition], check=True)
    assert ask("to_device", args_for(image, device, overwrite=True)).get("virtual_size") == 40 * MIB


def test_a_device_that_is_somebodys_under_another_name_is_refused(image: Path, behind: Path, device: Path) -> None:
    before, alias = behind.read_bytes(), Path(f"/dev/sa-alias-{os.getpid()}")
    number = device.stat().st_rdev
    subprocess.run(["mknod", alias, "b", str(os.major(number)), str(os.minor(number))], check=True)
    try:
        owners = [[b64(b"/dev/nothing"), "guest a"], [b64(bytes(alias)), "guest b"]]
        answer = ask("to_device", args_for(image, device, overwrite=True, owners=owners))
    finally:
        alias.unlink()
    assert answer["code"] == "device_in_use", answer
    assert behind.read_bytes() == before


def test_who_opens_the_device_meanwhile_stops_it(image: Path, device: Path) -> None:
    with at_ready("to_device", args_for(image, device, overwrite=True, bandwidth_bytes_sec=2 * MIB)) as agent:
        agent.say(protocol.GO, generation=1)
        agent.until("progress", stage="copying")
        with device.open("rb"):
            assert agent.answer()["code"] == "device_in_use"


def test_who_only_looks_at_the_device_does_not_keep_it(image: Path, device: Path) -> None:
    with device.open("rb") as looker:
        threading.Timer(1, looker.close).start()
        assert ask("to_device", args_for(image, device, overwrite=True)).get("virtual_size") == 40 * MIB
