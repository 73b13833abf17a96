"""What is freed of an image whose blocks a reflinked copy shares: what df says, not what stat says."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import ask, location, overwrite, qemu_img, reclaim_args, recover_args, undo_args, write
from tests.agent.test_analyze import analyzed
from tests.agent.test_in_place import MIB, reclaim
from tests.agent.test_scan import scanned
from tests.harness.filesystems import loop_filesystem, new_file, new_folder

pytestmark = pytest.mark.qemu

ZEROS = 60 * MIB


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with loop_filesystem(tmp_path_factory.mktemp("xfs"), 512, form="xfs") as place:
        yield place


def used(place: Path) -> int:
    subprocess.run(["sync", "-f", place], check=True)
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def image_with_clone(folder: Path, own: int) -> Path:
    """Zeros and data that a clone shares, and zeros of its own, in bytes."""
    folder.mkdir()
    path = new_file(folder / "vm.raw", os.urandom(4 * MIB) + bytes(ZEROS))
    subprocess.run(["cp", "--reflink=always", path, folder / "clone.raw"], check=True)
    overwrite(path, 4 * MIB, bytes(own))
    subprocess.run(["sync", "-f", folder], check=True)
    return path


@pytest.mark.parametrize("own", [0, 24 * MIB])
def test_holes_free_what_df_says_and_the_analysis_says_so_before(disk: Path, own: int) -> None:
    path = image_with_clone(disk / f"own{own}", own)
    told = analyzed(path, "raw", mode="full")
    before, taken = used(disk), path.stat().st_blocks * 512
    answer = reclaim(path, form="raw", shared=True)
    freed = before - used(disk)
    assert answer["before_bytes"] == taken
    assert answer["before_bytes"] - answer["after_bytes"] >= ZEROS
    # The filesystem's own tables change by some blocks.
    assert abs(answer["freed_bytes"] - own) <= MIB
    assert abs(freed - own) <= MIB
    assert told["basis"]["shared_bytes"] == 4 * MIB + ZEROS - own
    numbers = told["methods"]["in_place"]
    assert numbers["reclaimable_low"] <= max(answer["freed_bytes"], 0) <= numbers["reclaimable_high"]
    # A copy gives back what was the image's own alone, and takes what it writes.
    assert told["methods"]["copy"]["reclaimable_bytes"] <= own


def reflink(path: Path, name: str) -> None:
    subprocess.run(["cp", "--reflink=always", path, path.parent / name], check=True)


def freed_by(disk: Path, verb: str, args: dict[str, Any], job: str) -> tuple[int, dict[str, Any]]:
    """What ``df`` says that a verb has freed, and its answer."""
    before = used(disk)
    answer = ask(verb, args, job=job)
    assert "code" not in answer, answer
    return before - used(disk), answer


def chain(folder: Path) -> list[Path]:
    """An overlay with 8 MiB of its own on a base with 8 MiB; the overlay first."""
    folder.mkdir()
    base, top = folder / "base.qcow2", folder / "top.qcow2"
    for path, below in ((base, []), (top, ["-b", "base.qcow2", "-F", "qcow2"])):
        qemu_img("create", "-q", "-f", "qcow2", *below, path, "64M")
        write(path, 0x31 + len(below), f"{8 * len(below)}M", "8M")
    subprocess.run(["sync", "-f", folder], check=True)
    return [top, base]


def test_a_file_that_is_dropped_frees_what_nobody_shares(disk: Path) -> None:
    path = new_file(new_folder(disk / "drop") / "copy.raw", os.urandom(24 * MIB))
    reflink(path, "clone.raw")
    overwrite(path, 0, os.urandom(8 * MIB))
    subprocess.run(["sync", "-f", disk], check=True)
    freed, ended = freed_by(disk, "drop", location(path) | {"since": 0}, "d1")
    assert abs(freed - 8 * MIB) <= MIB
    assert abs(freed - ended["freed_bytes"]) <= MIB


@pytest.mark.parametrize("end", ["undo", "discard_undo"])
def test_what_a_sibling_shares_with_its_original_is_counted_once(disk: Path, end: str) -> None:
    """A flattened overlay is a reflink of the overlay, with the base's data written into it."""
    top, base = chain(disk / f"flat-{end}")
    taken, done = freed_by(disk, "flatten", reclaim_args(top, base, method="rebase"), "j1")
    assert done["swapped"]
    assert done["after_bytes"] >= 16 * MIB
    assert abs(-taken - done["made_bytes"]) <= MIB
    assert abs(done["made_bytes"] - 8 * MIB) <= MIB
    freed, ended = freed_by(disk, end, undo_args(top), "u1")
    assert abs(freed - ended["freed_bytes"]) <= MIB
    if end == "undo":
        assert ended["freed_bytes"] == done["made_bytes"]
    else:
        assert done["held_bytes"] == ended["freed_bytes"] <= 2 * MIB


def test_an_undo_frees_nothing_that_a_copy_of_the_new_image_has(disk: Path) -> None:
    folder = new_folder(disk / "cloned-new")
    path = new_file(folder / "vm.raw", os.urandom(8 * MIB) + bytes(8 * MIB))
    done = ask("reclaim", reclaim_args(path, format="raw", method="copy"))
    assert done["made_bytes"] == done["after_bytes"] >= 8 * MIB
    reflink(path, "clone.raw")
    freed, undone = freed_by(disk, "undo", undo_args(path), "u1")
    assert undone["before_bytes"] == done["after_bytes"]
    assert max(abs(freed), abs(undone["freed_bytes"])) <= MIB // 4


def test_without_an_undo_copy_what_the_original_shared_stays_taken(disk: Path) -> None:
    top, base = chain(disk / "no-undo")
    reflink(top, "clone.qcow2")
    freed, done = freed_by(disk, "flatten", reclaim_args(top, base, method="rebase", undo_hours=0), "j1")
    assert done["swapped"]
    assert abs(done["freed_bytes"] - freed) <= MIB
    assert abs(freed + 8 * MIB) <= MIB


def test_a_scan_counts_of_an_undo_copy_what_its_removal_frees(disk: Path) -> None:
    top, base = chain(disk / "scanned")
    held = ask("flatten", reclaim_args(top, base, method="rebase"))["held_bytes"]
    journalled = ask("recover", recover_args(top.parent), job="r1")["recovered"][0]
    assert journalled["undo_bytes"] == held <= 2 * MIB < (top.parent / ".sa-j1.orig").stat().st_blocks * 512
    assert scanned(top.parent).one("pool")["undo_bytes"] == held
