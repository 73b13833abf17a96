"""Bitmaps are removed from an image; what a guest reads, and all that is not named, stays."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import ask, image_info, kept, leftovers, make_image, qemu_img, rewrite_args, undo_args, write

pytestmark = pytest.mark.qemu


def leave_open(path: Path) -> None:
    """Bitmaps are marked as in use by a program that opens the image, and writes, and is killed."""
    with subprocess.Popen(["qemu-io", "-f", "qcow2", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(b"write -P 3 1M 64k\nflush\nhelp read\n")
        program.stdin.flush()
        assert any(b"ops" in line for line in program.stdout)
        program.kill()


def bitmaps(path: Path) -> dict[str, list[str]]:
    return {one["name"]: one["flags"] for one in image_info(path)["format-specific"]["data"].get("bitmaps", ())}


def args_for(path: Path, *names: str) -> dict[str, Any]:
    return rewrite_args(path, names=list(names))


def test_those_that_were_not_closed_are_removed_and_the_others_stay(pool: Path, tmp_path: Path) -> None:
    path = make_image(pool / "vm.qcow2", "8M")
    qemu_img("bitmap", "--add", "--", path, "--odd name, with everything")
    leave_open(path)
    qemu_img("bitmap", "--add", path, "backup-1")
    qemu_img("snapshot", "-c", "before", path)
    assert "in-use" in bitmaps(path)["--odd name, with everything"]
    before = kept(path, tmp_path)
    result = ask("bitmaps", args_for(path, "--odd name, with everything"))
    assert (result.get("swapped"), result.get("removed")) == (True, ["--odd name, with everything"]), result
    assert bitmaps(path) == {"backup-1": ["auto"]}
    assert [one["name"] for one in image_info(path)["snapshots"]] == ["before"]
    qemu_img("compare", path, before)
    assert "code" not in ask("undo", undo_args(path), job="u1")
    assert len(bitmaps(path)) == 2
    assert leftovers(pool) == set()


def test_all_of_them_are_removed(pool: Path) -> None:
    path = make_image(pool / "vm.qcow2", "8M")
    for number in range(5):
        qemu_img("bitmap", "--add", path, f"b{number}")
    write(path, 7, "0", "1M")
    assert ask("bitmaps", args_for(path, *(f"b{number}" for number in range(5))))["swapped"]
    assert bitmaps(path) == {}


@pytest.mark.parametrize(("names", "code"), [([], "stale_plan"), (["other"], "stale_plan"), ([7], "invalid")])
def test_names_that_no_bitmap_has_are_refused(pool: Path, names: list[Any], code: str) -> None:
    path = make_image(pool / "vm.qcow2", "8M")
    qemu_img("bitmap", "--add", path, "b1")
    assert ask("bitmaps", args_for(path, *names))["code"] == code
    assert set(bitmaps(path)) == {"b1"}
