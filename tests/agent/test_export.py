"""An image packed for elsewhere: what is in the file, or in its parts, is the image; an OVA can be imported."""

import gzip
import hashlib
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.formats import ova
from storage_admin.agent.rewrite.exporting import room
from tests.agent.harness import (
    ask,
    at_ready,
    image_info,
    leftovers,
    location,
    make_image,
    qemu_img,
    qemu_io,
    rewrite_args,
)
from tests.agent.test_reclaim_refusals import encrypted
from tests.agent.test_unpack import MIB, args_for, image
from tests.harness.filesystems import new_file
from tests.working import create

pytestmark = pytest.mark.qemu


def export_args(path: Path, name: str, packing: str, *ancestors: Path, **more: Any) -> dict[str, Any]:
    return rewrite_args(path, *ancestors, target=location(path.parent / name, path.parent), packing=packing, **more)


def unpacked(path: Path, tool: str = "") -> bytes:
    """What is in a file, or in its parts."""
    tool = tool or {"gz": "gzip", "zst": "zstd"}[path.name.partition(".qcow2.")[2].partition(".")[0]]
    parts = sorted(path.parent.glob(f"{path.name.removesuffix('.001')}*")) if path.suffix == ".001" else [path]
    packed = b"".join(part.read_bytes() for part in parts)
    return subprocess.run([tool, "-dc"], input=packed, capture_output=True, check=True).stdout


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_packed_file_holds_the_image_byte_for_byte(pool: Path, ending: str) -> None:
    path = image(pool)
    before = path.read_bytes()
    made = pool / f"disk.qcow2.{ending}"
    result = ask("export", export_args(path, made.name, {"gz": "gzip", "zst": "zstd"}[ending]))
    assert result.get("parts") == 1, result
    assert unpacked(made) == before == path.read_bytes()
    assert (result["sha256"], result["content_sha256"]) == (
        hashlib.sha256(made.read_bytes()).hexdigest(), hashlib.sha256(before).hexdigest(),
    )  # fmt: skip
    status = made.stat()
    assert (result["after_bytes"], result["file_size"]) == (status.st_blocks * 512, status.st_size)
    assert (status.st_mode, status.st_uid) == (path.stat().st_mode, path.stat().st_uid)
    assert leftovers(pool) == set()


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_parts_have_the_size_that_was_asked_for_and_come_back_as_one_image(pool: Path, ending: str) -> None:
    path = make_image(pool / "disk.qcow2", "16M")
    fill(path, 5 * MIB)
    before = path.read_bytes()
    first = pool / f"disk.qcow2.{ending}.001"
    packing = {"gz": "gzip", "zst": "zstd"}[ending]
    result = ask("export", export_args(path, first.name, packing, part_bytes=2 * MIB))
    sizes = [part.stat().st_size for part in sorted(pool.glob(f"disk.qcow2.{ending}.*"))]
    assert result.get("parts") == len(sizes) == 3, result
    assert (sizes[:2], result["file_size"]) == ([2 * MIB, 2 * MIB], sum(sizes))
    assert unpacked(first) == before
    digest = hashlib.sha256(b"".join(part.read_bytes() for part in sorted(pool.glob("*.0*")))).hexdigest()
    assert result["sha256"] == digest
    back = ask("unpack", args_for(first, sha256=digest))
    assert (back.get("parts"), back.get("packed")) == (3, packing), back
    assert (pool / "new.qcow2").read_bytes() == before


@pytest.mark.parametrize("number", ["003", "777"])
def test_where_a_part_of_that_name_is_there_nothing_is_packed(pool: Path, number: str) -> None:
    path = make_image(pool / "disk.qcow2", "16M")
    fill(path, 5 * MIB)
    (pool / f"disk.qcow2.gz.{number}").write_bytes(b"somebody's")
    before = {one.name for one in pool.iterdir()}
    answer = ask("export", export_args(path, "disk.qcow2.gz.001", "gzip", part_bytes=2 * MIB))
    assert answer["code"] == "target_exists", answer
    assert {one.name for one in pool.iterdir()} == before
    assert (pool / f"disk.qcow2.gz.{number}").read_bytes() == b"somebody's"


@pytest.mark.parametrize("when", ["before its name", "its name"])
def test_a_part_that_somebody_exchanges_is_found_before_the_first_one_is_there(pool: Path, when: str) -> None:
    path = make_image(pool / "disk.qcow2", "16M")
    fill(path, 5 * MIB)
    with at_ready("export", export_args(path, "disk.qcow2.gz.001", "gzip", part_bytes=2 * MIB)) as agent:
        theirs = pool / (".sa-j1.002" if when == "before its name" else "disk.qcow2.gz.002")
        theirs.unlink(missing_ok=True)
        theirs.write_bytes(b"somebody's")
        assert agent.go()["code"] in {"tool_failed", "target_exists"}
    assert theirs.read_bytes() == b"somebody's"
    assert {one.name for one in pool.iterdir()} <= {path.name, theirs.name}


def test_an_archive_of_a_large_disk_takes_neither_memory_nor_space_for_its_tables(pool: Path, tmp_path: Path) -> None:
    path = create(pool / "large.qcow2", "2T")
    command = [sys.executable, "-m", "tests.agent.measured_agent", str(tmp_path / "peak")]
    result = ask("export", export_args(path, "large.ova", "ova"), command=command)
    assert result.get("packing") == "ova", result
    status = (pool / "large.ova").stat()
    assert status.st_size > 250 * MIB
    assert max(map(int, (tmp_path / "peak").read_text().split())) < 200 * MIB, "the agent, and its largest tool"
    assert result["after_bytes"] == status.st_blocks * 512 < room("ova", 0, path.stat().st_size, 2 << 40)


def test_what_cannot_be_packed_takes_no_more_than_was_claimed(pool: Path) -> None:
    path = new_file(pool / "noise.raw", os.urandom(24 * MIB))
    for packing, ending in (("ova", "ova"), ("gzip", "raw.gz"), ("zstd", "raw.zst")):
        result = ask("export", export_args(path, f"noise.{ending}", packing, format="raw"), job=packing)
        assert 24 * MIB < result["after_bytes"] <= room(packing, 24 * MIB, 24 * MIB, 24 * MIB), result
    empty = new_file(pool / "empty.raw")
    assert ask("export", export_args(empty, "empty.ova", "ova", format="raw"))["code"] == "unsupported_subformat"


def test_an_archive_holds_the_whole_chain_as_one_disk_that_can_be_imported(pool: Path) -> None:
    base = image(pool)
    path = create(pool / "overlay.qcow2", base=base)
    qemu_io(path, "write -P 0x77 3M 1M")
    guest = {"name": "Büro <1> & Söhne", "cpus": 3, "memory_bytes": 768 * MIB}
    args = export_args(path, "vm.ova", "ova", base, guest=guest)
    result = ask("export", args)
    assert result.get("packing") == "ova", result
    made = pool / "vm.ova"
    assert result["sha256"] == hashlib.sha256(made.read_bytes()).hexdigest()
    with tarfile.open(made) as tar:
        members = {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]
    assert list(members) == ["B-ro-1-S-hne.ovf", "B-ro-1-S-hne.mf", "B-ro-1-S-hne-disk1.vmdk"]
    descriptor, manifest, disk = members.values()
    told = dict(line.split(")= ") for line in manifest.decode().replace("SHA256(", "").splitlines())
    assert told == {name: hashlib.sha256(members[name]).hexdigest() for name in list(members)[::2]}
    assert _hardware(descriptor) == {"3": "3", "4": "768", "17": None, "6": None}
    alone = new_file(pool.parent / "alone.vmdk", disk)
    info = image_info(alone, "vmdk")
    assert (info["format-specific"]["data"]["create-type"], info["virtual-size"]) == ("streamOptimized", 16 * MIB)
    qemu_img("compare", "-f", "qcow2", "-F", "vmdk", path, alone)
    back = ask("unpack", args_for(made))
    assert back.get("virtual_size") == 16 * MIB, back
    qemu_img("compare", path, pool / "new.qcow2")


def _hardware(descriptor: bytes) -> dict[str, str | None]:
    rasd = "{http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData}"
    envelope = "{http://schemas.dmtf.org/ovf/envelope/1}"
    found = {}
    for item in ET.fromstring(descriptor).iter(f"{envelope}Item"):
        names = [one.tag.removeprefix(rasd) for one in item]
        assert names == sorted(names), "the schema has them in this order"
        found[str(item.findtext(f"{rasd}ResourceType"))] = item.findtext(f"{rasd}VirtualQuantity")
    return found


def test_an_overlay_is_not_packed_without_its_base_and_an_encrypted_image_only_as_it_is(pool: Path) -> None:
    base = image(pool)
    path = create(pool / "overlay.qcow2", base=base)
    answer = ask("export", export_args(path, "overlay.qcow2.gz", "gzip", base))
    assert answer["code"] == "unsupported_subformat", answer
    locked = encrypted(pool / "locked.qcow2")
    assert ask("export", export_args(locked, "locked.ova", "ova"))["code"] == "encrypted"
    assert ask("export", export_args(locked, "locked.qcow2.gz", "gzip")).get("parts") == 1
    assert gzip.decompress((pool / "locked.qcow2.gz").read_bytes()) == locked.read_bytes()
    assert leftovers(pool) == set()


@pytest.mark.parametrize(
    ("name", "packing", "more"),
    [
        ("a.gz", "gzip", {"part_bytes": 2 * MIB}), ("a.gz.001", "gzip", {"part_bytes": 1000}),
        ("a.ova.001", "ova", {"part_bytes": 2 * MIB}), ("a.7z", "7z", {}), (".sa-j9.new", "gzip", {}),
        ("../a.gz", "gzip", {}),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_request_is_refused(pool: Path, name: str, packing: str, more: dict[str, Any]) -> None:
    path = image(pool)
    assert ask("export", export_args(path, name, packing, **more))["code"] in {"invalid", "outside_pool"}
    assert {one.name for one in pool.iterdir()} == {path.name}


def test_a_size_beyond_what_octal_digits_say_is_said_in_binary() -> None:
    appliance = ova.Appliance("vm", 1, MIB, 1 << 40)
    for size in (1000, (1 << 33) - 1, 1 << 33, 5 << 40):
        front = appliance.front(size, "0" * 64)
        assert len(front) == ova.DISK
        assert tarfile.TarInfo.frombuf(front[-512:], "utf-8", "strict").size == size


def fill(path: Path, length: int) -> None:
    """Random bytes, which cannot be packed."""
    content = new_file(path.parent.parent / "random", os.urandom(length))
    qemu_io(path, f"write -q -s {content} 0 {length}")
