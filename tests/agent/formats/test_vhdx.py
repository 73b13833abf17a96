"""VHDX images: the same facts as ``qemu-img info``, and a refusal for headers that contradict their checksums."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
import subprocess
import time
from pathlib import Path
from uuid import UUID

import pytest

from storage_admin.agent.formats import Facts, UnreadableError
from storage_admin.agent.formats.crc32c import crc32c
from storage_admin.agent.formats.vhdx import checksum
from tests.agent.formats.test_against_qemu import assert_same, create, facts_of, probed, qemu_img
from tests.agent.formats.test_hostile import Edit, assert_unreadable, edited, field, mutate, outcome
from tests.agent.harness import overwrite, qemu_io
from tests.chance import seed

pytestmark = pytest.mark.qemu

KIB, MIB = 1 << 10, 1 << 20
HEADERS, REGIONS = (64 * KIB, 128 * KIB), 192 * KIB
METADATA = 3 * MIB
ITEMS = METADATA + 64 * KIB

OPTIONS = [
    "block_size=0",
    *(f"block_size={1 << shift}M" for shift in range(9)),
    *(f"log_size={size}M" for size in (1, 4, 16)),
    *(f"subformat={kind},block_state_zero={zero}" for kind in ("dynamic", "fixed") for zero in ("on", "off")),
    *(f"subformat=fixed,preallocation={mode}" for mode in ("off", "falloc", "full")),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_reads_every_option_as_qemu_does(tmp_path: Path, options: str) -> None:
    path = tmp_path / "disk.vhdx"
    create(path, "vhdx", options)
    assert probed(path) == "vhdx"
    assert assert_same(path, "vhdx").subformat == ("fixed" if "fixed" in options else "dynamic")


@pytest.mark.parametrize("size", ["0", "1", "511", "513", "1000001", "5G", "2T", "64T"])
def test_reads_every_virtual_size_as_qemu_does(tmp_path: Path, size: str) -> None:
    create(tmp_path / "disk.vhdx", "vhdx", "", size)
    assert_same(tmp_path / "disk.vhdx", "vhdx")


@pytest.mark.parametrize("subformat", ["dynamic", "fixed"])
def test_reads_what_convert_made_and_what_was_written_to_since(tmp_path: Path, subformat: str) -> None:
    (tmp_path / "raw").write_bytes(os.urandom(300_000) + bytes(3_000_000) + os.urandom(50_001))
    path = tmp_path / "disk.vhdx"
    qemu_img("convert", "-f", "raw", "-O", "vhdx", "-o", f"subformat={subformat}", tmp_path / "raw", path)
    before = assert_same(path, "vhdx")
    qemu_io(path, "write -P 7 1M 2M", form="vhdx")
    assert assert_same(path, "vhdx") == before


def signed(path: Path, edit: Edit) -> Path:
    """The same, and its checksums made to fit again."""
    return edited(edited(path, edit, 4 * MIB), sign, 4 * MIB)


def sign(image: bytearray) -> None:
    for offset, size in (*((header, 4 * KIB) for header in HEADERS), (REGIONS, 64 * KIB)):
        struct.pack_into("<I", image, offset + 4, checksum(bytes(image[offset : offset + size])))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return create(tmp_path / "disk.vhdx", "vhdx")


def log_in(header: int) -> Edit:
    """A log that is in use, told by the header with this number, which becomes the newer one."""

    def edit(image: bytearray) -> None:
        offset, other = HEADERS[header], HEADERS[1 - header]
        (sequence,) = struct.unpack_from("<Q", image, other + 8)
        struct.pack_into("<Q", image, offset + 8, sequence + 1)
        image[offset + 48 : offset + 64] = b"log " * 4

    return edit


@pytest.mark.parametrize("header", [0, 1])
def test_an_image_with_a_log_was_not_closed(disk: Path, header: int) -> None:
    assert not facts_of(disk).dirty
    facts = facts_of(signed(disk, log_in(header)))
    assert facts.dirty
    assert facts.virtual_size == 8 * MIB


@pytest.mark.parametrize("header", [0, 1])
def test_a_torn_header_leaves_the_older_one_to_hold(disk: Path, header: int) -> None:
    signed(disk, log_in(header))
    edited(disk, field("<B", HEADERS[header] + 200, 1), 4 * MIB)
    assert not facts_of(disk).dirty
    assert_same(disk, "vhdx")


def test_two_equal_headers_hold_as_one_does(disk: Path) -> None:
    """As Disk2vhd writes them."""

    def twins(image: bytearray) -> None:
        image[HEADERS[1] : HEADERS[1] + 4 * KIB] = image[HEADERS[0] : HEADERS[0] + 4 * KIB]

    assert_same(signed(disk, twins), "vhdx")


def both(layout: str, offset: int, value: int) -> Edit:
    def edit(image: bytearray) -> None:
        for header in HEADERS:
            struct.pack_into(layout, image, header + offset, value)

    return edit


def contradiction(image: bytearray) -> None:
    both("<Q", 8, 7)(image)
    image[HEADERS[1] + 16] ^= 1


def far_log(image: bytearray) -> None:
    log_in(1)(image)
    struct.pack_into("<Q", image, HEADERS[1] + 72, 1 << 43)


def empty_log(place: int) -> Edit:
    def edit(image: bytearray) -> None:
        both("<I", 68, 0)(image)
        both("<Q", 72, place)(image)

    return edit


def long_log(image: bytearray) -> None:
    struct.pack_into("<Q", image, HEADERS[0] + 8, 1 << 40)
    struct.pack_into("<I", image, HEADERS[0] + 68, 4096 * MIB - MIB)


def many_regions(image: bytearray) -> None:
    struct.pack_into("<I", image, REGIONS + 8, 2047)
    for number in range(2, 2047):
        struct.pack_into("<QQQII", image, REGIONS + 16 + 32 * number, number, 0, (number + 100) * MIB, MIB, number % 2)


def unknown_region(image: bytearray) -> None:
    struct.pack_into("<16s", image, BAT_ENTRY, UNKNOWN)
    struct.pack_into("<I", image, BAT_ENTRY + 28, 1)


def items(count: int) -> Edit:
    """So many items, all of which are the first one."""

    def edit(image: bytearray) -> None:
        struct.pack_into("<H", image, METADATA + 10, count)
        for number in range(1, min(count, 2047)):
            at = METADATA + 32 + 32 * number
            image[at : at + 32] = image[METADATA + 32 : METADATA + 64]

    return edit


BAT_ENTRY, METADATA_ENTRY = REGIONS + 16, REGIONS + 48
UNKNOWN = UUID("00112233-4455-6677-8899-aabbccddeeff").bytes_le
PARENT = UUID("a8d35f2d-b30b-454d-abf7-d3d84834ab0c").bytes_le
BOMBS: list[tuple[str, Edit, str]] = [
    ("neither header marked", both("<I", 0, 0), "both VHDX headers"),
    ("version 2", both("<H", 66, 2), "both VHDX headers"),
    ("a log of version 1", both("<H", 64, 1), "log of version 1"),
    ("same number, other content", contradiction, "same number"),
    ("log beside a MiB", both("<I", 68, MIB + 4096), "log does not start"),
    ("log behind the end", far_log, "cut off: the VHDX log"),
    ("log over the regions", long_log, "overlap"),
    ("log over the header", both("<Q", 72, 0), "log does not start"),
    ("log of no length beside a MiB", empty_log(MIB + 4096), "log does not start"),
    ("log of no length over the header", empty_log(0), "log does not start"),
    ("no region table", field("<I", REGIONS, 0), "region table is damaged"),
    ("2^32 - 1 regions", field("<I", REGIONS + 8, 0xFFFFFFFF), "4294967295 VHDX regions"),
    ("2,047 regions that must be known", many_regions, "with the region 0000"),
    ("no regions", field("<I", REGIONS + 8, 0), "names no block allocation table"),
    ("an unknown region", unknown_region, "with the region 00112233-4455-6677-8899-aabbccddeeff"),
    ("one region twice", field("<16s", METADATA_ENTRY, bytes.fromhex("6677c22d23f600429d64115e9bfd4a08")), "twice"),
    ("regions over one another", field("<Q", METADATA_ENTRY + 16, 2 * MIB), "overlap"),
    ("a region over the header", field("<Q", METADATA_ENTRY + 16, 0), "overlap"),
    ("a region beside a MiB", field("<Q", BAT_ENTRY + 16, 2 * MIB + 512), "start and end at a MiB"),
    ("an empty region", field("<I", BAT_ENTRY + 24, 0), "start and end at a MiB"),
    ("block table behind the end", field("<Q", BAT_ENTRY + 16, 1 << 43), "cut off: the VHDX block allocation table"),
    ("metadata at the end of the world", field("<Q", METADATA_ENTRY + 16, (1 << 64) - MIB), "cut off"),
    ("no metadata", field("<Q", METADATA, 0), "metadata table is missing"),
    ("65,535 items", field("<H", METADATA + 10, 65535), "65535 VHDX metadata items"),
    ("2,047 equal items", items(2047), "twice"),
    ("no items", items(0), "is missing"),
    ("only the first item", items(1), "2fa54224-cd1b-4876-b211-5dbed83bf4b8 is missing"),
    ("an unknown item", field("<16s", METADATA + 32, UNKNOWN), "metadata item 00112233"),
    ("an item of 4 GiB", field("<I", METADATA + 32 + 20, 0xFFFFFFFF), "takes 4294967295 bytes"),
    ("an item over the table", field("<I", METADATA + 32 + 16, 0), "at byte 0 of the metadata"),
    ("an item behind its region", field("<I", METADATA + 32 + 16, 0xFFFFFFF0), "at byte 4294967280"),
    ("blocks of 512 KiB", field("<I", ITEMS, 1 << 19), "block size"),
    ("blocks of 3 MiB", field("<I", ITEMS, 3 << 20), "block size"),
    ("blocks of 512 MiB", field("<I", ITEMS, 1 << 29), "block size"),
    ("a parent", field("<I", ITEMS + 4, 2), "differencing"),
    ("where the parent is", field("<16s", METADATA + 32 + 64, PARENT), "missing|differencing"),
    ("65 TiB", field("<Q", ITEMS + 8, 65 << 40), "64 TiB"),
    ("nothing at all, in a table for something", field("<Q", ITEMS + 8, 0), "virtual size of 0 bytes"),
    ("more than the table holds", field("<Q", ITEMS + 8, 64 << 40), "cannot hold"),
    ("sectors of 4096 bytes", field("<I", ITEMS + 32, 4096), "sectors of 4096 bytes"),
    ("sectors of 0 bytes", field("<I", ITEMS + 32, 0), "sectors of 0 bytes"),
]


@pytest.mark.parametrize(("bomb", "edit", "sentence"), BOMBS, ids=[bomb for bomb, _, _ in BOMBS])
def test_a_field_beyond_its_bounds_is_named(disk: Path, bomb: str, edit: Edit, sentence: str) -> None:
    signed(disk, edit)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    assert_unreadable(disk, sentence)
    assert time.thread_time() - started < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


def test_a_differencing_image_is_named_as_one(disk: Path) -> None:
    def parent(image: bytearray) -> None:
        struct.pack_into("<I", image, ITEMS + 4, 2)
        struct.pack_into("<H", image, METADATA + 10, 6)
        struct.pack_into("<16sIIII", image, METADATA + 32 + 5 * 32, PARENT, 65536 + 64, 128, 4, 0)

    assert_unreadable(signed(disk, parent), "build on another one")


@pytest.mark.parametrize(("offset", "sentence"), [(HEADERS[0], ""), (HEADERS[1], ""), (REGIONS, "table is damaged")])
def test_one_changed_bit_is_found_by_the_checksum(disk: Path, offset: int, sentence: str) -> None:
    """Of the two headers the other one holds then."""
    edited(disk, field("<B", offset + 3000, 16), 4 * MIB)
    if sentence:
        assert_unreadable(disk, sentence)
    else:
        assert_same(disk, "vhdx")


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E), (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)  # fmt: skip
def test_checksums_are_those_that_are_published(data: bytes, wanted: int) -> None:
    """The check value of CRC-32C, and the examples of RFC 3720, appendix B.4."""
    assert crc32c(data) == wanted


def test_a_file_cut_at_any_length_is_a_refusal_until_all_regions_are_there(disk: Path) -> None:
    lengths = [*range(0, 700, 7), *range(64 * KIB, 256 * KIB, 4 * KIB + 1), MIB, 2 * MIB, 3 * MIB, ITEMS, ITEMS + 30]
    for length in sorted(lengths, reverse=True):
        os.truncate(disk, length)
        assert isinstance(outcome(disk, "vhdx"), UnreadableError), length
        assert isinstance(outcome(disk), UnreadableError | Facts), length


@pytest.mark.fuzz
def test_mutated_headers_give_what_qemu_believes_or_a_refusal(disk: Path) -> None:
    chance = random.Random(seed())
    original = disk.read_bytes()[: 4 * MIB]
    places = [*((header, 80) for header in HEADERS), (REGIONS, 80), (METADATA, 192), (ITEMS, 40), (0, 4 * MIB)]
    refused = believed = compared = 0
    slowest = 0.0

    def put(image: bytes, start: int, length: int) -> None:
        for at, size in ((0, 256 * KIB), (METADATA, 128 * KIB), (start, min(length, MIB))):
            overwrite(disk, at, image[at : at + size])

    for number in range(600):
        start, length = chance.choice(places)
        image = bytearray(original)
        part = image[start : start + length]
        mutate(chance, part)
        image[start : start + length] = part
        if chance.randrange(4):
            sign(image)
        put(bytes(image), start, length)
        started = time.thread_time()
        facts = outcome(disk, "vhdx")
        slowest = max(slowest, time.thread_time() - started)
        refused += isinstance(facts, UnreadableError)
        believed += isinstance(facts, Facts)
        if number % 5 == 0 and isinstance(facts, Facts):
            compared += qemu_agrees(disk, facts)
        put(original, start, length)
    assert refused > 100
    assert believed > 100
    assert compared > 10
    assert slowest < 0.5


def qemu_agrees(path: Path, facts: Facts) -> bool:
    """Whether qemu says the same; an image whose log it would have to replay is none that it only reads."""
    done = subprocess.run(["qemu-img", "info", "-f", "vhdx", "--output=json", path], capture_output=True)
    if done.returncode and facts.dirty:
        return False
    assert done.returncode == 0, done.stderr
    truth = json.loads(done.stdout)
    assert (facts.virtual_size, facts.cluster_size) == (truth["virtual-size"], truth["cluster-size"])
    return True
