"""Headers written by strangers: facts or a refusal, quickly, in little memory, and never a file beside the image."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from storage_admin.agent.formats import Facts, UnreadableError, guess, read, read_as
from storage_admin.agent.formats.facts import Reader
from storage_admin.agent.formats.vpc import checksum
from tests.agent.formats.test_against_qemu import create, facts_of, qemu_img
from tests.agent.harness import held_open
from tests.chance import seed
from tests.harness.filesystems import new_file

pytestmark = pytest.mark.qemu

FORMATS = ("qcow2", "vmdk", "vdi", "vpc", "vhdx", "qed", "luks", "raw")
Edit = Callable[[bytearray], None]


def outcome(path: Path, declared: str | None = None) -> Facts | UnreadableError:
    try:
        return facts_of(path, declared)
    except UnreadableError as error:
        refusal = error
    assert len(refusal.args) == 1
    assert str(refusal)
    return refusal


def seeds(tmp_path: Path) -> list[Path]:
    """One image of each kind, small and with as much in its header as it can have."""
    create(tmp_path / "base.qcow2", "qcow2")
    create(
        tmp_path / "v3.qcow2", "qcow2", "compression_type=zstd,extended_l2=on", "8M", "-b", "base.qcow2", "-F", "qcow2"
    )
    create(tmp_path / "v2.qcow2", "qcow2", "compat=0.10,cluster_size=512")
    create(tmp_path / "data.qcow2", "qcow2", f"data_file={tmp_path}/outside,data_file_raw=on")
    for name in ("v3.qcow2", "v2.qcow2"):
        qemu_img("snapshot", "-c", "first", tmp_path / name)
        qemu_img("snapshot", "-c", "second", tmp_path / name)
    qemu_img("bitmap", "--add", tmp_path / "v3.qcow2", "daily")
    for number, options in enumerate(("", "subformat=streamOptimized", "subformat=twoGbMaxExtentFlat")):
        create(tmp_path / f"{number}.vmdk", "vmdk", options)
    create(tmp_path / "disk.vdi", "vdi")
    create(tmp_path / "dynamic.vhd", "vpc")
    create(tmp_path / "fixed.vhd", "vpc", "subformat=fixed", "100k")
    create(tmp_path / "disk.qed", "qed", "cluster_size=4k,table_size=2", "8M", "-b", "base.qcow2", "-F", "qcow2")
    return sorted(path for path in tmp_path.iterdir() if path.suffix in (".qcow2", ".vmdk", ".vdi", ".vhd", ".qed"))


def mutate(chance: random.Random, image: bytearray) -> None:
    """Bytes, fields and whole runs of the header, with a love for the values at the edges."""
    reach = min(len(image), chance.choice((128, 640, 2048, len(image))))
    for _ in range(chance.choice((1, 1, 2, 8))):
        width = chance.choice((1, 2, 4, 8))
        offset = chance.randrange(0, max(reach - width, 1)) // width * width
        edge = chance.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, chance.getrandbits(64)))
        order: Literal["big", "little"] = chance.choice(("big", "little"))
        image[offset : offset + width] = (edge % 2 ** (8 * width)).to_bytes(width, order)


@pytest.mark.fuzz
def test_mutated_headers_give_facts_or_a_refusal_and_nothing_else(tmp_path: Path) -> None:
    chance = random.Random(seed())
    refused = believed = 0
    slowest = 0.0
    for path in seeds(tmp_path):
        original, victim = path.read_bytes(), tmp_path / ("victim" + path.suffix)
        for _ in range(400):
            image = bytearray(original)
            mutate(chance, image)
            victim.write_bytes(image)
            started = time.thread_time()
            result = outcome(victim)
            slowest = max(slowest, time.thread_time() - started)
            refused += isinstance(result, UnreadableError)
            believed += isinstance(result, Facts)
    assert refused > 300
    assert believed > 300
    assert slowest < 0.5  # of processor time, on a busy machine as well; a bomb takes seconds


HEADERS = [
    ("v2.qcow2", 4, 112),
    ("v3.qcow2", 4, 112),
    ("0.vmdk", 4, 80),
    ("1.vmdk", 4, 80),
    ("disk.vdi", 64, 480),
    ("dynamic.vhd", 8, 64),
    ("disk.qed", 4, 64),
]


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "start", "end"), HEADERS)
def test_what_is_believed_of_a_mutated_header_is_what_qemu_believes(
    tmp_path: Path, name: str, start: int, end: int
) -> None:
    chance = random.Random(seed())
    seeds(tmp_path)
    original = (tmp_path / name).read_bytes()
    victim = tmp_path / ("victim" + Path(name).suffix)
    image_format = {".vhd": "vpc"}.get(victim.suffix, victim.suffix[1:])
    compared = 0
    for _ in range(60):
        image = bytearray(original)
        offset = chance.randrange(start, end)
        image[offset] = chance.choice((0, 1, image[offset] ^ 1 << chance.randrange(8), 255))
        if image_format == "vpc" and chance.randrange(8):
            struct.pack_into(">I", image, 64, checksum(bytes(image[:512])))
        victim.write_bytes(image)
        facts = outcome(victim, image_format)
        command = ["qemu-img", "info", "-f", image_format, "--output=json", str(victim)]
        done = subprocess.run(command, capture_output=True, cwd=tmp_path)
        if isinstance(facts, Facts) and done.returncode == 0:
            truth = json.loads(done.stdout.decode("utf-8", "replace"))
            assert facts.virtual_size == truth["virtual-size"], offset
            assert facts.cluster_size == truth.get("cluster-size"), offset
            assert (facts.backing_file or b"").decode("utf-8", "replace") == truth.get("backing-filename", ""), offset
            assert facts.encrypted == truth.get("encrypted", False), offset
            compared += 1
    assert compared > 10


def test_a_file_cut_at_any_length_gives_facts_or_a_refusal(tmp_path: Path) -> None:
    for path in seeds(tmp_path):
        original, victim = path.read_bytes(), tmp_path / ("cut" + path.suffix)
        lengths = [*range(0, min(len(original), 700), 7), *range(700, len(original), max(len(original) // 50, 1))]
        for length in lengths:
            victim.write_bytes(original[:length])
            for declared in (None, *FORMATS):
                outcome(victim, declared)


def test_a_qcow2_without_its_l1_table_is_unreadable(tmp_path: Path) -> None:
    create(tmp_path / "disk.qcow2", "qcow2")
    os.truncate(tmp_path / "disk.qcow2", 100_000)
    assert_unreadable(tmp_path / "disk.qcow2", "cut off")


def test_random_bytes_are_no_image_of_any_declared_format(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(random.Random(1).randbytes(200_000))
    for declared in FORMATS[:-1]:
        assert isinstance(outcome(tmp_path / "noise", declared), UnreadableError), declared


def field(layout: str, offset: int, value: int | bytes) -> Edit:
    return lambda image: struct.pack_into(layout, image, offset, value)


def edited(path: Path, edit: Edit, size: int = -1) -> Path:
    """An image of which all, or its first bytes, were changed."""
    with path.open("r+b") as file:
        image = bytearray(file.read(size))
        edit(image)
        file.seek(0)
        file.write(image)
    return path


def assert_unreadable(path: Path, sentence: str) -> None:
    with pytest.raises(UnreadableError, match=sentence):
        facts_of(path)


BOMBS: list[tuple[str, Edit, str]] = [
    ("unknown version", field(">I", 4, 4), "qcow2 version 4"),
    ("huge clusters", field(">I", 20, 22), "cluster size"),
    ("tiny clusters", field(">I", 20, 8), "cluster size"),
    ("2 EiB", field(">Q", 24, 2 << 60), "too small"),
    ("2^64 - 1 bytes", field(">Q", 24, 2**64 - 1), "too small"),
    ("unknown encryption", field(">I", 32, 3), "encryption method 3"),
    ("LUKS without its header", field(">I", 32, 2), "LUKS"),
    ("huge L1", field(">I", 36, 0xFFFFFFFF), "L1 table takes"),
    ("L1 not at a cluster", field(">Q", 40, 513), "L1 table is said"),
    ("L1 at the end of the world", field(">Q", 40, 0x7FFFFFFFFFFF0000), "L1 table is said|cut off"),
    ("huge refcount table", field(">I", 56, 0xFFFFFFFF), "refcount table takes"),
    ("no refcount table", field(">I", 56, 0), "no refcount table"),
    ("65,535 snapshots", field(">I", 60, 65535), "65535 internal snapshots"),
    ("2^32 - 1 snapshots", field(">I", 60, 0xFFFFFFFF), "internal snapshots"),
    ("snapshots at the end of the world", field(">Q", 64, 0x7FFFFFFFFFFF0000), "snapshot"),
    ("unknown incompatible bit", field(">Q", 72, 1 << 62), "incompatible features bit 62"),
    ("refcounts of 128 bits", field(">I", 96, 7), "refcounts"),
    ("short header", field(">I", 100, 72), "header length"),
    ("long header", field(">I", 100, 0x10000001), "header length"),
    ("unknown compression", field(">B", 104, 9), "compression type 9"),
    ("zlib with the zstd bit", field(">B", 104, 0), "contradicts"),
    ("backing name far away", field(">Q", 8, 1 << 40), "backing file's name"),
    ("backing name of 4 GiB", field(">I", 16, 0xFFFFFFFF), "backing file's name takes"),
    ("extension of 4 GiB", field(">I", 116, 0xFFFFFFFF), "reaches beyond"),
]


@pytest.mark.parametrize(("bomb", "edit", "sentence"), BOMBS, ids=[bomb for bomb, _, _ in BOMBS])
def test_a_field_beyond_its_bounds_is_named(tmp_path: Path, bomb: str, edit: Edit, sentence: str) -> None:
    seeds(tmp_path)
    assert_unreadable(edited(tmp_path / "v3.qcow2", edit), sentence)


def test_an_unknown_feature_is_called_by_its_name(tmp_path: Path) -> None:
    create(tmp_path / "disk.qcow2", "qcow2")
    image = bytearray((tmp_path / "disk.qcow2").read_bytes())
    image[72:80] = (1 << 44).to_bytes(8, "big")
    table = image.index(bytes.fromhex("6803f857")) + 8
    image[table : table + 48] = bytes([0, 44]) + b"quantum clusters".ljust(46, b"\0")
    (tmp_path / "disk.qcow2").write_bytes(image)
    assert_unreadable(tmp_path / "disk.qcow2", "quantum clusters")


def test_a_full_snapshot_table_is_read_in_little_time_and_memory(tmp_path: Path) -> None:
    create(tmp_path / "disk.qcow2", "qcow2")
    image = bytearray((tmp_path / "disk.qcow2").read_bytes())
    entry = struct.pack(">QIHHIIQII", 0, 0, 4, 1000, 0, 0, 0, 0, 1000) + bytes(1000) + b"1234" + b"n" * 1000
    image += bytes(-len(image) % 65536)
    struct.pack_into(">IQ", image, 60, 4096, len(image))
    (tmp_path / "disk.qcow2").write_bytes(image + (entry + bytes(-len(entry) % 8)) * 4096)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    assert_unreadable(tmp_path / "disk.qcow2", "beyond the bounds")
    assert time.thread_time() - started < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


def test_a_vmdk_descriptor_with_a_host_file_only_names_it(tmp_path: Path) -> None:
    canary = new_file(tmp_path / "shadow", "root:secret")
    before = canary.stat().st_atime_ns
    (tmp_path / "evil.vmdk").write_text(
        f'# Disk DescriptorFile\nversion=1\ncreateType="monolithicFlat"\nRW 20480 FLAT "{canary}" 0\n'
    )
    facts = facts_of(tmp_path / "evil.vmdk")
    assert facts.extents == (os.fsencode(canary),)
    assert facts.virtual_size == 20480 * 512
    assert canary.stat().st_atime_ns == before


def test_a_reader_does_not_go_beyond_what_it_was_told_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10_000))
    with held_open(tmp_path / "file") as fd:
        reader = Reader(fd, 5_000)
        with pytest.raises(UnreadableError, match="ends at byte 6000, the file at byte 5000"):
            reader.at(5_000, 1_000, "a table")
        with pytest.raises(UnreadableError, match="more than"):
            reader.at(0, 1 << 30, "a table")
        assert guess(reader, b"file") == "raw"
        assert read_as(reader, "raw") == read(fd, 5_000, b"file")
