"""An overlay whose base was moved names it again; what is no lost base is refused."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import (
    ask,
    image_info,
    kept,
    leftovers,
    link,
    make_image,
    qemu_img,
    reads_as,
    rewrite_args,
    undo_args,
    write,
)
from tests.agent.test_rebase import overlay
from tests.chance import seed

pytestmark = pytest.mark.qemu


def args_for(path: Path, *onto: Path) -> dict[str, Any]:
    return rewrite_args(path, onto=[link(one) for one in onto])


def pair(pool: Path) -> tuple[Path, Path]:
    """A base full of data, and an overlay with small writes all over it."""
    chance = random.Random(seed())
    base, path = pool / "base.qcow2", pool / "vm.qcow2"
    make_image(base, "32M")
    for at in range(32):
        write(base, at + 1, f"{at}M", "1M")
    overlay(path, base, "32M")
    for _ in range(40):
        write(path, 0xEE, str(chance.randrange(500) * 65536), "4k")
    return base, path


def test_the_overlay_reads_as_before_from_the_base_that_was_moved(pool: Path, tmp_path: Path) -> None:
    base, path = pair(pool)
    before = kept(path, tmp_path)
    (pool / "new place").mkdir()
    moved = base.rename(pool / "new place" / "renamed.qcow2")
    result = ask("relink", args_for(path, moved))
    assert result.get("swapped"), result
    assert reads_as(path, before)
    assert image_info(path)["backing-filename"] == str(moved)
    assert result["compared"] > 60
    assert result["alike"] > 0.8 * result["compared"]
    assert "code" not in ask("undo", undo_args(path), job="u1")
    assert image_info(path)["backing-filename"] == "base.qcow2"
    assert leftovers(pool) == set()


def test_another_image_has_nothing_alike(pool: Path) -> None:
    base, path = pair(pool)
    base.unlink()
    other = make_image(pool / "other.qcow2", "32M")
    for at in range(32):
        write(other, 0x80 + at, f"{at}M", "1M")
    before = path.read_bytes()
    assert ask("relink", args_for(path, other))["code"] == "unproven"
    assert path.read_bytes() == before
    result = ask("relink", args_for(path, other) | {"force": True})
    assert (result["swapped"], result["alike"]) == (True, 0), result


def test_what_has_its_base_or_never_had_one_is_refused(pool: Path) -> None:
    base, path = pair(pool)
    other, alone = pool / "other.qcow2", pool / "alone.qcow2"
    make_image(other, "32M")
    make_image(alone, "32M")
    before = path.read_bytes()
    assert ask("relink", args_for(path, other))["code"] == "stale_plan"
    assert ask("relink", args_for(alone, other))["code"] == "invalid"
    qemu_img("create", "-q", "-f", "qcow2", "-b", "vm.qcow2", "-F", "qcow2", pool / "above.qcow2")
    base.unlink()
    assert ask("relink", args_for(path, path))["code"] in {"chain_cycle", "chain_broken"}
    assert path.read_bytes() == before
    assert leftovers(pool) == set()
