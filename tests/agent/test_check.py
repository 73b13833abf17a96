"""An image's metadata is looked through, and repaired on a copy."""

import struct
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import ask, leftovers, overwrite, qemu_img, rewrite_args, same_content, stamp
from tests.agent.test_reclaim import keep_copy

pytestmark = pytest.mark.qemu


def leak(path: Path, clusters: int = 3) -> None:
    """Counts clusters at the end of the file that nothing refers to."""
    with path.open("r+b") as file:
        table = struct.unpack(">Q", _at(file, 48, 8))[0]
        block = struct.unpack(">Q", _at(file, table, 8))[0]
        end = -(-path.stat().st_size // 65536)
        for number in range(end, end + clusters):
            file.seek(block + number * 2)
            file.write(struct.pack(">H", 1))
        file.truncate((end + clusters) * 65536)
        file.seek(end * 65536)
        file.write(b"left over" * 20000)


def break_entry(path: Path) -> None:
    """Lets the first entry of the first L2 table point to a cluster that is counted as free."""
    with path.open("r+b") as file:
        l1 = struct.unpack(">Q", _at(file, 40, 8))[0]
        l2 = struct.unpack(">Q", _at(file, l1, 8))[0] & 0x00FFFFFFFFFFFE00
        entry = struct.unpack(">Q", _at(file, l2, 8))[0] & 0x00FFFFFFFFFFFE00
        table = struct.unpack(">Q", _at(file, 48, 8))[0]
        block = struct.unpack(">Q", _at(file, table, 8))[0]
        file.seek(block + entry // 65536 * 2)
        file.write(struct.pack(">H", 0))


def _at(file: Any, offset: int, length: int) -> bytes:
    file.seek(offset)
    found: bytes = file.read(length)
    return found


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
    with image.open("rb") as file:
        assert struct.unpack(">Q", _at(file, 72, 8))[0] & 3 == 0
    assert same_content(image, was)


def test_a_raw_image_has_nothing_to_check(tmp_path: Path) -> None:
    (tmp_path / "disk.raw").write_bytes(bytes(65536))
    assert ask("check", rewrite_args(tmp_path / "disk.raw", format="raw"))["code"] == "unsupported_subformat"
