"""What each method is predicted to win, against what it then really wins, over images of many kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.measure.prediction import best
from storage_admin.agent.rewrite.copying import creation_options
from tests.agent.formats.test_against_qemu import create, facts_of, qemu_img
from tests.agent.harness import number_at, overwrite, qemu_io
from tests.agent.test_analyze import MIB, allocated, analyzed, image_of, mixed, noise, prose, zeros
from tests.agent.test_estimate_leaks import l2_table
from tests.agent.test_holes import digging
from tests.harness.filesystems import new_file

pytestmark = pytest.mark.qemu

#: Bytes that a guess may be off on images of some MiB, where 5 % of what is won are a few blocks.
SLACK = 64 * 1024
#: qemu-img otherwise has XFS allocate a MiB wherever a byte is written, holes included.
DENSE = "extent_size_hint=0"


@cache
def libraries() -> list[Path]:
    """Programs and libraries, as they lie on a system's disk."""
    return sorted(path for path in Path("/usr/lib").rglob("*.so*") if path.is_file() and not path.is_symlink())


def binaries(chance: random.Random, size: int) -> bytes:
    """Some of them, each from a block on."""
    content = bytearray()
    while len(content) < size:
        piece = chance.choice(libraries()).read_bytes()[: 4 * MIB]
        content += piece + bytes(-len(piece) % 4096)
    return bytes(content[:size])


def sparse(chance: random.Random, size: int) -> bytes:
    """A block with something in it here and there."""
    content = bytearray(size)
    for _ in range(size // (256 * 1024)):
        at = chance.randrange(size // 4096) * 4096
        content[at : at + 4096] = prose(chance, 4096)
    return bytes(content)


def layout(
    make: Callable[[random.Random, int], bytes], options: str = "", size: int = 16 * MIB
) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        image_of(path, make(random.Random(11), size), options)

    return build


def compressed(compression: str) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        image_of(path.with_name("plain.qcow2"), mixed(random.Random(12), 16 * MIB))
        options = "compat=1.1" + (",compression_type=zstd" if compression == "zstd" else "")
        qemu_img("convert", "-O", "qcow2", "-c", "-o", options, path.with_name("plain.qcow2"), path)
        # What a guest writes afterwards is stored as it is.
        qemu_io(path, "write -P 65 1M 2M", "write -P 0 5M 1M")

    return build


def overlay(options: str) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        image_of(path.with_name("base.qcow2"), mixed(random.Random(13), 16 * MIB))
        create(path, "qcow2", options, "", "-b", "base.qcow2", "-F", "qcow2")
        fill(path, mixed(random.Random(14), 6 * MIB), 2 * MIB)
        qemu_io(path, "write -z 9M 512k", "write -P 0 10M 1M", "write -P 66 12292k 20k")

    return build


def preallocated(mode: str) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        create(path, "qcow2", f"preallocation={mode}", "16M")
        fill(path, prose(random.Random(15), 4 * MIB), MIB)

    return build


def leaking(path: Path) -> None:
    image_of(path, binaries(random.Random(16), 16 * MIB))
    leak(path, 96)


def leak(path: Path, clusters: int) -> None:
    """As after a crash: clusters behind the last one are counted, hold something, and nothing refers to them."""
    qemu_img("resize", "-q", path, f"{path.stat().st_size // MIB + 64}M")
    start = 20 * MIB
    for number in range(clusters):
        qemu_io(path, f"write -P {1 + number % 250} {start + number * 65536} 64k")
    overwrite(path, l2_table(path) + start // 65536 * 8, bytes(clusters * 8))


def fill(path: Path, content: bytes, at: int) -> None:
    source = new_file(path.with_suffix(".part"), content)
    qemu_io(path, f"write -s {source} {at} {len(content)}")
    source.unlink()


IMAGES: dict[str, Callable[[Path], None]] = {
    "text": layout(prose),
    "binaries": layout(binaries, size=32 * MIB),
    "random": layout(noise),
    "zeros": layout(zeros),
    "sparse": layout(sparse),
    "mixed": layout(mixed),
    "small clusters": layout(mixed, "cluster_size=512", 4 * MIB),
    "clusters of 4K": layout(mixed, "cluster_size=4k", 8 * MIB),
    "clusters of 2M": layout(binaries, "cluster_size=2M", 32 * MIB),
    "extended L2": layout(mixed, "extended_l2=on,cluster_size=128k"),
    "old": layout(mixed, "compat=0.10"),
    "refcounts of one bit": layout(prose, "refcount_bits=1", 8 * MIB),
    "refcounts of 64 bits": layout(mixed, "refcount_bits=64", 8 * MIB),
    "compressed by zlib": compressed("zlib"),
    "compressed by zstd": compressed("zstd"),
    "overlay": overlay("compat=1.1"),
    "overlay with subclusters": overlay("extended_l2=on"),
    "preallocated": preallocated("full"),
    "reserved": preallocated("falloc"),
    "leaking": leaking,
}


def really(path: Path) -> dict[str, int]:
    """Bytes that the image takes after each method, done by the real tools with the options that a job uses."""
    facts = facts_of(path)
    backing = ["-B", facts.backing_file.decode(), "-F", str(facts.backing_format)] if facts.backing_file else []
    after = {}
    for method in ("copy", "zlib", *(["zstd"] if facts.compat != "0.10" else [])):
        own = facts.compression if method == "copy" else method
        wanted = ["-o", f"{creation_options(facts, own or 'zlib')},{DENSE}", *(["-c"] if method != "copy" else [])]
        target = path.with_name(f"{method}.new")
        qemu_img("convert", "-m", "8", "-W", "-f", "qcow2", "-O", "qcow2", *wanted, *backing, path, target)
        after[method] = allocated(target)
        target.unlink()
    return {**after, "in_place": dug(path)}


def dug(path: Path) -> int:
    """What the file itself takes once holes are dug in it."""
    with digging(path, at_once=1) as (digger, fd):
        while not digger.done:
            digger.step(fd)
    return allocated(path)


def assert_holds(numbers: dict[str, Any], after: int, before: int, what: str, within: float = 0.05) -> None:
    """The truth lies in the range, and what was freed is within that share of what was predicted (or a few blocks)."""
    low, guess, high = (numbers[f"predicted_{which}"] for which in ("low", "after_bytes", "high"))
    assert low <= after <= high, (what, before, after, numbers)
    assert numbers["reclaimable_low"] <= max(before - after, 0) <= numbers["reclaimable_high"], what
    slack = max(within * abs(before - after), SLACK)
    assert abs(guess - after) <= slack, (what, before, after, numbers)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", IMAGES)
def test_each_method_wins_what_was_predicted(tmp_path: Path, name: str) -> None:
    path = tmp_path / "disk.qcow2"
    IMAGES[name](path)
    before = allocated(path)
    results = {mode: analyzed(path, mode=mode) for mode in ("full", "sample")}
    results["full, of all"] = analyzed(path, mode="full", compression="all")
    really_taken = really(path)
    for mode, result in results.items():
        methods = result["methods"]
        each = methods["compress"]["compressions"]
        for method, after in really_taken.items():
            # A full look samples the compression that would not be taken. (Of whatever programs this machine has.)
            sampled = mode == "sample" or (
                mode == "full" and method in each.keys() - {methods["compress"]["compression"]}
            )
            within = 0.1 if sampled else 0.05  # its promise is the range
            assert_holds(each.get(method) or methods[method], after, before, f"{name}, {method}, {mode}", within)
            if method in each:  # the method's own range holds whichever compression is taken
                assert methods["compress"]["predicted_low"] <= after <= methods["compress"]["predicted_high"]


@pytest.mark.parametrize("make", [prose, noise, mixed, sparse, binaries])
def test_a_raw_image_is_predicted_for_a_copy_and_in_place(
    tmp_path: Path, make: Callable[[random.Random, int], bytes]
) -> None:
    path = new_file(tmp_path / "disk.raw", make(random.Random(17), 16 * MIB) + b"an end that fills no block")
    before = allocated(path)
    results = {mode: analyzed(path, "raw", mode=mode) for mode in ("full", "sample")}
    target = tmp_path / "copy.raw"
    qemu_img("convert", "-m", "8", "-W", "-f", "raw", "-O", "raw", "-o", DENSE, path, target)
    taken = {"copy": allocated(target), "in_place": dug(path)}
    for mode, result in results.items():
        assert result["methods"]["compress"]["predicted_high"] is None
        assert "cannot hold compressed data" in result["methods"]["compress"]["reason"]
        for method, after in taken.items():
            assert_holds(result["methods"][method], after, before, f"{method}, {mode}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [noise, mixed, sparse])
@pytest.mark.parametrize(
    ("image_format", "options"),
    [
        ("vmdk", "subformat=monolithicSparse"),
        ("vdi", ""),
        ("vdi", "static=on"),
        ("vpc", ""),
        ("vpc", "subformat=fixed,force_size=on"),
    ],
)
def test_a_copy_in_another_format_is_predicted(
    tmp_path: Path, image_format: str, options: str, make: Callable[[random.Random, int], bytes]
) -> None:
    raw, path, target = tmp_path / "content", tmp_path / "disk", tmp_path / "copy"
    raw.write_bytes(make(random.Random(18), 16 * MIB))
    wanted = ["-o", ",".join(filter(None, (options, DENSE)))]
    qemu_img("convert", "-S", "0", "-f", "raw", "-O", image_format, *wanted, raw, path)
    before = allocated(path)
    results = {mode: analyzed(path, image_format, mode=mode) for mode in ("full", "sample")}
    qemu_img("convert", "-f", image_format, "-O", image_format, *wanted, path, target)
    for mode, result in results.items():
        assert_holds(result["methods"]["copy"], allocated(target), before, f"copy, {mode}")


@pytest.mark.parametrize("seed", range(8))
def test_the_upper_bound_of_a_full_look_holds_for_any_layout(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice(["512", "1k", "2k", "4k", "16k", "64k", "1M"])
    options = f"cluster_size={size},refcount_bits={chance.choice([1, 2, 8, 16, 64])}"
    path = tmp_path / "disk.qcow2"
    content = b"".join(
        chance.choice((prose, noise, zeros))(chance, chance.choice([512, 4096, 65536, MIB])) for _ in range(60)
    )
    image_of(path, content[: 6 * MIB].ljust(6 * MIB, b"\0"), options)
    allocated(path)
    results = [analyzed(path, mode="full", compression=compression) for compression in ("auto", "all", "zlib")]
    taken = really(path)
    for methods in (result["methods"] for result in results):
        for method, after in taken.items():
            numbers = methods["compress"]["compressions"].get(method) or methods[method]
            assert after <= numbers["predicted_high"], (seed, options, method)


@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_a_compressed_cluster_that_cannot_be_unpacked_counts_as_large_as_it_may_be(
    tmp_path: Path, compression: str
) -> None:
    plain, path = tmp_path / "plain.qcow2", tmp_path / "disk.qcow2"
    image_of(plain, prose(random.Random(19), 4 * MIB))
    qemu_img("convert", "-c", "-O", "qcow2", "-o", f"compression_type={compression}", plain, path)
    before = analyzed(path, mode="full", compression=compression)
    entry = number_at(path, ">Q", l2_table(path))
    overwrite(path, entry & ((1 << 54) - 1), random.Random(20).randbytes(1000))
    after = analyzed(path, mode="full", compression=compression)
    unreadable = after["basis"]["clusters_unreadable"]
    assert before["basis"]["clusters_unreadable"] == 0 < unreadable < 4
    highest = [
        result["methods"]["compress"]["compressions"][compression]["predicted_high"] for result in (before, after)
    ]
    grown = highest[1] - highest[0]
    assert unreadable * 48 * 1024 < grown < (unreadable + 1) * 65536 + SLACK


def test_a_full_look_measures_the_compression_that_is_taken_and_no_other(tmp_path: Path) -> None:
    """zlib takes six times as long as everything else; who wants its bound to the byte asks for it."""
    path = image_of(tmp_path / "disk.qcow2", prose(random.Random(23), 8 * MIB) + noise(random.Random(24), 4 * MIB))
    before = allocated(path)
    found = {
        asked: analyzed(path, mode="full", compression=asked)["methods"]["compress"]
        for asked in ("auto", "zstd", "zlib", "all")
    }
    named = {asked: compress["compressions"] for asked, compress in found.items()}
    assert {asked: compress["compression"] for asked, compress in found.items()} == {
        "auto": "zstd", "zstd": "zstd", "zlib": "zlib", "all": "zstd",
    }  # fmt: skip
    assert named["auto"]["zstd"] == named["zstd"]["zstd"] == named["all"]["zstd"]
    assert named["zlib"]["zlib"] == named["all"]["zlib"]
    # What was not measured is guessed well, and bounded by what the image takes without any compression.
    for asked, other in (("auto", "zlib"), ("zlib", "zstd")):
        exact, guessed = named["all"][other], named[asked][other]
        assert abs(guessed["predicted_after_bytes"] - exact["predicted_after_bytes"]) < 0.05 * before
        assert exact["predicted_high"] < guessed["predicted_high"] <= 1.02 * before + SLACK
        assert found[asked]["predicted_high"] == guessed["predicted_high"]  # whatever a job asks for fits in
    # What is shown as won is what the usual one wins.
    for number in ("reclaimable_low", "reclaimable_bytes", "reclaimable_high"):
        assert found["auto"][number] == named["all"]["zstd"][number]


def test_what_is_gentler_is_preferred_where_it_wins_nearly_as_much() -> None:
    def wins(**won: int | None) -> dict[str, dict[str, Any]]:
        return {method: {"reclaimable_bytes": bytes_won} for method, bytes_won in won.items()}

    assert best(wins(compress=1000, copy=985, in_place=981), ("compress", "copy", "in_place")) == "in_place"
    assert best(wins(compress=1000, copy=985, in_place=970), ("compress", "copy", "in_place")) == "copy"
    assert best(wins(compress=1000, copy=900, in_place=900), ("compress", "copy", "in_place")) == "compress"
    assert best(wins(compress=1000, copy=900, in_place=900), ("copy",)) == "copy"
    assert best(wins(compress=None, copy=5, in_place=0), ("compress", "copy", "in_place")) == "copy"
    assert best(wins(compress=None, copy=None), ("compress", "copy")) is None
    assert best({}, ("compress",)) is None
