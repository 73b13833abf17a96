"""The end of an image goes where its partition table and filesystems prove that it is unused, and nowhere else."""

import os
import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.measure import partitions
from storage_admin.agent.measure.partitions import UnprovenError
from tests.agent.harness import ask, image_info, leftovers, make_image, overwrite, qemu_img, rewrite_args, undo_args
from tests.agent.test_rebase import overlay
from tests.chance import night, seed
from tests.harness.filesystems import formatted, sparse_file

pytestmark = pytest.mark.qemu
MIB = 1 << 20

GPT = "label: gpt\nstart=2048, size=40960\nsize=20480, type=linux, name=data\n"
MBR = "label: dos\nstart=2048, size=40960, type=83\nstart=63488, size=20480, type=82\n"
LOGICAL = (
    "label: dos\nstart=2048, size=8192, type=83\nstart=12288, size=61440, type=5\nstart=14336, size=4096\nsize=8192\n"
)
#: The filesystems that say where they end, and how each is made on a file.
MAKERS = {
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "ext2": ["mkfs.ext2", "-q", "-F"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
    "ntfs": ["mkntfs", "-q", "-f", "-F"],
    "vfat": ["mkfs.vfat"],
    "swap": ["mkswap"],
}


def disk(path: Path, layout: str, size: int) -> Path:
    """A raw disk with that partition table and noise in all of it."""
    sparse_file(path, size)
    if layout:
        subprocess.run(["sfdisk", "-q", path], input=layout.encode(), check=True)
        filesystem = formatted(path.with_name("fs"), 4 * MIB, make=["-F"])
        overwrite(path, MIB, filesystem.read_bytes() + os.urandom(MIB // 2))
        filesystem.unlink()
    return path


def as_format(raw: Path, form: str) -> Path:
    if form == "raw":
        return raw
    path = raw.with_suffix(f".{form}")
    qemu_img("convert", "-f", "raw", "-O", form, raw, path)
    raw.unlink()
    return path


def args_for(path: Path, size: int | None, form: str) -> dict[str, Any]:
    return rewrite_args(path, format=form) | ({"size": size} if size is not None else {})


def content(path: Path, form: str) -> bytes:
    raw = path.parent.parent / "content"
    qemu_img("convert", "-f", form, "-O", "raw", path, raw)
    return raw.read_bytes()


def tables(path: Path, form: str) -> str:
    """What sfdisk says of the disk; it fails where a table is not right."""
    raw = path.parent.parent / "disk"
    qemu_img("convert", "-f", form, "-O", "raw", path, raw)
    said = subprocess.run(["sfdisk", "--verify", raw], check=True, capture_output=True, text=True)
    assert "corrupt" not in said.stderr.lower(), said.stderr
    dump = subprocess.run(["sfdisk", "--dump", raw], check=True, capture_output=True, text=True).stdout
    return "\n".join(line.split(" : ")[1] for line in dump.splitlines() if " : " in line)


@pytest.mark.parametrize("form", ["qcow2", "raw"])
@pytest.mark.parametrize("layout", [GPT, MBR, LOGICAL], ids=["gpt", "mbr", "logical"])
def test_what_is_behind_the_last_partition_goes_and_the_rest_stays(pool: Path, form: str, layout: str) -> None:
    path = as_format(disk(pool / "vm.raw", layout, 64 * MIB), form)
    before, parts = content(path, form), tables(path, form)
    result = ask("shrink", args_for(path, None, form))
    assert result.get("swapped"), result
    size = result["virtual_size"]
    assert 0 <= size - result["needed_bytes"] < MIB
    assert image_info(path, form)["virtual-size"] == size
    after, tables_end = content(path, form), 1024 if layout is GPT else 0
    end = size - (33 * 512 if tables_end else 0)
    assert after[tables_end:end] == before[tables_end:end]
    assert tables(path, form) == parts
    assert "code" not in ask("undo", undo_args(path), job="u1")
    assert content(path, form) == before
    assert leftovers(pool) == set()


@pytest.mark.parametrize("name", MAKERS)
def test_a_filesystem_on_the_whole_disk_says_where_it_ends(pool: Path, name: str) -> None:
    size = 320 * MIB
    raw = disk(pool / "vm.raw", "", size)
    subprocess.run([*MAKERS[name], raw], check=True, capture_output=True)
    os.truncate(raw, size + 64 * MIB)
    assert ask("shrink", args_for(raw, size - MIB, "raw"))["code"] == "end_in_use"
    result = ask("shrink", args_for(raw, None, "raw"))
    assert result.get("virtual_size") == size, result
    assert size - 64 * 1024 <= result["needed_bytes"] <= size


@pytest.mark.parametrize("layout", [GPT, MBR, LOGICAL], ids=["gpt", "mbr", "logical"])
def test_a_size_that_would_cut_a_partition_is_refused_to_the_sector(pool: Path, layout: str) -> None:
    path = as_format(disk(pool / "vm.raw", layout, 64 * MIB), "qcow2")
    before = path.read_bytes()
    least = ask("shrink", args_for(path, MIB, "qcow2"))
    assert least["code"] == "end_in_use"
    need = int(next(word for word in least["detail"].split() if word.isdigit()))
    assert ask("shrink", args_for(path, need - 512, "qcow2"))["code"] == "end_in_use"
    assert path.read_bytes() == before
    assert ask("shrink", args_for(path, need, "qcow2"))["virtual_size"] == need


def _half_a_gpt(raw: Path) -> None:
    overwrite(raw, 1024, b"\xff" * 16)


def _larger_inside(raw: Path) -> None:
    whole = raw.with_name("fs")
    formatted(whole, 40 * MIB, make=["-F"])
    overwrite(raw, MIB, whole.read_bytes()[: 2 * MIB])
    whole.unlink()


def _array(raw: Path) -> None:
    overwrite(raw, 64 * MIB - 64 * 1024, struct.pack("<I", 0xA92B4EFC))


def _stale_gpt(raw: Path) -> None:
    """Another table was made later, and the old one left."""
    table = b"label: dos\nstart=2048, size=122880, type=83\n"
    subprocess.run(["sfdisk", "-q", "--wipe", "never", raw], input=table, check=True)


def _hybrid(raw: Path) -> None:
    overwrite(raw, 446 + 16, struct.pack("<B3sB3sII", 0, bytes(3), 0x83, bytes(3), 65536, 60000))


def _whole_once(raw: Path) -> None:
    """What was a filesystem on the whole disk got a partition table."""
    overwrite(raw, 0, raw.read_bytes()[MIB:][:4096].ljust(MIB, b"\0"))
    _stale_gpt(raw)


def _luks_over_ext(raw: Path) -> None:
    overwrite(raw, 0, raw.read_bytes()[MIB:][:4096])
    overwrite(raw, 0, b"LUKS\xba\xbe\x00\x01")


def _large_sectors(raw: Path) -> None:
    """A table that counts in sectors of 4096 bytes, with a filesystem where that says."""
    filesystem = raw.read_bytes()[MIB : 5 * MIB]
    overwrite(raw, 0, bytes(6 * MIB))
    subprocess.run(["sfdisk", "-q", raw], input=b"label: dos\nstart=2048, size=4096, type=83\n", check=True)
    overwrite(raw, 8 * MIB, filesystem)


def _something_at_the_end(raw: Path) -> None:
    overwrite(raw, 64 * MIB - 512 * 1024, b"DRBD")


@pytest.mark.parametrize(
    "harm",
    [
        _half_a_gpt, _larger_inside, _array, _stale_gpt, _hybrid, _whole_once, _luks_over_ext, _large_sectors,
        _something_at_the_end,
    ],
)  # fmt: skip
def test_a_disk_that_makes_no_sense_is_left_alone(pool: Path, harm: Callable[[Path], None]) -> None:
    raw = disk(pool / "vm.raw", GPT, 64 * MIB)
    harm(raw)
    before = raw.read_bytes()
    code = "format_mismatch" if harm is _luks_over_ext else "end_in_use"
    assert ask("shrink", args_for(raw, None, "raw"))["code"] == code
    with pytest.raises(UnprovenError):
        partitions.needed(lambda at, size: before[at : at + size] if at >= 0 else b"", len(before))
    assert raw.read_bytes() == before


def test_without_a_proof_or_with_a_base_nothing_is_cut(pool: Path) -> None:
    blank, path = pool / "blank.qcow2", pool / "vm.qcow2"
    make_image(blank, "8M")
    assert ask("shrink", args_for(blank, MIB, "qcow2"))["code"] == "end_in_use"
    overlay(path, blank, "8M")
    assert ask("shrink", rewrite_args(path, blank, size=MIB))["code"] == "unsupported_subformat"


def tampered(whole: bytes, changed: dict[int, int]) -> Callable[[int, int], bytes]:
    """Reads of a disk, some of whose bytes are others."""

    def read(at: int, size: int) -> bytes:
        piece = bytearray(whole[at : at + size] if at >= 0 else b"")
        for place, byte in changed.items():
            if at <= place < at + len(piece):
                piece[place - at] = byte
        return bytes(piece)

    return read


def test_no_table_that_was_tampered_with_is_an_error_or_cuts_a_partition(tmp_path: Path) -> None:
    chance = random.Random(seed())
    whole = [disk(tmp_path / "disk.raw", layout, 64 * MIB).read_bytes() for layout in (GPT, MBR, LOGICAL)]
    for _ in range(3000 if night() else 1000):
        found, changed = chance.choice(whole), dict[int, int]()
        for _ in range(chance.randrange(1, 6)):
            changed[chance.choice((0, 446, 512, 1024, 12288 * 512)) + chance.randrange(512)] = chance.randrange(256)
        try:
            need, table = partitions.needed(tampered(found, changed), len(found))
        except UnprovenError:
            continue
        assert all(part.end <= need <= len(found) for part in table.partitions) or need > len(found)
