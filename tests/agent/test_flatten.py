"""A chain is made shorter, and a guest reads the same bytes from every image of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import (
    ask,
    image_info,
    leftovers,
    qemu_img,
    reclaim_args,
    same_content,
    stamp,
    undo_args,
    write,
)
from tests.harness.filesystems import new_folder
from tests.working import create

pytestmark = pytest.mark.qemu


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    """base ← one ← two ← top, each with bytes of its own and some of the others' overwritten; top first."""
    pool = new_folder(tmp_path / "pool")
    names = ["base.qcow2", "one.qcow2", "two.qcow2", "top.qcow2"]
    for number, name in enumerate(names):
        below = ["-b", names[number - 1], "-F", "qcow2"] if number else []
        qemu_img("create", "-q", "-f", "qcow2", *below, name, "8M", cwd=pool)
        write(pool / name, 0x41 + number, f"{number}M", "2M")
        write(pool / name, 0 if number % 2 else 0x31, f"{6 * 1024 + number * 64}k", "64k")
    shutil.copytree(pool, tmp_path / "before")
    return [pool / name for name in reversed(names)]


def before(path: Path) -> Path:
    return path.parent.parent / "before" / path.name


def flatten_args(chain: list[Path], **changes: Any) -> dict[str, Any]:
    args = reclaim_args(chain[0], *chain[1:], method="rebase")
    return args | changes


def backing_of(path: Path) -> tuple[str | None, str | None]:
    told = image_info(path)
    return told.get("backing-filename"), told.get("backing-filename-format")


@pytest.mark.parametrize("method", ["rebase", "convert"])
def test_the_whole_chain_moves_up_into_the_image(chain: list[Path], method: str) -> None:
    result = ask("flatten", flatten_args(chain, method=method))
    assert result.get("swapped"), result
    assert result["method"] == method
    assert backing_of(chain[0]) == (None, None)
    for path in chain:
        assert same_content(path, before(path))
    assert leftovers(chain[0].parent) == {".sa-j1.orig", ".sa-j1.journal"}


@pytest.mark.parametrize(("keep", "name"), [(2, "one.qcow2"), (3, "base.qcow2")])
def test_the_chain_goes_down_to_an_image_in_the_middle(chain: list[Path], keep: int, name: str) -> None:
    untouched = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in chain[1:]}
    result = ask("flatten", flatten_args(chain, keep=keep))
    assert result.get("swapped"), result
    assert backing_of(chain[0]) == (name, "qcow2")
    told = json.loads(qemu_img("info", "--backing-chain", "--output=json", chain[0]))
    assert len(told) == 5 - keep
    for path in chain:
        assert same_content(path, before(path))
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in chain[1:]} == untouched


def test_the_base_is_named_from_where_the_image_is(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    (pool / "templates").mkdir(parents=True)
    (pool / "guests").mkdir()
    base, middle, top = create(pool / "templates/a.qcow2", "4M"), pool / "templates/b.qcow2", pool / "guests/c.qcow2"
    qemu_img("create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", middle)
    qemu_img("create", "-q", "-f", "qcow2", "-b", "../templates/b.qcow2", "-F", "qcow2", top, cwd=pool / "guests")
    write(middle, 7, "1M", "1M")
    shutil.copytree(pool, tmp_path / "before")
    result = ask("flatten", reclaim_args(top, middle, base, pool=pool, method="rebase", keep=2))
    assert result.get("swapped"), result
    assert backing_of(top) == ("../templates/a.qcow2", "qcow2")
    assert same_content(top, tmp_path / "before/guests/c.qcow2")


def test_overlays_above_read_the_same(chain: list[Path]) -> None:
    result = ask("flatten", flatten_args(chain[1:]))  # in the middle: top stands on it
    assert result.get("swapped"), result
    assert same_content(chain[0], before(chain[0]))


def test_overlays_with_internal_snapshots_are_refused(chain: list[Path]) -> None:
    qemu_img("snapshot", "-c", "s", chain[0])
    assert ask("flatten", flatten_args(chain))["code"] == "has_internal_snapshots"


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"keep": 1}, "invalid"), ({"keep": 9}, "invalid"), ({"method": "convert", "keep": 2}, "invalid")],
)
def test_nonsense_changes_nothing(chain: list[Path], changes: dict[str, Any], code: str) -> None:
    before_it = stamp(chain[0])
    assert ask("flatten", flatten_args(chain, **changes))["code"] == code
    assert stamp(chain[0]) == before_it
    assert leftovers(chain[0].parent) == set()


def test_an_image_without_a_base_has_nothing_to_flatten(chain: list[Path]) -> None:
    assert ask("flatten", flatten_args(chain[3:]))["code"] == "invalid"


def test_an_undo_brings_the_chain_back(chain: list[Path]) -> None:
    ask("flatten", flatten_args(chain))

    assert "code" not in ask("undo", undo_args(chain[0]), job="j2")
    assert backing_of(chain[0]) == ("two.qcow2", "qcow2")
    assert same_content(chain[0], before(chain[0]))
    assert leftovers(chain[0].parent) == set()


def flat_with_an_undo_copy(chain: list[Path], **own: Any) -> tuple[int, str]:
    assert ask("flatten", flatten_args(chain, **own)).get("swapped")
    return chain[0].stat().st_ino, "u1"


@pytest.mark.parametrize("force", [False, True])
def test_an_undo_is_refused_once_a_base_that_only_the_original_needs_is_gone(chain: list[Path], *, force: bool) -> None:
    inode, job = flat_with_an_undo_copy(chain)
    chain[2].unlink()
    answer = ask("undo", undo_args(chain[0], force=force), job=job)
    assert (answer.get("code"), "one.qcow2" in str(answer.get("detail"))) == ("chain_broken", True)
    assert (chain[0].stat().st_ino, same_content(chain[0], before(chain[0]))) == (inode, True)
    assert leftovers(chain[0].parent) == {".sa-j1.orig", ".sa-j1.journal"}


def test_an_undo_is_refused_once_such_a_base_was_written_to_unless_forced(chain: list[Path]) -> None:
    inode, job = flat_with_an_undo_copy(chain)
    write(chain[-1], 0x55, "0", "64k")
    answer = ask("undo", undo_args(chain[0]), job=job)
    assert (answer.get("code"), chain[0].stat().st_ino) == ("undo_written_to", inode)
    assert "base.qcow2" in str(answer.get("detail"))
    assert "code" not in ask("undo", undo_args(chain[0], force=True), job="u2")
    assert backing_of(chain[0]) == ("two.qcow2", "qcow2")


def test_a_base_that_stays_below_does_not_keep_an_undo_from_being_done(chain: list[Path]) -> None:
    flat_with_an_undo_copy(chain, keep=3)
    chain[-1].touch()
    assert "code" not in ask("undo", undo_args(chain[0]), job="u1")
