"""An image grows: what it held is read as before, and what is new reads as zeros."""

import os
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.rewrite.chain import Chain
from storage_admin.agent.verbs import rewrites
from tests.agent.harness import (
    ask,
    image_info,
    kept,
    leftovers,
    make_image,
    qemu_img,
    reads_as,
    rewrite_args,
    undo_args,
    write,
)
from tests.agent.recording import RecordingIO, request
from tests.harness.filesystems import new_file
from tests.harness.patching import do_after
from tests.working import create

pytestmark = pytest.mark.qemu
MIB = 1 << 20


def grow_args(path: Path, *below: Path, size: int = 20 * MIB, form: str = "qcow2") -> dict[str, Any]:
    return rewrite_args(path, *below, format=form, size=size)


@pytest.mark.parametrize("options", ["", "compat=0.10", "cluster_size=4k", "extended_l2=on", "lazy_refcounts=on"])
def test_a_qcow2_grows_and_reads_as_before(pool: Path, tmp_path: Path, options: str) -> None:
    path = make_image(pool / "vm.qcow2", "8M", options)
    before = kept(path, tmp_path)
    result = ask("grow", grow_args(path))
    assert (result.get("swapped"), result.get("virtual_size")) == (True, 20 * MIB), result
    assert image_info(path)["virtual-size"] == 20 * MIB
    assert reads_as(path, before)


def test_the_original_waits_and_comes_back(pool: Path) -> None:
    path = make_image(pool / "vm.qcow2", "8M")
    inode = path.stat().st_ino
    assert ask("grow", grow_args(path))["swapped"]
    undone = ask("undo", undo_args(path), job="u1")
    assert undone.get("inode") == inode, undone
    assert image_info(path)["virtual-size"] == 8 * MIB
    assert leftovers(pool) == set()


def test_an_overlay_grows_over_a_longer_base_and_shows_nothing_of_it(pool: Path, tmp_path: Path) -> None:
    base, path = pool / "base.qcow2", pool / "over.qcow2"
    make_image(base, "32M")
    write(base, 0x77, "9M", "4M")
    qemu_img("create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", path, "8M")
    write(path, 0x11, "1M", "1M")
    before = kept(path, tmp_path)
    assert ask("grow", grow_args(path, base))["swapped"]
    assert image_info(path)["backing-filename"] == "base.qcow2"
    assert reads_as(path, before)


def test_snapshots_and_bitmaps_stay(pool: Path) -> None:
    path = make_image(pool / "vm.qcow2", "8M")
    qemu_img("snapshot", "-c", "before", path)
    qemu_img("bitmap", "--add", path, "backup-1")
    write(path, 0x22, "0", "1M")
    assert ask("grow", grow_args(path))["swapped"]
    info = image_info(path)
    assert [one["name"] for one in info["snapshots"]] == ["before"]
    assert [one["name"] for one in info["format-specific"]["data"]["bitmaps"]] == ["backup-1"]


def test_a_raw_image_is_lengthened_where_it_stands(pool: Path) -> None:
    path = new_file(pool / "vm.raw", os.urandom(3 * MIB))
    before, inode = path.read_bytes(), path.stat().st_ino
    result = ask("grow", grow_args(path, form="raw"))
    assert (result.get("swapped"), result.get("virtual_size")) == (False, 20 * MIB), result
    assert (path.stat().st_size, path.stat().st_ino) == (20 * MIB, inode)
    assert path.read_bytes() == before + bytes(17 * MIB)
    assert leftovers(pool) == set()


def test_what_somebody_appends_in_the_last_moment_is_not_cut_off(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = new_file(pool / "vm.raw", os.urandom(3 * MIB))
    more = os.urandom(20 * MIB)

    def append(_: object) -> None:
        with path.open("ab") as file:
            file.write(more)

    do_after(monkeypatch, Chain, "refuse_stale", append)
    before = path.read_bytes()
    rewrites.grow(request("grow", **grow_args(path, form="raw")), RecordingIO())
    assert path.read_bytes() == before + more


@pytest.mark.parametrize(("form", "size"), [("qcow2", 8 * MIB), ("qcow2", MIB), ("qcow2", 20 * MIB + 1), ("raw", MIB)])
def test_nothing_shrinks(pool: Path, form: str, size: int) -> None:
    path = create(pool / f"vm.{form}", form=form)
    before = path.read_bytes()
    assert ask("grow", grow_args(path, size=size, form=form))["code"] == "invalid"
    assert path.read_bytes() == before


@pytest.mark.parametrize("form", ["qcow2", "raw"])
def test_what_somebody_has_open_is_left_alone(pool: Path, form: str) -> None:
    path = create(pool / f"vm.{form}", form=form)
    args = grow_args(path, form=form)
    with path.open("r+b"):
        assert ask("grow", args)["code"] == "image_in_use"
    assert image_info(path, form)["virtual-size"] == 8 * MIB


def test_other_formats_say_what_to_do(pool: Path) -> None:
    path = create(pool / "vm.vdi", form="vdi")
    assert ask("grow", grow_args(path, form="vdi"))["code"] == "unsupported_subformat"
