"""A conversion that takes its image's place: another name, another format, the original kept as undo copy."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import (
    Agent,
    Writer,
    ask,
    image_info,
    leftovers,
    make_image,
    qemu_img,
    same_content,
    stamp,
    undo_args,
    write,
)
from tests.agent.test_convert import convert_args, same

pytestmark = pytest.mark.qemu

KEPT = {".sa-j1.journal", ".sa-j1.orig"}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    make_image(tmp_path / "vm.qcow2")
    return tmp_path / "vm.qcow2"


def replace_args(path: Path, *below: Path, form: str, source: str = "qcow2", **more: Any) -> dict[str, Any]:
    """The arguments of a conversion into its image's place, under the stem with another extension."""
    options = more.pop("options", {})
    to = more.pop("to", path.with_suffix(f".{form}"))
    args = convert_args(path, *below, to=to, form=form, source=source, **options) | more
    args["target"]["replaces"] = True
    return args


@pytest.mark.parametrize("form", ["raw", "vmdk", "vdi", "vhdx", "vpc"])
def test_the_other_format_stands_alone_under_the_new_name_and_undo_brings_the_image_back(
    tmp_path: Path, image: Path, form: str
) -> None:
    qemu_img("convert", "-O", "qcow2", image, tmp_path.parent / "before.qcow2")
    os.setxattr(image, "user.note", b"kept")
    image.chmod(0o640)
    original, new = image.stat(), image.with_suffix(f".{form}")
    result = ask("convert", replace_args(image, form=form))
    assert result.get("swapped"), result
    assert (result["inode"], result["freed_bytes"]) == (new.stat().st_ino, 0)
    assert result["held_bytes"] == original.st_blocks * 512
    assert not image.exists()
    assert same(tmp_path.parent / "before.qcow2", "qcow2", new, form)
    assert (new.stat().st_mode, new.stat().st_nlink) == (original.st_mode, 1)
    assert os.getxattr(new, "user.note") == b"kept"
    assert leftovers(tmp_path) == KEPT
    undone = ask("undo", undo_args(new), job="u1")
    assert undone.get("inode") == original.st_ino == image.stat().st_ino
    assert not new.exists()
    assert (image.stat().st_nlink, image.stat().st_mtime_ns) == (1, original.st_mtime_ns)
    assert leftovers(tmp_path) == set()


def test_without_undo_hours_the_original_goes_at_once(tmp_path: Path, image: Path) -> None:
    before = image.stat().st_blocks * 512
    result = ask("convert", replace_args(image, form="raw", undo_hours=0.0))
    new = tmp_path / "vm.raw"
    assert result["freed_bytes"] == before - new.stat().st_blocks * 512
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["vm.raw"]


def test_the_same_name_and_format_with_other_options(tmp_path: Path, image: Path) -> None:
    inode = image.stat().st_ino
    result = ask("convert", replace_args(image, form="qcow2", options={"cluster_size": "2M"}))
    assert result.get("swapped"), result
    assert image_info(image)["cluster-size"] == 2 << 20
    assert leftovers(tmp_path) == KEPT
    assert ask("undo", undo_args(image), job="u1")["inode"] == inode


def test_an_overlay_becomes_an_image_that_stands_alone(tmp_path: Path, image: Path) -> None:
    top = tmp_path / "top.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-b", "vm.qcow2", "-F", "qcow2", top)
    write(top, 0x33, "1M", "1M")
    base, whole = stamp(image), tmp_path.parent / "whole.qcow2"
    qemu_img("convert", "-O", "qcow2", top, whole)
    assert ask("convert", replace_args(top, image, form="raw")).get("swapped")
    assert same(whole, "qcow2", tmp_path / "top.raw", "raw")
    assert stamp(image) == base
    assert ask("undo", undo_args(tmp_path / "top.raw"), job="u1").get("inode")
    assert same_content(top, whole)


def test_a_name_that_is_taken_is_refused_and_nothing_changed(tmp_path: Path, image: Path) -> None:
    (tmp_path / "vm.raw").write_text("mine")
    was = stamp(image)
    assert ask("convert", replace_args(image, form="raw"))["code"] == "target_exists"
    assert (tmp_path / "vm.raw").read_text() == "mine"
    assert (stamp(image), leftovers(tmp_path)) == (was, set())


def test_a_name_that_is_taken_in_the_last_moment_is_refused(tmp_path: Path, image: Path) -> None:
    with Agent() as agent:
        agent.request("convert", replace_args(image, form="raw"))
        agent.until("ready")
        (tmp_path / "vm.raw").write_text("mine")
        agent.say("go", generation=1)
        assert agent.answer()["code"] == "target_exists"
    assert (tmp_path / "vm.raw").read_text() == "mine"
    assert image.stat().st_nlink == 1
    assert leftovers(tmp_path) == set()


def test_a_guest_that_starts_right_before_the_swap_wins(tmp_path: Path, image: Path) -> None:
    with Agent() as agent:
        agent.request("convert", replace_args(image, form="raw"))
        agent.until("ready")
        with Writer(image) as guest:
            agent.say("go", generation=1)
            assert agent.answer()["code"] in {"image_in_use", "stale_plan"}
            guest.write(0x12, "0", "64k")
    assert image.exists()
    assert not (tmp_path / "vm.raw").exists()
    assert leftovers(tmp_path) == set()


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
    tmp_path: Path, image: Path, change: dict[str, Any], code: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    if "snapshot" in change:
        qemu_img("snapshot", "-c", "one", image)
    if "link" in change:
        os.link(image, tmp_path / "second.qcow2")
    if "bitmap" in change:
        qemu_img("bitmap", "--add", image, "b0")
    was = stamp(image)
    to = {"to": tmp_path / change["to"]} if "to" in change else {}
    assert ask("convert", replace_args(image, form=change.get("form", "raw"), **to)).get("code") == code
    assert (stamp(image), leftovers(tmp_path)) == (was, set())


def test_undo_is_refused_where_the_old_name_is_taken_or_the_new_image_was_written_to(
    tmp_path: Path, image: Path
) -> None:
    assert ask("convert", replace_args(image, form="raw")).get("swapped")
    new = tmp_path / "vm.raw"
    image.write_text("mine")
    assert ask("undo", undo_args(new), job="u1")["code"] == "target_exists"
    image.unlink()
    write(new, 0x55, "0", "64k", "raw")
    assert ask("undo", undo_args(new), job="u2")["code"] == "undo_written_to"
    assert ask("undo", undo_args(new, force=True), job="u3").get("inode")
    assert image.exists()
    assert not new.exists()


def test_the_undo_copy_can_be_given_up(tmp_path: Path, image: Path) -> None:
    assert ask("convert", replace_args(image, form="raw")).get("swapped")
    assert ask("discard_undo", undo_args(tmp_path / "vm.raw"), job="d1")["found"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["vm.raw"]
