"""How an image was preallocated, told from real files; what cannot be told is not claimed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from storage_admin.agent.host import space
from tests.agent.formats.test_against_qemu import create, qemu_img
from tests.agent.harness import qemu_io
from tests.agent.test_analyze import MIB, allocated, analyzed
from tests.agent.test_estimate_by_method import dug
from tests.harness.filesystems import loop_filesystem, new_file

pytestmark = pytest.mark.qemu

SIZE = 64 * MIB


def told(path: Path, form: str = "qcow2") -> str:
    allocated(path)
    found: set[str] = {analyzed(path, form, mode=mode)["preallocation"] for mode in ("sample", "full")}
    assert len(found) == 1
    return found.pop()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", ["", ",cluster_size=4k", ",cluster_size=2M", ",extended_l2=on", ",compat=0.10"])
@pytest.mark.parametrize(
    ("mode", "expected"), [("off", "off"), ("metadata", "metadata"), ("falloc", "falloc"), ("full", "filled")]
)
def test_each_preallocation_of_qemu_is_told_when_it_is_new_and_when_a_guest_wrote_to_half_of_it(
    tmp_path: Path, options: str, mode: str, expected: str
) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", f"preallocation={mode}{options}", str(SIZE))
    assert told(path) == expected
    qemu_io(path, *(f"write -P 7 {at}M 1M" for at in range(1, 32)))
    assert told(path) == expected


@pytest.mark.parametrize(("mode", "expected"), [("off", "off"), ("falloc", "falloc"), ("full", "filled")])
def test_so_is_that_of_a_raw_image(tmp_path: Path, mode: str, expected: str) -> None:
    path = create(tmp_path / "disk.raw", "raw", f"preallocation={mode}", str(SIZE))
    assert told(path, "raw") == expected


def test_an_image_that_is_written_full_of_zeros_for_a_reclaim_is_no_preallocation(tmp_path: Path) -> None:
    qcow2, raw = tmp_path / "disk.qcow2", tmp_path / "disk.raw"
    create(qcow2, "qcow2", "", str(SIZE))
    qemu_io(qcow2, f"write -P 7 {SIZE // 2} 4M", f"write -P 0 0 {SIZE}")
    raw.write_bytes(bytes(SIZE))
    assert told(qcow2) == told(raw, "raw") == "filled"
    dug(raw)
    assert told(raw, "raw") == "off"


def test_a_metadata_preallocation_that_was_written_full_and_dug_in_place_is_one_again(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", "preallocation=metadata", str(SIZE))
    qemu_io(path, f"write -P 0 0 {SIZE}")
    assert told(path) == "filled"
    dug(path)
    assert told(path) == "metadata"


def test_clusters_in_the_order_of_a_guest_are_no_preallocation_once_they_are_holes(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", "", str(SIZE))
    order = [(at * 37) % 64 for at in range(64)]
    qemu_io(path, *(f"write -P 0 {at}M 1M" for at in order))
    dug(path)
    assert told(path) == "off"


def test_what_a_guest_zeroed_at_once_is_no_preallocation(tmp_path: Path) -> None:
    """A file system's log: the host only marks such blocks as unwritten."""
    path = new_file(tmp_path / "disk.raw", os.urandom(SIZE))
    allocated(path)
    subprocess.run(["fallocate", "--zero-range", "-o", "1M", "-l", "1M", path], check=True)
    assert told(path, "raw") == "filled"


def test_what_xfs_reserves_around_a_write_is_no_preallocation(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path, 512, form="xfs") as place:
        written, reserved = create(place / "off.raw", "raw", "", str(SIZE)), place / "falloc.raw"
        create(reserved, "raw", "preallocation=falloc", str(SIZE))
        qemu_io(written, *(f"write -P 7 {at}M 4k" for at in range(64)), form="raw")
        assert min(allocated(written), allocated(reserved)) >= SIZE
        assert (told(written, "raw"), told(reserved, "raw")) == ("filled", "falloc")


def test_the_sums_of_a_file_are_those_of_filefrag(tmp_path: Path) -> None:
    """Shared, reserved and written blocks of a file with a clone, beside what filefrag lists."""
    with loop_filesystem(tmp_path, 512, form="xfs") as place:
        path = new_file(place / "disk.raw", os.urandom(20 * MIB))
        subprocess.run(["cp", "--reflink=always", path, place / "clone"], check=True)
        with path.open("r+b") as file:
            file.seek(4 * MIB)
            file.write(b"x" * MIB)
            os.posix_fallocate(file.fileno(), 24 * MIB, 8 * MIB)
            os.fsync(file.fileno())
            found = space.extents_of(file.fileno(), lambda: None)
        listed = subprocess.run(["filefrag", "-v", path], check=True, capture_output=True, text=True).stdout
        rows = [line.split(":") for line in listed.splitlines() if line.strip()[:1].isdigit() and ".." in line]
        sums = {
            word: sum(int(row[3]) * 4096 for row in rows if word in row[-1]) for word in ("", "unwritten", "shared")
        }
        assert found == space.Extents(sums[""], sums["unwritten"], sums["shared"])
        assert sums["shared"] == 19 * MIB


def test_without_the_filesystem_s_list_the_blocks_and_the_data_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_ask", lambda *_arguments: None)
    for mode, expected in (("off", "off"), ("metadata", "metadata"), ("falloc", "falloc"), ("full", "filled")):
        path = create(tmp_path / f"{mode}.qcow2", "qcow2", f"preallocation={mode}", str(SIZE))
        assert told(path) == expected
    qemu_img("convert", "-O", "raw", tmp_path / "off.qcow2", tmp_path / "off.raw")
    assert told(tmp_path / "off.raw", "raw") == "off"
