"""An image's metadata is looked through, and repaired on a copy."""

import os
import struct
from pathlib import Path

import pytest

from tests.agent.harness import ask, leftovers, number_at, overwrite, qemu_img, rewrite_args, same_content, stamp
from tests.agent.test_estimate_leaks import OFFSET, l2_table
from tests.agent.test_reclaim import keep_copy

pytestmark = pytest.mark.qemu


def leak(path: Path, clusters: int = 3) -> None:
    """Counts clusters at the end of the file that nothing refers to."""
    end = -(-path.stat().st_size // 65536)
    overwrite(path, _refcount_of(path, end), struct.pack(">H", 1) * clusters)
    os.truncate(path, (end + clusters) * 65536)
    overwrite(path, end * 65536, b"left over" * 20000)


def break_entry(path: Path) -> None:
    """Lets the first entry of the first L2 table point to a cluster that is counted as free."""
    entry = number_at(path, ">Q", l2_table(path)) & OFFSET
    overwrite(path, _refcount_of(path, entry // 65536), bytes(2))


def _refcount_of(path: Path, cluster: int) -> int:
    """Where it stands, in the first block of them."""
    return number_at(path, ">Q", number_at(path, ">Q", 48)) + cluster * 2


def test_a_sound_image_has_no_errors_and_nothing_is_written(image: Path) -> None:
    before = stamp(image)
    assert ask("check", rewrite_args(image)) == {"found": {"corruptions": 0, "leaks": 0, "errors": 0}, "swapped": False}
    assert stamp(image) == before
    assert leftovers(image.parent) == set()


def test_leaks_are_counted_and_given_back_on_a_copy(image: Path) -> None:
    was = keep_copy(image)
    leak(image)
    assert ask("check", rewrite_args(image))["found"] == {"corruptions": 0, "leaks": 3, "errors": 0}
    result = ask("check", rewrite_args(image, repair="leaks"))
    assert result.get("swapped"), result
    assert result["found"]["leaks"] == 3
    assert b"No errors were found" in qemu_img("check", image)
    assert same_content(image, was)


def test_errors_are_not_mended_unless_all_is_asked_for(image: Path) -> None:
    break_entry(image)
    before = stamp(image)
    assert ask("check", rewrite_args(image))["found"]["corruptions"] > 0
    assert ask("check", rewrite_args(image, repair="leaks"))["code"] == "dirty_or_corrupt"
    assert stamp(image) == before
    result = ask("check", rewrite_args(image, repair="all"), job="j2")
    assert result.get("swapped"), result
    assert result["found"]["corruptions"] > 0
    assert b"No errors were found" in qemu_img("check", image)


def test_snapshots_survive_a_repair(image: Path) -> None:
    qemu_img("snapshot", "-c", "before the update", image)
    leak(image)
    assert ask("check", rewrite_args(image, repair="leaks"))["swapped"]
    assert b"before the update" in qemu_img("snapshot", "-l", image)


def test_an_image_that_is_marked_dirty_is_repaired(image: Path) -> None:
    overwrite(image, 72, struct.pack(">Q", 1))
    was = keep_copy(image)
    result = ask("check", rewrite_args(image, repair="all"))
    assert result.get("swapped"), result
    assert number_at(image, ">Q", 72) & 3 == 0
    assert same_content(image, was)


def test_a_raw_image_has_nothing_to_check(tmp_path: Path) -> None:
    (tmp_path / "disk.raw").write_bytes(bytes(65536))
    assert ask("check", rewrite_args(tmp_path / "disk.raw", format="raw"))["code"] == "unsupported_subformat"
