"""What an overlay hides of the image below it is what merging it gives back, beside the overlay's own tables."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agent.formats.test_against_qemu import create, info, qemu_img
from tests.agent.harness import look_at, qemu_io
from tests.agent.recording import encoded
from tests.agent.test_analyze import MIB, allocated, analyzed
from tests.working import refused_as

pytestmark = pytest.mark.qemu

#: Formats and options of base and overlay.
PAIRS = [
    ("qcow2", "", ""),
    ("qcow2", "cluster_size=4k", "cluster_size=64k"),
    ("qcow2", "cluster_size=2M", "cluster_size=64k"),
    ("qcow2", "compat=0.10", "compat=0.10"),
    ("qcow2", "", "extended_l2=on"),
    ("qcow2", "extended_l2=on", ""),
    ("raw", "", ""),
]


def hidden(overlay: Path, base: Path, image_format: str, **more: Any) -> dict[str, Any]:
    basis: dict[str, Any] = analyzed(overlay, base=look_at(base, image_format), **more)["basis"]
    return basis


def write(path: Path, image_format: str, chance: random.Random, *kinds: str) -> None:
    """Whole clusters of the largest kind, at random, so that what is covered in part is not in question."""
    places = [f"{chance.randrange(16) * 2}M {chance.randint(1, 3) * 2}M" for _ in range(5)]
    qemu_io(path, *(f"{chance.choice(kinds)} {place}" for place in places), form=image_format)


def pair(folder: Path, options: str, size: str, *written: str) -> tuple[Path, Path]:
    """A base in which that is written, and an empty overlay on it."""
    base = create(folder / "base.qcow2", "qcow2", options, size)
    qemu_io(base, *written)
    return base, create(folder / "top.qcow2", "qcow2", "", "", "-b", base, "-F", "qcow2")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("base_format", "of_base", "of_overlay"), PAIRS)
@pytest.mark.parametrize("seed", range(3))
def test_is_what_a_merge_gives_back(tmp_path: Path, base_format: str, of_base: str, of_overlay: str, seed: int) -> None:
    chance = random.Random(seed)
    base, overlay = tmp_path / f"base.{base_format}", tmp_path / "top.qcow2"
    create(base, base_format, of_base, "48M")
    write(base, base_format, chance, "write -P 7")
    create(overlay, "qcow2", of_overlay, "", "-b", base, "-F", base_format)
    write(overlay, "qcow2", chance, "write -P 9")
    told = hidden(overlay, base, base_format)["hidden_bytes"]
    before = allocated(base) + allocated(overlay)
    subprocess.run(["qemu-img", "commit", "-q", "-d", overlay], check=True)
    freed = before - allocated(base)
    tables = 6 * info(overlay, "qcow2")["cluster-size"] + MIB // 4
    assert told - MIB // 16 <= freed <= told + tables, f"seed {seed}"


def test_zeros_hide_as_data_does_and_compressed_clusters_count_as_they_are_stored(tmp_path: Path) -> None:
    source, base, overlay = tmp_path / "source.raw", tmp_path / "base.qcow2", tmp_path / "top.qcow2"
    source.write_bytes(random.Random(3).randbytes(MIB // 8) * 64)
    qemu_img("convert", "-c", "-f", "raw", "-O", "qcow2", source, base)
    create(overlay, "qcow2", "", "", "-b", base, "-F", "qcow2")
    assert hidden(overlay, base, "qcow2")["hidden_bytes"] == 0
    qemu_io(overlay, "write -z 0 8M")
    told = hidden(overlay, base, "qcow2")["hidden_bytes"]
    assert abs(told - allocated(base)) < MIB // 2


def test_of_a_base_cluster_that_is_covered_in_part_all_is_still_read(tmp_path: Path) -> None:
    base, overlay = pair(tmp_path, "cluster_size=2M", "8M", "write 0 4M")
    qemu_io(overlay, "write 64k 3M")
    assert hidden(overlay, base, "qcow2")["hidden_bytes"] == 0  # of 0 to 2M and of 2M to 4M a rest is read
    qemu_io(overlay, "write 0 64k")
    assert hidden(overlay, base, "qcow2")["hidden_bytes"] == 2 * MIB


def test_holes_of_the_base_are_nothing_that_is_hidden(tmp_path: Path) -> None:
    base, overlay = pair(tmp_path, "preallocation=metadata", "64M", "write 0 4M")
    qemu_io(overlay, "write 8M 32M")
    assert hidden(overlay, base, "qcow2")["hidden_bytes"] < MIB // 4
    qemu_io(overlay, "write 0 2M")
    assert 2 * MIB <= hidden(overlay, base, "qcow2")["hidden_bytes"] < 2 * MIB + MIB // 4


def test_the_last_cluster_counts_that_the_virtual_size_cuts(tmp_path: Path) -> None:
    base, overlay = pair(tmp_path, "cluster_size=2M", "5M", "write 0 5M")
    qemu_io(overlay, "write 0 5M")
    assert hidden(overlay, base, "qcow2")["hidden_bytes"] >= 5 * MIB


@pytest.mark.parametrize("whose", ["base", "top"])
def test_what_internal_snapshots_hold_on_to_is_not_told(tmp_path: Path, whose: str) -> None:
    base, overlay = pair(tmp_path, "", "8M", "write 0 4M")
    qemu_img("snapshot", "-c", "one", tmp_path / f"{whose}.qcow2")
    qemu_io(overlay, "write 0 4M")
    found = hidden(overlay, base, "qcow2")
    assert found["hidden_bytes"] is None
    assert "internal snapshots" in found["hidden_reason"]


def test_tables_that_all_are_one_end_with_the_sample_and_tell_no_more_than_there_is(tmp_path: Path) -> None:
    base, overlay = tmp_path / "base.qcow2", tmp_path / "top.qcow2"
    for path in (base, overlay):
        create(path, "qcow2", "cluster_size=4k", "32G")
        qemu_io(path, "write 0 2M")
        with path.open("r+b") as file:  # every L1 entry names the first table
            head = file.read(48)
            size, offset = int.from_bytes(head[36:40], "big"), int.from_bytes(head[40:48], "big")
            file.seek(offset)
            entry = file.read(8)
            file.seek(offset)
            file.write(entry * size)
            file.truncate(1 << 36)
    began = time.monotonic()
    found = hidden(overlay, base, "qcow2")
    assert time.monotonic() - began < 20  # half a second of it, on a machine that does nothing else
    assert found["hidden_bytes"] is None or found["hidden_bytes"] <= allocated(base)


def test_what_cannot_be_told_is_not_guessed_and_the_estimate_stands(tmp_path: Path) -> None:
    base, overlay = tmp_path / "base.qcow2", tmp_path / "top.qcow2"
    create(base, "qcow2", "", "8M")
    create(overlay, "qcow2", "", "", "-b", base, "-F", "qcow2")
    assert "hidden_bytes" not in analyzed(overlay)["basis"]
    for other in ({"inode": 1}, {"path_b64": encoded(tmp_path / "gone")}, {"pool_path_b64": encoded(tmp_path / "p")}):
        found = analyzed(overlay, base=look_at(base) | other)
        assert (found["basis"]["hidden_bytes"], found["allocated_size"]) == (None, allocated(overlay)), other
        assert found["basis"]["hidden_reason"]
    base.write_bytes(base.read_bytes()[:40])
    assert hidden(overlay, base, "qcow2")["hidden_bytes"] is None


@pytest.mark.parametrize("wrong", [{"format": "vmdk"}, {"inode": True}, {"more": 1}, {"path_b64": None}])
def test_a_base_that_makes_no_sense_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    overlay = create(tmp_path / "top.qcow2", "qcow2", "", "8M")
    assert refused_as(analyzed, overlay, base=look_at(overlay) | wrong) == "invalid"
