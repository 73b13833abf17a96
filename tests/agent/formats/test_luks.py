"""LUKS volumes: the same facts as ``qemu-img info``, and a refusal for headers beyond their bounds."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

from storage_admin.agent.formats import Facts, UnreadableError
from tests.agent.formats.test_against_qemu import SECRET, assert_same, create, facts_of, info, probed, qemu_img
from tests.agent.formats.test_hostile import Edit, assert_unreadable, edited, field, mutate, outcome
from tests.agent.harness import overwrite
from tests.chance import seed

pytestmark = pytest.mark.qemu

KEY = "key-secret=key,iter-time=10"
#: Every value of every option at least once: each volume takes seconds, in which qemu measures its key derivation.
OPTIONS = [
    "cipher-alg=aes-128,hash-alg=sha1,preallocation=falloc",
    "cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=plain,hash-alg=sha512,preallocation=off",
    "cipher-alg=serpent-256,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256,preallocation=full",
    "cipher-alg=twofish-128,cipher-mode=xts,ivgen-alg=plain64,hash-alg=ripemd160,preallocation=metadata",
    "cipher-alg=cast5-128,cipher-mode=cbc,hash-alg=sha256",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One volume as qemu makes it by itself."""
    return create(tmp_path_factory.mktemp("luks") / "disk.luks", "luks", KEY)


@pytest.fixture
def disk(made: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copy(made, tmp_path / "disk.luks"))


@pytest.mark.parametrize("options", OPTIONS)
def test_reads_every_option_as_qemu_does(tmp_path: Path, options: str) -> None:
    path = create(tmp_path / "disk.luks", "luks", f"{KEY},{options}")
    assert probed(path) == "luks"
    assert_same_luks(path)


def assert_same_luks(path: Path) -> None:
    facts, told = assert_same(path, "luks"), info(path, "luks")["format-specific"]["data"]
    hashed = f":{told['ivgen-hash-alg']}" if "ivgen-hash-alg" in told else ""
    cipher = f"{told['cipher-alg']}-{told['cipher-mode']}-{told['ivgen-alg']}{hashed}"
    assert facts.encryption == f"luks ({cipher})"


@pytest.mark.parametrize("size", [2068480, 2068481, 2068991, 2068993, 10_000_001, 5 << 40])
def test_reads_every_size_as_qemu_does(disk: Path, size: int) -> None:
    assert info(disk, "luks")["format-specific"]["data"]["payload-offset"] == 2068480
    os.truncate(disk, size)
    assert_same_luks(disk)


def test_reads_what_convert_made(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(os.urandom(300_000) + bytes(700_001))
    path = tmp_path / "disk.luks"
    qemu_img("convert", *SECRET, "-f", "raw", "-O", "luks", "-o", KEY, tmp_path / "raw", path)
    assert_same_luks(path)


def test_a_volume_that_was_cut_where_its_data_starts_is_empty(disk: Path) -> None:
    os.truncate(disk, 2068480)
    assert assert_same(disk, "luks").virtual_size == 0
    os.truncate(disk, 2068480 - 512)
    assert_unreadable(disk, "cut off")


SLOT = 208
BOMBS: list[tuple[str, Edit, str]] = [
    ("version 3", field(">H", 6, 3), "LUKS version 3"),
    ("a cipher without its end", field(">32s", 8, b"a" * 32), "names its cipher"),
    ("a cipher with an escape", field(">32s", 8, b"aes\x1b[31m"), "names its cipher"),
    ("no cipher", field(">32s", 8, b""), "names its cipher ''"),
    ("a mode without its sectors", field(">32s", 40, b"xts"), "cipher mode 'xts'"),
    ("a hash that is no word", field(">32s", 72, b"\xff\xfe"), "names its cipher"),
    ("data over the header", field(">I", 104, 7), "data is in another file, or lies over the header"),
    ("data over the keys", field(">I", 104, 100), "key slots lie over"),
    ("data behind the end", field(">I", 104, 0xFFFFFFFF), "cut off: its encrypted data starts at byte 2199023255040"),
    ("no key", field(">I", 108, 0), "key of 0 bytes"),
    ("a key of 4 GiB", field(">I", 108, 0xFFFFFFFF), "key of 4294967295 bytes"),
    ("no iterations", field(">I", 164, 0), "in no iterations"),
    ("a slot that is neither on nor off", field(">I", SLOT, 7), "key slot 0 is damaged"),
    ("a slot without iterations", field(">I", SLOT + 4, 0), "key slot 0 is damaged"),
    ("a slot of 4 billion stripes", field(">I", SLOT + 7 * 48 + 44, 0xFFFFFFFF), "key slot 7 is damaged"),
    ("a slot over the header", field(">I", SLOT + 40, 1), "key slots lie over"),
    ("a slot over the data", field(">I", SLOT + 48 + 40, 0xFFFFFFFF), "key slots lie over"),
    ("slots over one another", field(">I", SLOT + 40, 513), "key slots overlap"),
]


@pytest.mark.parametrize(("bomb", "edit", "sentence"), BOMBS, ids=[bomb for bomb, _, _ in BOMBS])
def test_a_field_beyond_its_bounds_is_named(disk: Path, bomb: str, edit: Edit, sentence: str) -> None:
    assert_unreadable(edited(disk, edit, 4096), sentence)


@pytest.mark.fuzz
def test_mutated_headers_give_what_qemu_believes_or_a_refusal(disk: Path) -> None:
    chance = random.Random(seed())
    original = disk.read_bytes()[:592]
    refused = compared = 0
    for number in range(600):
        image = bytearray(original)
        mutate(chance, image)
        with disk.open("r+b") as file:
            file.write(image)
        started = time.thread_time()
        facts = outcome(disk, "luks")
        assert time.thread_time() - started < 0.5
        refused += isinstance(facts, UnreadableError)
        if isinstance(facts, Facts) and number % 5 == 0:
            done = subprocess.run(["qemu-img", "info", "-f", "luks", "--output=json", disk], capture_output=True)
            if done.returncode == 0:  # of ciphers qemu knows fewer than the kernel does
                assert facts.virtual_size == json.loads(done.stdout)["virtual-size"]
                compared += 1
    assert refused > 100
    assert compared > 10


def test_a_file_cut_at_any_length_is_a_refusal_until_its_data_starts(disk: Path) -> None:
    for length in (2068479 - 512, 2_000_000, 4096, 4095, *range(700, 0, -7), 0):
        os.truncate(disk, length)
        assert isinstance(outcome(disk, "luks"), UnreadableError), length


def luks2(
    path: Path, algorithm: bytes = b"sha256", size: int = 16384, offset: int = 0, file_size: int = 1 << 20
) -> Path:
    """A LUKS2 header by its specification; qemu makes none, and cryptsetup is not part of what a host needs."""
    fields = (b"LUKS\xba\xbe", 2, size, 1, b"", algorithm, b"salt", b"uuid", b"", offset, b"", b"")
    head = struct.pack(">6sHQQ48s32s64s40s48sQ184s64s", *fields).ljust(4096, b"\0")
    whole = (head + b'{"keyslots":{}}').ljust(size if size <= 1 << 22 else 16384, b"\0")
    if algorithm in {b"sha1", b"sha256", b"sha512"}:
        digest = hashlib.new(algorithm.decode(), whole).digest()
        whole = whole[:448] + digest + whole[448 + len(digest) :]
    path.write_bytes(whole)
    os.truncate(path, file_size)
    return path


@pytest.mark.parametrize("algorithm", [b"sha1", b"sha256", b"sha512"])
def test_luks2_is_encrypted_and_as_large_as_qemu_says(tmp_path: Path, algorithm: bytes) -> None:
    path = luks2(tmp_path / "disk.luks", algorithm, file_size=1_000_001)
    facts, truth = facts_of(path), json.loads(qemu_img("info", "--output=json", path))
    assert (facts.format, facts.encrypted, facts.encryption) == ("luks", True, "luks2")
    assert facts.virtual_size == truth["virtual-size"] == 1_000_448
    assert truth["format"] == "raw", "what qemu takes it for by itself"


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"algorithm": b"crc\x1b"}, "unknown checksum"),
        ({"algorithm": b""}, "unknown checksum ''"),
        ({"size": 0}, "header of 0 bytes"),
        ({"size": 20480}, "header of 20480 bytes"),
        ({"size": (1 << 64) - 1}, "header of 18446744073709551615 bytes"),
        ({"offset": 16384}, "at byte 16384"),
        ({"size": 1 << 22, "file_size": 1 << 21}, "cut off"),
        ({"file_size": 4095}, "cut off"),
        ({"file_size": 700}, "cut off"),
    ],
)
def test_a_luks2_header_beyond_its_bounds_is_named(tmp_path: Path, how: dict[str, int], sentence: str) -> None:
    assert_unreadable(luks2(tmp_path / "disk.luks", **how), sentence)  # type: ignore[arg-type]


def test_one_changed_bit_of_a_luks2_header_is_found_by_its_checksum(tmp_path: Path) -> None:
    path = luks2(tmp_path / "disk.luks", size=1 << 22, file_size=1 << 23)
    assert facts_of(path).encrypted
    overwrite(path, (1 << 22) - 1, b"\1")
    started = time.thread_time()
    assert_unreadable(path, "checksum is wrong")
    assert time.thread_time() - started < 0.5
