"""What is on a disk: partitions, LVM and how full filesystems are, compared with what their own tools say."""

import base64
import json
import random
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.measure import lvm, partitions
from tests.agent.harness import ask, overwrite, qemu_img, rewrite_args
from tests.agent.test_shrink import GPT, LOGICAL, MAKERS, MBR, as_format, disk, tampered
from tests.chance import seed
from tests.harness.filesystems import new_file

pytestmark = pytest.mark.qemu
MIB = 1 << 20
#: The beginning of a physical volume of 200 MiB as LVM 2.03.16 wrote it: group `guest` with the volumes `root` (whole),
#: `swap`, and `home`, which is in two pieces. Zeros are left out.
VOLUME = Path(__file__).parents[1] / "data" / "lvm" / "physical_volume.json"


def look(path: Path, form: str, *below: Path) -> dict[str, Any]:
    return ask("inside", rewrite_args(path, *below, format=form))


@pytest.mark.parametrize("form", ["qcow2", "raw"])
@pytest.mark.parametrize("layout", [GPT, MBR, LOGICAL], ids=["gpt", "mbr", "logical"])
def test_partitions_are_those_that_sfdisk_lists(pool: Path, layout: str, form: str) -> None:
    raw = disk(pool / "vm.raw", layout, 64 * MIB)
    told = json.loads(subprocess.run(["sfdisk", "--json", raw], capture_output=True, check=True).stdout)
    wanted = [(part["start"] * 512, part["size"] * 512) for part in told["partitiontable"]["partitions"]]
    found = look(as_format(raw, form), form)
    assert found["wrong"] == ""
    assert sorted((part["start"], part["size"]) for part in found["parts"]) == sorted(wanted)


@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs", "vfat"])
def test_a_filesystem_says_how_full_it_is(pool: Path, name: str) -> None:
    raw = disk(pool / "vm.raw", "", 320 * MIB)
    maker = [*MAKERS[name], "-F", "32"] if name == "vfat" else MAKERS[name]
    subprocess.run([*maker, raw], check=True, capture_output=True)
    (part,) = look(raw, "raw")["parts"]
    assert (part["number"], part["name"]) == (0, name)
    assert 300 * MIB < part["filesystem_bytes"] <= 320 * MIB
    assert 0.6 * part["filesystem_bytes"] < part["free_bytes"] <= part["filesystem_bytes"]
    if name == "ext4":
        said = subprocess.run(["dumpe2fs", "-h", raw], capture_output=True, text=True, check=True).stdout
        lines = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
        block = int(lines["Block size"])
        told = int(lines["Block count"]) * block, int(lines["Free blocks"]) * block
        assert (part["filesystem_bytes"], part["free_bytes"]) == told
    if name == "xfs":
        said = subprocess.run(["xfs_db", "-r", "-c", "sb 0", "-c", "p dblocks fdblocks blocksize", raw],
                              capture_output=True, text=True, check=True).stdout  # fmt: skip
        lines = dict(line.split(" = ") for line in said.splitlines())
        block = int(lines["blocksize"])
        told = int(lines["dblocks"]) * block, int(lines["fdblocks"]) * block
        assert (part["filesystem_bytes"], part["free_bytes"]) == told


def physical_volume() -> bytes:
    whole = bytearray(200 * MIB)
    for at, piece in json.loads(VOLUME.read_text())["pieces"].items():
        content = zlib.decompress(base64.b64decode(piece))
        whole[int(at) : int(at) + len(content)] = content
    return bytes(whole)


def test_logical_volumes_are_listed_and_looked_into_where_they_are_one_piece(pool: Path) -> None:
    raw = new_file(pool / "vm.raw", physical_volume())
    group = lvm.group(lambda at, size: physical_volume()[at : at + size], 0)
    assert group is not None
    (root,) = (volume for volume in group.volumes if volume.name == "root")
    filesystem = new_file(pool / "fs", bytes(root.size))
    subprocess.run(["mkfs.ext4", "-q", "-F", filesystem], check=True)
    overwrite(raw, root.start or 0, filesystem.read_bytes())
    filesystem.unlink()
    found = {part["volume"]: part for part in look(raw, "raw")["parts"]}
    assert {name: part["size"] // MIB for name, part in found.items()} == {
        "": 200, "guest/root": 64, "guest/swap": 16, "guest/home": 48,
    }  # fmt: skip
    assert (found[""]["name"], found["guest/root"]["name"]) == ("LVM2_member", "ext4")
    assert found["guest/root"]["filesystem_bytes"] == 64 * MIB
    assert found["guest/home"]["name"] is None


def test_an_overlay_shows_what_its_guest_would_read(pool: Path) -> None:
    base, path = as_format(disk(pool / "base.raw", GPT, 64 * MIB), "qcow2"), pool / "vm.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", path)
    assert look(path, "qcow2", base)["parts"] == look(base, "qcow2")["parts"] != []


def test_what_somebody_uses_is_not_looked_into(pool: Path) -> None:
    raw = disk(pool / "vm.raw", GPT, 64 * MIB)
    with raw.open("r+b"):
        assert look(raw, "raw")["code"] == "image_in_use"


@pytest.mark.parametrize(
    ("name", "value"),
    [("extent_size = 8192", 'extent_size = "xxxx"'), ("extent_count = 16", "extent_count = -1"),
     ("segment_count = 1", "segment_count = 9999999"), ("pe_start = 2048", "pe_start = []")],
)  # fmt: skip
def test_metadata_that_says_no_numbers_says_nothing(name: str, value: str) -> None:
    whole = physical_volume()[: 2 * MIB]
    changed = whole.replace(name.encode(), value.encode().ljust(len(name)))
    changed += bytes(len(whole) - min(len(changed), len(whole)))
    assert changed != whole
    assert lvm.group(lambda at, size: changed[at : at + size], 0) is None


def test_no_metadata_that_was_tampered_with_is_an_error() -> None:
    chosen, whole = seed(), physical_volume()[: 2 * MIB]
    chance = random.Random(chosen)
    for _ in range(3000):
        changed = {
            chance.choice((0, 512, 4096, 4608)) + chance.randrange(1024): chance.randrange(256)
            for _ in range(chance.randrange(1, 8))
        }
        read = tampered(whole, changed)
        there, group = partitions.filesystem(read, 0), lvm.group(read, 0)
        assert there is None or there.size is None or there.size >= 0, chosen
        for volume in group.volumes if group is not None else ():
            assert volume.size >= 0, (chosen, volume)
            assert volume.start is None or volume.start >= 0, (chosen, volume)
