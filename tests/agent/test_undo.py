"""Taking a reclaim back, and giving its undo copy up."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import (
    Agent,
    Writer,
    ask,
    at_ready,
    image_info,
    kept,
    leftovers,
    make_image,
    qemu_img,
    reclaim_args,
    same_content,
    undo_args,
    write,
    written_with_its_times_set_back,
)
from tests.harness.filesystems import immutable

pytestmark = pytest.mark.qemu


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image that was reclaimed by job j1; its original's inode is in ``original``."""
    path = make_image(tmp_path / "vm.qcow2")
    (tmp_path / "original").write_text(str(path.stat().st_ino))
    assert ask("reclaim", reclaim_args(path))["swapped"]
    return path


def original_inode(image: Path) -> int:
    return int((image.parent / "original").read_text())


def discarded(image: Path) -> dict[str, Any]:
    """The result of giving the undo copy up; the stamp of what should have been there is the original's."""
    answer = ask("discard_undo", undo_args(image), job="d1")
    assert answer.pop("original")["inode"] == original_inode(image)
    return answer


def refused(verb: str, image: Path, code: str, job: str = "u1", **changes: Any) -> None:
    before = image.stat() if image.exists() else None
    kept = leftovers(image.parent)
    answer = ask(verb, undo_args(image, **changes), job=job)
    assert answer.get("code") == code, answer
    assert leftovers(image.parent) == kept
    if before is not None:
        assert (image.stat().st_ino, image.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_undo_brings_the_very_file_back(image: Path) -> None:
    reclaimed = image.stat()
    result = ask("undo", undo_args(image), job="u1")
    assert image.stat().st_ino == result["inode"] == original_inode(image)
    assert image_info(image)["format-specific"]["data"]["compression-type"] == "zlib"
    assert result["freed_bytes"] == result["before_bytes"] == reclaimed.st_blocks * 512
    assert result["after_bytes"] == image.stat().st_blocks * 512
    assert leftovers(image.parent) == set()


def test_undo_waits_for_go(image: Path) -> None:
    reclaimed = image.stat().st_ino
    with Agent() as agent:
        agent.request("undo", undo_args(image), job="u1", generation=4)
        agent.until("ready", generation=4)
        assert image.stat().st_ino == reclaimed
        agent.say("cancel")
        assert agent.answer()["code"] == "cancelled"
    assert image.stat().st_ino == reclaimed
    assert leftovers(image.parent) == {".sa-j1.journal", ".sa-j1.orig"}
    assert ask("undo", undo_args(image), job="u2")["inode"] == original_inode(image)


def test_undo_is_refused_once_a_guest_wrote(image: Path) -> None:
    write(image, 0x77, "0", "64k")
    refused("undo", image, "undo_written_to")


def test_a_forced_undo_gives_up_what_was_written(image: Path) -> None:
    write(image, 0x77, "0", "64k")
    assert ask("undo", undo_args(image, force=True), job="u1")["inode"] == original_inode(image)
    assert leftovers(image.parent) == set()


@pytest.mark.parametrize(
    ("verb", "name", "changes"),
    [
        ("undo", "vm.qcow2", {}),
        ("undo", "vm.qcow2", {"force": True}),
        ("undo", ".sa-j1.orig", {}),
        ("discard_undo", ".sa-j1.orig", {}),
    ],
)
def test_neither_is_done_while_somebody_uses_one_of_the_files(
    image: Path, verb: str, name: str, changes: dict[str, Any]
) -> None:
    with Writer(image.parent / name, read_only=verb == "undo"):
        refused(verb, image, "image_in_use", **changes)


def test_a_guest_that_starts_right_before_the_undo_wins(image: Path) -> None:
    with at_ready("undo", undo_args(image), job="u1") as agent, Writer(image) as guest:
        # Opening for writing alone may already have changed the file.
        assert agent.go()["code"] in {"image_in_use", "undo_written_to"}
        guest.write(0x12, "0", "64k")
    assert image.stat().st_ino != original_inode(image)
    assert leftovers(image.parent) == {".sa-j1.journal", ".sa-j1.orig"}


def test_undo_without_a_copy(image: Path) -> None:
    (image.parent / ".sa-j1.orig").unlink()
    refused("undo", image, "undo_missing")


def test_undo_of_a_job_that_left_nothing(image: Path) -> None:
    refused("undo", image, "undo_missing", undo_job="other")
    assert ask("undo", undo_args(image, "../j1"), job="u1")["code"] == "invalid"


def test_undo_with_a_copy_that_somebody_wrote_to(image: Path) -> None:
    write(image.parent / ".sa-j1.orig", 0x66, "0", "64k")
    refused("undo", image, "undo_missing", force=True)


def test_undo_with_a_copy_that_was_written_to_with_its_times_set_back(image: Path) -> None:
    """Its time of change tells; but so it does of a new owner, so that an admin may force it."""
    written_with_its_times_set_back(image.parent / ".sa-j1.orig")
    refused("undo", image, "undo_written_to")
    assert ask("undo", undo_args(image, force=True), job="u2")["inode"] == original_inode(image)


def test_undo_with_a_copy_that_was_exchanged(image: Path) -> None:
    copy = image.parent / ".sa-j1.orig"
    content = copy.read_bytes()
    (image.parent / "other").write_bytes(content)
    (image.parent / "other").replace(copy)
    refused("undo", image, "undo_missing", force=True)
    refused("discard_undo", image, "undo_missing")


def test_undo_of_an_image_that_was_replaced_again(image: Path) -> None:
    write(image, 0x31, "0", "4M")
    write(image, 0, "0", "4M")
    assert ask("reclaim", reclaim_args(image), job="j2")["swapped"]
    refused("undo", image, "stale_plan", force=True)
    before = image.stat().st_ino
    assert ask("undo", undo_args(image, "j2"), job="u2")["inode"] != before
    refused("undo", image, "undo_written_to")


def test_undo_of_an_image_that_was_moved(image: Path) -> None:
    image.rename(image.parent / "moved.qcow2")
    refused("undo", image.parent / "moved.qcow2", "stale_plan")
    refused("undo", image, "undo_missing")


def test_undo_of_a_protected_image(image: Path) -> None:
    with immutable(image):
        refused("undo", image, "undo_written_to")
        refused("undo", image, "immutable", force=True)


def test_undo_of_an_overlay_stands_on_its_base_again(tmp_path: Path) -> None:
    base, overlay = make_image(tmp_path / "base.qcow2"), tmp_path / "vm.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", overlay)
    write(overlay, 0x44, "2M", "3M")
    flat = kept(overlay, tmp_path)
    assert ask("reclaim", reclaim_args(overlay, base))["swapped"]
    ask("undo", undo_args(overlay), job="u1")
    assert same_content(overlay, flat)


def test_discard_frees_what_the_copy_held(image: Path) -> None:
    held = (image.parent / ".sa-j1.orig").stat().st_blocks * 512
    assert discarded(image) == {"freed_bytes": held, "found": True, "put_back": False, "surely_back": False}
    assert leftovers(image.parent) == set()


def test_discard_of_a_copy_that_is_gone_clears_the_journal(image: Path) -> None:
    (image.parent / ".sa-j1.orig").unlink()
    assert discarded(image) == {"freed_bytes": 0, "found": False, "put_back": False, "surely_back": False}
    assert leftovers(image.parent) == set()


def test_discard_of_a_copy_with_another_name_says_that_nothing_was_freed(image: Path) -> None:
    os.link(image.parent / ".sa-j1.orig", image.parent / "somebody-keeps-it")
    assert discarded(image) == {"freed_bytes": 0, "found": True, "put_back": False, "surely_back": False}


@pytest.mark.parametrize("verb", ["undo", "discard_undo"])
def test_unknown_options_are_refused(image: Path, verb: str) -> None:
    refused(verb, image, "invalid", everything=True)
