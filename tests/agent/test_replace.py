"""A conversion that takes its image's place: another name, another format, the original kept as undo copy."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import (
    Writer,
    ask,
    at_ready,
    image_info,
    kept,
    leftovers,
    qemu_img,
    reads_as,
    same_content,
    stamp,
    undo_args,
    write,
)
from tests.agent.test_convert import convert_args
from tests.working import create

pytestmark = pytest.mark.qemu

KEPT = {".sa-j1.journal", ".sa-j1.orig"}


def replace_args(path: Path, *below: Path, form: str, source: str = "qcow2", **more: Any) -> dict[str, Any]:
    """The arguments of a conversion into its image's place, under the stem with another extension."""
    options = more.pop("options", {})
    to = more.pop("to", path.with_suffix(f".{form}"))
    args = convert_args(path, *below, to=to, form=form, source=source, **options) | more
    args["target"]["replaces"] = True
    return args


@pytest.mark.parametrize("form", ["raw", "vmdk", "vdi", "vhdx", "vpc"])
def test_the_other_format_stands_alone_under_the_new_name_and_undo_brings_the_image_back(
    pool: Path, image: Path, form: str
) -> None:
    before = kept(image, pool.parent)
    os.setxattr(image, "user.note", b"kept")
    image.chmod(0o640)
    original, new = image.stat(), image.with_suffix(f".{form}")
    result = ask("convert", replace_args(image, form=form))
    assert result.get("swapped"), result
    assert (result["inode"], result["freed_bytes"]) == (new.stat().st_ino, 0)
    assert result["held_bytes"] == original.st_blocks * 512
    assert not image.exists()
    assert reads_as(before, new, "qcow2", form)
    assert (new.stat().st_mode, new.stat().st_nlink) == (original.st_mode, 1)
    assert os.getxattr(new, "user.note") == b"kept"
    assert leftovers(pool) == KEPT
    undone = ask("undo", undo_args(new), job="u1")
    assert undone.get("inode") == original.st_ino == image.stat().st_ino
    assert not new.exists()
    assert (image.stat().st_nlink, image.stat().st_mtime_ns) == (1, original.st_mtime_ns)
    assert leftovers(pool) == set()


def test_without_undo_hours_the_original_goes_at_once(pool: Path, image: Path) -> None:
    before = image.stat().st_blocks * 512
    result = ask("convert", replace_args(image, form="raw", undo_hours=0.0))
    new = pool / "vm.raw"
    assert result["freed_bytes"] == before - new.stat().st_blocks * 512
    assert sorted(entry.name for entry in pool.iterdir()) == ["vm.raw"]


def test_the_same_name_and_format_with_other_options(pool: Path, image: Path) -> None:
    inode = image.stat().st_ino
    result = ask("convert", replace_args(image, form="qcow2", options={"cluster_size": "2M"}))
    assert result.get("swapped"), result
    assert image_info(image)["cluster-size"] == 2 << 20
    assert leftovers(pool) == KEPT
    assert ask("undo", undo_args(image), job="u1")["inode"] == inode


def test_an_overlay_becomes_an_image_that_stands_alone(pool: Path, image: Path) -> None:
    top = create(pool / "top.qcow2", base="vm.qcow2")
    write(top, 0x33, "1M", "1M")
    base, whole = stamp(image), kept(top, pool.parent)
    assert ask("convert", replace_args(top, image, form="raw")).get("swapped")
    assert reads_as(whole, pool / "top.raw", "qcow2", "raw")
    assert stamp(image) == base
    assert ask("undo", undo_args(pool / "top.raw"), job="u1").get("inode")
    assert same_content(top, whole)


def test_a_name_that_is_taken_is_refused_and_nothing_changed(pool: Path, image: Path) -> None:
    (pool / "vm.raw").write_text("mine")
    was = stamp(image)
    assert ask("convert", replace_args(image, form="raw"))["code"] == "target_exists"
    assert (pool / "vm.raw").read_text() == "mine"
    assert (stamp(image), leftovers(pool)) == (was, set())


def test_a_name_that_is_taken_in_the_last_moment_is_refused(pool: Path, image: Path) -> None:
    with at_ready("convert", replace_args(image, form="raw")) as agent:
        (pool / "vm.raw").write_text("mine")
        assert agent.go()["code"] == "target_exists"
    assert (pool / "vm.raw").read_text() == "mine"
    assert image.stat().st_nlink == 1
    assert leftovers(pool) == set()


def test_a_guest_that_starts_right_before_the_swap_wins(pool: Path, image: Path) -> None:
    with at_ready("convert", replace_args(image, form="raw")) as agent, Writer(image) as guest:
        assert agent.go()["code"] in {"image_in_use", "stale_plan"}
        guest.write(0x12, "0", "64k")
    assert image.exists()
    assert not (pool / "vm.raw").exists()
    assert leftovers(pool) == set()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"to": "elsewhere/vm.raw"}, "invalid"),
        ({"form": "raw", "to": "vm.qcow2"}, "invalid"),
        ({"snapshot": True}, "has_internal_snapshots"),
        ({"link": True}, "hard_linked"),
        ({"bitmap": True}, "unsupported_subformat"),
    ],
)
def test_what_would_be_lost_or_left_behind_is_refused(
    pool: Path, image: Path, change: dict[str, Any], code: str
) -> None:
    (pool / "elsewhere").mkdir()
    if "snapshot" in change:
        qemu_img("snapshot", "-c", "one", image)
    if "link" in change:
        os.link(image, pool / "second.qcow2")
    if "bitmap" in change:
        qemu_img("bitmap", "--add", image, "b0")
    was = stamp(image)
    to = {"to": pool / change["to"]} if "to" in change else {}
    assert ask("convert", replace_args(image, form=change.get("form", "raw"), **to)).get("code") == code
    assert (stamp(image), leftovers(pool)) == (was, set())


def test_undo_is_refused_where_the_old_name_is_taken_or_the_new_image_was_written_to(pool: Path, image: Path) -> None:
    assert ask("convert", replace_args(image, form="raw")).get("swapped")
    new = pool / "vm.raw"
    image.write_text("mine")
    assert ask("undo", undo_args(new), job="u1")["code"] == "target_exists"
    image.unlink()
    write(new, 0x55, "0", "64k", "raw")
    assert ask("undo", undo_args(new), job="u2")["code"] == "undo_written_to"
    assert ask("undo", undo_args(new, force=True), job="u3").get("inode")
    assert image.exists()
    assert not new.exists()


def test_the_undo_copy_can_be_given_up(pool: Path, image: Path) -> None:
    assert ask("convert", replace_args(image, form="raw")).get("swapped")
    assert ask("discard_undo", undo_args(pool / "vm.raw"), job="d1")["found"]
    assert sorted(entry.name for entry in pool.iterdir()) == ["vm.raw"]
