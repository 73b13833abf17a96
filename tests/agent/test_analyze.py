"""What an estimate says, against what qemu-img really makes of the same image."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host.priority import io_priority
from storage_admin.agent.measure.sampling import Budget
from storage_admin.agent.protocol import StoppedError
from storage_admin.agent.verbs import analyze
from tests.agent.formats.test_against_qemu import create, qemu_img
from tests.agent.harness import held_open, look_at, number_at, qemu_io
from tests.agent.recording import RecordingIO, cancel, encoded, request
from tests.harness.filesystems import new_file
from tests.working import refused_as

pytestmark = pytest.mark.qemu

MIB = 1 << 20


def analyzed(path: Path, image_format: str = "qcow2", io: RecordingIO | None = None, **more: Any) -> dict[str, Any]:
    args = {**look_at(path, image_format), "mode": "sample", "seed": 7, **more}
    return analyze.run(request("analyze", **args), io or RecordingIO())


def allocated(path: Path) -> int:
    with held_open(path) as fd:
        os.fsync(fd)  # delayed allocation: blocks are counted when they are written
    return path.stat().st_blocks * 512


WORDS = [random.Random(1).randbytes(length).hex().encode() for length in range(2, 9) for _ in range(40)]


def prose(chance: random.Random, size: int) -> bytes:
    """Text-like data: words that come again."""
    words = chance.choices(WORDS, k=size // 8)
    return b" ".join(words)[:size].ljust(size, b".")


def noise(chance: random.Random, size: int) -> bytes:
    return chance.randbytes(size)


def zeros(chance: random.Random, size: int) -> bytes:
    return bytes(size)


def mixed(chance: random.Random, size: int) -> bytes:
    """Stretches of each, as files lie on a disk."""
    content = bytearray()
    while len(content) < size:
        make = chance.choice((prose, noise, zeros))
        content += make(chance, chance.randrange(1, 64) * 4096)
    return bytes(content[:size])


def image_of(path: Path, content: bytes, options: str = "") -> Path:
    """A qcow2 image with all of the content allocated, zeros included, as a guest leaves it; it is on the disk."""
    create(path, "qcow2", options, str(len(content)))
    raw = new_file(path.with_suffix(".content"), content)
    qemu_img("convert", "-n", "-S", "0", "-f", "raw", "-O", "qcow2", raw, path)
    raw.unlink()
    allocated(path)
    return path


def assert_estimate_holds(result: dict[str, Any], path: Path, *options: str, within: float = 0.05) -> None:
    """The true size after a compression lies in the range, and the estimate is near it."""
    target = path.with_suffix(".packed")
    qemu_img("convert", "-f", "qcow2", "-O", "qcow2", "-c", *options, path, target)
    after, before = allocated(target), result["allocated_size"]
    assert before == path.stat().st_blocks * 512
    compress = result["methods"]["compress"]
    assert compress["predicted_low"] <= after <= compress["predicted_high"]
    named = compress["compressions"]["zstd" if "compression_type=zstd" in options else "zlib"]
    assert named["predicted_low"] <= after <= named["predicted_high"]
    assert named["reclaimable_low"] <= max(before - after, 0) <= named["reclaimable_high"]
    assert named["predicted_low"] <= named["predicted_after_bytes"] <= named["predicted_high"]
    assert abs(named["predicted_after_bytes"] - after) <= within * before
    if after < before // 2:
        assert abs(named["reclaimable_bytes"] - (before - after)) <= within * (before - after)


@pytest.mark.parametrize("make", [prose, noise, zeros, mixed])
def test_predicts_what_compression_makes_of_any_kind_of_data(
    tmp_path: Path, make: Callable[[random.Random, int], bytes]
) -> None:
    path = image_of(tmp_path / "disk.qcow2", make(random.Random(3), 24 * MIB))
    assert_estimate_holds(analyzed(path), path)


@pytest.mark.parametrize(
    "options", ["cluster_size=4k", "cluster_size=512", "cluster_size=2M", "extended_l2=on", "compat=0.10"]
)
def test_predicts_for_other_layouts(tmp_path: Path, options: str) -> None:
    path = image_of(tmp_path / "disk.qcow2", mixed(random.Random(4), 16 * MIB), options)
    assert_estimate_holds(analyzed(path), path, "-o", options)


@pytest.mark.parametrize("seed", range(5))
def test_a_small_sample_of_a_large_image_still_has_the_truth_in_its_range(tmp_path: Path, seed: int) -> None:
    path = image_of(tmp_path / "disk.qcow2", mixed(random.Random(seed), 48 * MIB))
    result = analyzed(path, samples=100, seed=seed)
    assert result["basis"]["sampled"] == 100
    assert_estimate_holds(result, path, within=0.2)


def test_holds_for_zstd_too(tmp_path: Path) -> None:
    path = image_of(tmp_path / "disk.qcow2", mixed(random.Random(5), 16 * MIB))
    assert_estimate_holds(analyzed(path), path, "-o", "compression_type=zstd")


def test_an_image_that_is_compressed_already_has_nothing_to_win(tmp_path: Path) -> None:
    image_of(tmp_path / "plain.qcow2", mixed(random.Random(6), 24 * MIB))
    path = tmp_path / "disk.qcow2"
    qemu_img("convert", "-O", "qcow2", "-c", tmp_path / "plain.qcow2", path)
    allocated(path)
    result = analyzed(path)
    assert result["basis"]["clusters_compressed"] > 100
    assert_estimate_holds(result, path)
    assert result["methods"]["compress"]["compressions"]["zlib"]["reclaimable_bytes"] < result["allocated_size"] // 20


def test_counts_an_overlays_own_layer_only(tmp_path: Path) -> None:
    image_of(tmp_path / "base.qcow2", noise(random.Random(8), 24 * MIB))
    path = create(tmp_path / "over.qcow2", "qcow2", "", "", "-b", "base.qcow2", "-F", "qcow2")
    commands = [f"write -P {65 + number} {number}M 1M" for number in range(0, 24, 3)] + ["write -z 1M 512k"]
    qemu_io(path, *commands)
    allocated(path)
    result = analyzed(path)
    assert result["basis"]["clusters_data"] == 8 * 16
    assert_estimate_holds(result, path, "-B", "base.qcow2", "-F", "qcow2")


def test_a_preallocated_image_has_its_empty_space_to_give(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", "preallocation=full", "32M")
    allocated(path)
    result = analyzed(path)
    assert result["basis"]["clusters_zero_allocated"] == 512
    assert result["reclaimable_bytes"] > 31 * MIB
    assert_estimate_holds(result, path)


def test_zeros_in_a_raw_image_can_be_dug_out(tmp_path: Path) -> None:
    path = tmp_path / "disk.raw"
    chance = random.Random(9)
    path.write_bytes(b"".join(chance.choice((bytes(4096), b"x" * 4096)) for _ in range(8192)))
    before = allocated(path)
    result = analyzed(path, "raw", samples=100)
    subprocess.run(["fallocate", "--dig-holes", path], check=True)
    freed = before - allocated(path)
    assert result["method"] == "in_place"
    assert result["reclaimable_low"] <= freed <= result["reclaimable_high"]
    assert abs(result["reclaimable_bytes"] - freed) <= 0.05 * freed


def test_holes_of_a_raw_image_do_not_count_as_zeros(tmp_path: Path) -> None:
    path = tmp_path / "disk.raw"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
        for place in (0, 10 * MIB, 40 * MIB):
            file.seek(place)
            file.write(b"x" * 8192 + bytes(8192))
    assert allocated(path) == 3 * 16384
    assert analyzed(path, "raw")["reclaimable_bytes"] == 3 * 8192


@pytest.mark.parametrize("image_format", ["vmdk", "vdi", "vpc"])
def test_says_why_a_method_is_not_for_a_format(tmp_path: Path, image_format: str) -> None:
    path = create(tmp_path / "disk", image_format)
    methods = analyzed(path, image_format)["methods"]
    assert methods["compress"]["reason"].startswith(f"a {image_format} image cannot")
    assert methods["in_place"]["reason"].endswith(f"not in {image_format}")
    assert methods["in_place"]["reclaimable_bytes"] is methods["compress"]["predicted_high"] is None
    assert methods["copy"]["predicted_after_bytes"] is not None


def test_says_that_nothing_is_known_where_data_cannot_be_read_as_it_stands(tmp_path: Path) -> None:
    path = create(tmp_path / "disk", "vmdk", "subformat=streamOptimized")
    result = analyzed(path, "vmdk")
    assert (result["reclaimable_bytes"], result["method"]) == (None, None)
    assert "streamOptimized" in result["methods"]["copy"]["reason"]


def test_makes_no_estimate_where_a_rewrite_would_lose_something(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", "encrypt.format=aes,encrypt.key-secret=key")
    assert "encrypted" in analyzed(path)["reason"]
    create(path, "qcow2")
    qemu_img("snapshot", "-c", "one", path)
    result = analyzed(path)
    assert "snapshots" in result["methods"]["compress"]["reason"]
    assert "snapshots" in result["methods"]["copy"]["reason"]
    assert result["method"] == "in_place"  # which keeps them
    assert result["reclaimable_bytes"] is not None
    create(path, "qcow2", f"data_file={tmp_path}/data")
    assert "external data file" in analyzed(path)["reason"]


def test_an_empty_image_is_predicted_to_stay_as_it_is(tmp_path: Path) -> None:
    create(tmp_path / "disk.qcow2", "qcow2", "", "0")
    assert analyzed(tmp_path / "disk.qcow2")["basis"]["sampled"] == 0
    (tmp_path / "disk.raw").touch()
    assert analyzed(tmp_path / "disk.raw", "raw")["reclaimable_bytes"] == 0


def refusal(path: Path, image_format: str = "qcow2", **more: Any) -> str:
    return refused_as(analyzed, path, image_format, **more)


def test_refuses_what_is_not_the_image_that_was_asked_for(tmp_path: Path, pool: Path) -> None:
    path = create(pool / "disk.qcow2", "qcow2")
    assert refusal(path, inode=1) == "stale_plan"
    assert refusal(path, "vdi") == "format_mismatch"
    assert refusal(path, path_b64=encoded(pool / "gone")) == "stale_plan"
    assert refusal(path, path_b64=encoded(b"/etc/passwd")) == "outside_pool"
    assert refusal(path, path_b64=encoded(bytes(pool) + b"/../pool/disk.qcow2")) == "outside_pool"
    path.rename(tmp_path / "elsewhere.qcow2")
    path.symlink_to(tmp_path / "elsewhere.qcow2")
    assert refusal(path) == "outside_pool"


@pytest.mark.parametrize(
    "more",
    [
        {"mode": "half"},
        {"mode": ["full"]},
        {"samples": 0},
        {"seconds": -1},
        {"seconds": "1"},
        {"dev": "x"},
        {"format": None},
        {"compression": "lzma"},
        {"compression": ["zlib"]},
        {"extra": 1},
    ],
)
def test_refuses_arguments_that_are_not_as_they_should_be(tmp_path: Path, more: dict[str, Any]) -> None:
    create(tmp_path / "disk.qcow2", "qcow2")
    assert refusal(tmp_path / "disk.qcow2", **more) == "invalid"


def test_refuses_tables_that_lie_outside_the_file_or_are_used_again_and_again(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", "cluster_size=512,preallocation=metadata", "8M")
    image, l1_size, l1_offset = bytearray(path.read_bytes()), number_at(path, ">I", 36), number_at(path, ">Q", 40)
    for entry in (1 << 40, number_at(path, ">Q", l1_offset)):
        struct.pack_into(f">{l1_size}Q", image, l1_offset, *([entry] * l1_size))
        path.write_bytes(image[: l1_offset + l1_size * 8 + 512])
        assert refusal(path) == "dirty_or_corrupt"


def test_stops_when_the_controller_says_so(tmp_path: Path) -> None:
    path = image_of(tmp_path / "disk.qcow2", noise(random.Random(1), 8 * MIB))
    with pytest.raises(StoppedError):
        analyzed(path, io=RecordingIO(cancel))


def test_a_full_look_tells_how_far_it_is_and_stops_when_told(tmp_path: Path) -> None:
    path = image_of(tmp_path / "disk.qcow2", noise(random.Random(1), 48 * MIB))
    said: list[int] = []

    def stop() -> None:
        if said:
            cancel()
        said.extend(event["done"] for event in io.all("progress") if event["stage"] == "reading")

    io = RecordingIO(stop)
    with pytest.raises(StoppedError):
        analyzed(path, io=io, mode="full")
    assert 0 < said[0] < 48 * MIB


def test_a_full_look_runs_when_nobody_else_wants_the_disk_and_leaves_no_trace_of_that(tmp_path: Path) -> None:
    path = image_of(tmp_path / "disk.qcow2", prose(random.Random(1), MIB))
    before, during = priorities(), set()
    analyzed(path, io=RecordingIO(lambda: during.add(priorities())), mode="full")
    assert (19, 3 << 13) in during
    assert priorities() == before
    during.clear()
    analyzed(path, io=RecordingIO(lambda: during.add(priorities())))
    assert during == {before}


def priorities() -> tuple[int, int | None]:
    """Of processor and disk."""
    return os.getpriority(os.PRIO_PROCESS, 0), io_priority()


def test_a_full_look_at_a_large_empty_image_takes_neither_long_nor_much_memory(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", "preallocation=metadata", "8G")
    tracemalloc.start()
    result = analyzed(path, mode="full")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result["basis"]["sampled"] == 1 << 17
    assert most < 4 * MIB
    assert result["predicted_high"] < 2 * MIB


def test_stays_within_its_time(tmp_path: Path) -> None:
    path = image_of(tmp_path / "disk.qcow2", prose(random.Random(1), 64 * MIB))
    result = analyzed(path, samples=1_000_000, seconds=0.05)
    assert result["basis"]["sampled"] < 1024
    assert result["predicted_low"] < result["predicted_after_bytes"] < result["predicted_high"]


def test_a_sample_that_runs_out_of_time_is_spread_over_the_whole_image(tmp_path: Path) -> None:
    path = tmp_path / "disk.qcow2"
    # What does not compress lies at the beginning: half a round more of it would show in the estimate at once.
    image_of(path, noise(random.Random(1), 24 * MIB) + bytes(72 * MIB))
    for seconds in (0.02, 0.05, 0.1, 0.2):
        result = analyzed(path, samples=1_000_000, seconds=seconds, seed=1)
        assert result["predicted_after_bytes"] == pytest.approx(24 * MIB, rel=0.05), result["basis"]


def test_a_round_is_drawn_whole_or_not_at_all() -> None:
    times = iter([0.0, 0.0, 0.4, 0.7, 1.1])
    budget = Budget(1.0, processor=lambda: next(times), clock=lambda: 0.0)
    # After 0.4 another 0.4 still fits, after 0.7 another 0.3 just so, and after 1.1 nothing does.
    assert [budget.allows_another_round() for _ in range(4)] == [True, True, True, False]
