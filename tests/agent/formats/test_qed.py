"""QED images: the same facts as ``qemu-img info``, and a refusal for headers beyond their bounds."""

from __future__ import annotations

import os
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.agent.formats.test_against_qemu import assert_same, create, facts_of, info, probed, qemu_img
from tests.agent.formats.test_hostile import Edit, assert_unreadable, edited, field
from tests.agent.harness import overwrite, qemu_io

pytestmark = pytest.mark.qemu

OPTIONS = [
    *(f"cluster_size={4096 << shift}" for shift in range(10)),
    *(f"table_size={2 << shift}" for shift in range(4)),
    "cluster_size=4k,table_size=2",
    "cluster_size=4M,table_size=2",
    "cluster_size=512k,table_size=16",
    *(f"preallocation={mode}" for mode in ("off", "falloc", "full")),
]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return create(tmp_path / "disk.qed", "qed")


@pytest.mark.parametrize("options", OPTIONS)
def test_reads_every_option_as_qemu_does(tmp_path: Path, options: str) -> None:
    path = create(tmp_path / "disk.qed", "qed", options)
    assert probed(path) == "qed"
    assert_same(path, "qed")


@pytest.mark.parametrize("size", ["0", "1", "511", "513", "1000001", "5G", "64T"])
def test_reads_every_virtual_size_as_qemu_does(tmp_path: Path, size: str) -> None:
    create(tmp_path / "disk.qed", "qed", "", size)
    assert_same(tmp_path / "disk.qed", "qed")


def test_reads_what_convert_made_and_what_was_written_to_since(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(os.urandom(300_000) + bytes(3_000_000) + os.urandom(50_001))
    path = tmp_path / "disk.qed"
    qemu_img("convert", "-f", "raw", "-O", "qed", tmp_path / "raw", path)
    before = assert_same(path, "qed")
    qemu_io(path, "write -P 7 1M 2M", form="qed")
    assert assert_same(path, "qed") == before


@pytest.mark.parametrize(("image_format", "told"), [("raw", "raw"), ("qcow2", None), ("qed", None)])
def test_reads_the_backing_file_and_says_its_format_only_where_it_is_raw(
    tmp_path: Path, image_format: str, told: str | None
) -> None:
    create(tmp_path / "base", image_format)
    create(tmp_path / "over.qed", "qed", "", "", "-b", "base", "-F", image_format)
    facts = assert_same(tmp_path / "over.qed", "qed")
    assert (facts.backing_file, facts.backing_format) == (b"base", told)


def test_reads_a_backing_name_as_long_as_a_path_can_be(disk: Path) -> None:
    name = b"/" + b"d" * 4094
    overwrite(disk, 0, struct.pack("<4sIIIQ", b"QED\0", 65536, 4, 1, 1))
    overwrite(disk, 56, struct.pack("<II", 64, len(name)) + name)
    assert facts_of(disk).backing_file == name


def test_an_image_that_was_not_closed_is_dirty_until_it_was_checked(disk: Path) -> None:
    command = ["qemu-io", "-f", "qed", "-c", "write -P 7 0 64k", "-c", "abort", str(disk)]
    assert subprocess.run(command, capture_output=True).returncode != 0
    # ``qemu-img info`` does not tell this flag of a QED image, whose header it leaves as it is.
    assert info(disk, "qed")["dirty-flag"] is False
    facts = facts_of(disk)
    assert facts.dirty is True
    qemu_img("check", "-q", "-f", "qed", "-r", "all", disk)
    assert assert_same(disk, "qed") == replace(facts, dirty=False)


@pytest.mark.parametrize(("cluster_size", "table_size"), [(4096, 1), (8 << 20, 2), (2 << 20, 16)])
def test_tables_that_qemu_makes_and_does_not_open_are_unreadable(
    disk: Path, cluster_size: int, table_size: int
) -> None:
    overwrite(disk, 0, struct.pack("<4sII", b"QED\0", cluster_size, table_size))
    overwrite(disk, 40, struct.pack("<Q", cluster_size))
    os.truncate(disk, 64 << 20)
    assert_unreadable(disk, "tables")
    assert subprocess.run(["qemu-img", "info", "-f", "qed", disk], capture_output=True).returncode == 1


def backing(offset: int, size: int) -> Edit:
    def edit(image: bytearray) -> None:
        struct.pack_into("<Q", image, 16, 1)
        struct.pack_into("<II", image, 56, offset, size)

    return edit


BOMBS: list[tuple[str, Edit, str]] = [
    ("unknown features", field("<Q", 16, 1 << 62 | 8), "features 0x4000000000000008"),
    ("clusters of 2 KiB", field("<I", 4, 2048), "cluster size of 2048"),
    ("clusters of 128 MiB", field("<I", 4, 1 << 27), "cluster size of 134217728"),
    ("clusters of no power of 2", field("<I", 4, 65536 + 512), "cluster size of 66048"),
    ("no tables", field("<I", 8, 0), "tables of 0 clusters"),
    ("tables of 3 clusters", field("<I", 8, 3), "tables of 3 clusters"),
    ("tables of 4 billion clusters", field("<I", 8, 0xFFFFFFFF), "tables of 4294967295 clusters"),
    ("no header", field("<I", 12, 0), "header of 0 clusters"),
    ("a header of 4 billion clusters", field("<I", 12, 0xFFFFFFFF), "header of 4294967295 clusters"),
    ("the table over the header", field("<Q", 40, 0), "L1 table is said to be at byte 0"),
    ("the table beside a cluster", field("<Q", 40, 65537), "L1 table is said to be at byte 65537"),
    ("the table at the end of the world", field("<Q", 40, (1 << 64) - 65536), "cut off: its L1 table"),
    ("half a sector", field("<Q", 48, 256), "virtual size of 256 bytes"),
    ("2^64 - 512 bytes", field("<Q", 48, (1 << 64) - 512), "virtual size of 18446744073709551104 bytes"),
    ("a name over the header", backing(0, 10), "name is said to be at byte 0"),
    ("a name behind the header", backing(65536, 10), "name is said to be at byte 65536"),
    ("a name of 4 GiB", backing(64, 0xFFFFFFFF), "name takes 4294967295 bytes"),
    ("a name with a NUL byte", backing(64, 10), "NUL byte"),
]


@pytest.mark.parametrize(("bomb", "edit", "sentence"), BOMBS, ids=[bomb for bomb, _, _ in BOMBS])
def test_a_field_beyond_its_bounds_is_named(disk: Path, bomb: str, edit: Edit, sentence: str) -> None:
    assert_unreadable(edited(disk, edit), sentence)


def test_a_file_without_its_table_is_unreadable(disk: Path) -> None:
    os.truncate(disk, 5 * 65536 - 1)
    assert_unreadable(disk, "cut off")
