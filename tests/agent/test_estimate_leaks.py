"""Leaked clusters, as we count them and as ``qemu-img check`` does."""

from __future__ import annotations

import json
import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from storage_admin.agent.formats.facts import Reader
from storage_admin.agent.formats.qcow2 import parse_header
from storage_admin.agent.measure.qcow2_leaks import Leaks, find_leaks
from storage_admin.agent.protocol import StoppedError
from tests.agent.formats.test_against_qemu import create, qemu_img
from tests.agent.harness import held_open, number_at, overwrite, qemu_io
from tests.agent.recording import cancel
from tests.agent.test_analyze import MIB, image_of, mixed

pytestmark = pytest.mark.qemu


def leaks_of(path: Path, deadline: float | None = None, check: Callable[[], None] = lambda: None) -> Leaks:
    with held_open(path) as fd:
        reader = Reader(fd, path.stat().st_size)
        return find_leaks(reader, parse_header(reader), check, deadline)


def checked(path: Path) -> int:
    """How many leaks qemu-img finds; 3 is its exit code where there are any, and nothing else is wrong."""
    done = subprocess.run(["qemu-img", "check", "-f", "qcow2", "--output=json", path], capture_output=True, check=False)
    assert done.returncode in {0, 3}, done.stderr
    found: int = json.loads(done.stdout).get("leaks", 0)
    return found


#: The part of an entry that says where something is.
OFFSET = 0x00FFFFFFFFFFFE00


def l2_table(path: Path, number: int = 0) -> int:
    """Where an L2 table stands."""
    return number_at(path, ">Q", number_at(path, ">Q", 40) + number * 8) & OFFSET


LAYOUTS = [
    "", "compat=0.10", "cluster_size=512", "cluster_size=4k", "cluster_size=2M", "extended_l2=on", "refcount_bits=1",
    "refcount_bits=2", "refcount_bits=4", "refcount_bits=8", "refcount_bits=32", "refcount_bits=64",
    "preallocation=metadata", "preallocation=full",
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("forgotten", [0, 5])
def test_counts_what_check_counts_in_any_layout(tmp_path: Path, options: str, forgotten: int) -> None:
    path = tmp_path / "disk.qcow2"
    image_of(path, mixed(random.Random(1), 4 * MIB if "512" in options else 16 * MIB), options)
    entry = 16 if "extended_l2" in options else 8
    overwrite(path, l2_table(path), bytes(entry * forgotten))
    assert checked(path) == forgotten
    assert leaks_of(path) == Leaks(forgotten)


def test_counts_what_check_counts_among_compressed_clusters(tmp_path: Path) -> None:
    image_of(tmp_path / "plain.qcow2", mixed(random.Random(2), 16 * MIB))
    path = tmp_path / "disk.qcow2"
    qemu_img("convert", "-c", "-O", "qcow2", tmp_path / "plain.qcow2", path)
    assert leaks_of(path) == Leaks(0)
    overwrite(path, l2_table(path), bytes(8 * 120))
    # check also counts the clusters that some of the forgotten ones shared with others: these are still in use.
    assert 0 < (leaks_of(path).clusters or 0) <= checked(path)
    overwrite(path, l2_table(path), bytes(8 * 256))
    assert leaks_of(path).clusters == checked(path) > 20


def test_what_a_snapshot_or_a_bitmap_refers_to_is_no_leak(tmp_path: Path) -> None:
    path = image_of(tmp_path / "disk.qcow2", mixed(random.Random(3), 16 * MIB))
    qemu_img("snapshot", "-c", "one", path)
    qemu_io(path, "write -P 7 1M 4M")
    qemu_img("snapshot", "-c", "a second one with a long name", path)
    qemu_io(path, "discard 0 2M")
    qemu_img("bitmap", "--add", path, "dirty")
    qemu_img("bitmap", "--add", "-g", "4k", path, "finer")
    qemu_io(path, "write -P 9 6M 64k")
    found = leaks_of(path)
    assert (checked(path), found.clusters) == (0, 0)
    assert found.bitmaps_bytes >= 3 * 65536
    overwrite(path, l2_table(path) + 8 * 96, bytes(8))  # written since, so that no snapshot has it
    assert leaks_of(path).clusters == checked(path) == 1


def test_does_not_guess_where_tables_contradict_each_other(tmp_path: Path) -> None:
    path = image_of(tmp_path / "disk.qcow2", mixed(random.Random(4), 8 * MIB))
    sound, table, refcounts = path.read_bytes(), l2_table(path), number_at(path, ">Q", 48)
    block = number_at(path, ">Q", refcounts)
    for offset, content, words in (
        (block + 2 * 20, bytes(2), "no refcount"),
        (table, struct.pack(">Q", 1 << 63 | 65536 * 20 + 512), "does not start at a cluster"),
        (table, struct.pack(">Q", 1 << 63 | 1 << 50), "contradict"),
        (table, struct.pack(">Q", 1 << 62 | 65536 * 20), "two things"),
        (refcounts, struct.pack(">Q", block + 512), "does not start at a cluster"),
        (refcounts, struct.pack(">Q", 1 << 50), "contradict"),
        (48, struct.pack(">Q", 1 << 40), "contradict"),
    ):
        path.write_bytes(sound)
        overwrite(path, offset, content)
        found = leaks_of(path)
        assert found.clusters is None, words
        assert words in found.reason


def test_a_sample_gives_up_in_time_and_says_so(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", "preallocation=metadata", "64G")
    assert leaks_of(path, deadline=0.0).clusters is None
    assert "analyze it fully" in leaks_of(path, deadline=0.0).reason
    assert leaks_of(path) == Leaks(0)


def test_stops_when_the_controller_says_so(tmp_path: Path) -> None:
    path = image_of(tmp_path / "disk.qcow2", mixed(random.Random(5), MIB))
    with pytest.raises(StoppedError):
        leaks_of(path, check=cancel)
