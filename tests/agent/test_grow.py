"""An image grows: what it held is read as before, and what is new reads as zeros."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import ask, image_info, leftovers, make_image, qemu_img, reclaim_args, undo_args, write

pytestmark = pytest.mark.qemu
MIB = 1 << 20


def grow_args(path: Path, *below: Path, size: int = 20 * MIB, form: str = "qcow2") -> dict[str, Any]:
    args = reclaim_args(path, *below, format=form)
    del args["method"]
    return args | {"size": size}


def reads(path: Path, form: str, expected: Path) -> bool:
    """Whether the beginning is what it was, and the rest zeros: what comparing without ``-s`` says."""
    compare: list[str | Path] = ["qemu-img", "compare", "-f", form, "-F", "qcow2", path, expected]
    return subprocess.run(compare, capture_output=True).returncode == 0


@pytest.mark.parametrize("options", ["", "compat=0.10", "cluster_size=4k", "extended_l2=on", "lazy_refcounts=on"])
def test_a_qcow2_grows_and_reads_as_before(pool: Path, tmp_path: Path, options: str) -> None:
    path, before = pool / "vm.qcow2", tmp_path / "before.qcow2"
    make_image(path, "8M", options)
    qemu_img("convert", "-O", "qcow2", path, before)
    result = ask("grow", grow_args(path))
    assert (result.get("swapped"), result.get("virtual_size")) == (True, 20 * MIB), result
    assert image_info(path)["virtual-size"] == 20 * MIB
    assert reads(path, "qcow2", before)


def test_the_original_waits_and_comes_back(pool: Path) -> None:
    path = pool / "vm.qcow2"
    make_image(path, "8M")
    inode = path.stat().st_ino
    assert ask("grow", grow_args(path))["swapped"]
    undone = ask("undo", undo_args(path), job="u1")
    assert undone.get("inode") == inode, undone
    assert image_info(path)["virtual-size"] == 8 * MIB
    assert leftovers(pool) == set()


def test_an_overlay_grows_over_a_longer_base_and_shows_nothing_of_it(pool: Path, tmp_path: Path) -> None:
    base, path, before = pool / "base.qcow2", pool / "over.qcow2", tmp_path / "before.qcow2"
    make_image(base, "32M")
    write(base, 0x77, "9M", "4M")
    qemu_img("create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", path, "8M")
    write(path, 0x11, "1M", "1M")
    qemu_img("convert", "-O", "qcow2", path, before)
    assert ask("grow", grow_args(path, base))["swapped"]
    assert image_info(path)["backing-filename"] == "base.qcow2"
    assert reads(path, "qcow2", before)


def test_snapshots_and_bitmaps_stay(pool: Path) -> None:
    path = pool / "vm.qcow2"
    make_image(path, "8M")
    qemu_img("snapshot", "-c", "before", path)
    qemu_img("bitmap", "--add", path, "backup-1")
    write(path, 0x22, "0", "1M")
    assert ask("grow", grow_args(path))["swapped"]
    info = image_info(path)
    assert [one["name"] for one in info["snapshots"]] == ["before"]
    assert [one["name"] for one in info["format-specific"]["data"]["bitmaps"]] == ["backup-1"]


def test_a_raw_image_is_lengthened_where_it_stands(pool: Path) -> None:
    path = pool / "vm.raw"
    path.write_bytes(os.urandom(3 * MIB))
    before, inode = path.read_bytes(), path.stat().st_ino
    result = ask("grow", grow_args(path, form="raw"))
    assert (result.get("swapped"), result.get("virtual_size")) == (False, 20 * MIB), result
    assert (path.stat().st_size, path.stat().st_ino) == (20 * MIB, inode)
    assert path.read_bytes() == before + bytes(17 * MIB)
    assert leftovers(pool) == set()


@pytest.mark.parametrize(("form", "size"), [("qcow2", 8 * MIB), ("qcow2", MIB), ("qcow2", 20 * MIB + 1), ("raw", MIB)])
def test_nothing_shrinks(pool: Path, form: str, size: int) -> None:
    path = pool / f"vm.{form}"
    qemu_img("create", "-q", "-f", form, path, "8M")
    before = path.read_bytes()
    assert ask("grow", grow_args(path, size=size, form=form))["code"] == "invalid"
    assert path.read_bytes() == before


@pytest.mark.parametrize("form", ["qcow2", "raw"])
def test_what_somebody_has_open_is_left_alone(pool: Path, form: str) -> None:
    path = pool / f"vm.{form}"
    qemu_img("create", "-q", "-f", form, path, "8M")
    args = grow_args(path, form=form)
    with path.open("r+b"):
        assert ask("grow", args)["code"] == "image_in_use"
    assert image_info(path, form)["virtual-size"] == 8 * MIB


def test_other_formats_say_what_to_do(pool: Path) -> None:
    path = pool / "vm.vdi"
    qemu_img("create", "-q", "-f", "vdi", path, "8M")
    assert ask("grow", grow_args(path, form="vdi"))["code"] == "unsupported_subformat"
