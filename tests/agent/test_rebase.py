"""An image gets another base, and reads as before: by name and content, whatever the two bases have in common."""

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
    qemu_io,
    reads_as,
    rewrite_args,
    undo_args,
    write,
)
from tests.chance import seed

pytestmark = pytest.mark.qemu
MIB = 1 << 20


def overlay(path: Path, base: Path | None, size: str, form: str = "qcow2", options: str = "") -> None:
    below = ["-b", base.name, "-F", form] if base is not None else []
    chosen = ["-o", options] if options else []
    qemu_img("create", "-q", "-f", "qcow2", *below, *chosen, path, size)


def onto_args(path: Path, below: list[Path], *onto: Path, form: str = "qcow2") -> dict[str, Any]:
    new = [link(onto[0], form=form), *(link(path) for path in onto[1:])]
    return rewrite_args(path, *below, method="rebase", onto=new)


@pytest.mark.parametrize(
    "image", ["on a sibling", "on nothing", "larger than the base", "smaller than the base", "extended_l2=on"]
)
@pytest.mark.parametrize("form", ["qcow2", "raw"])
def test_the_image_reads_as_before_on_another_base(pool: Path, tmp_path: Path, image: str, form: str) -> None:
    chance = random.Random(seed())
    old, new, path = pool / "old.qcow2", pool / f"new.{form}", pool / "vm.qcow2"
    make_image(old, "8M")
    qemu_img(
        "create", "-q", "-f", form, new, {"larger than the base": "4M", "smaller than the base": "16M"}.get(image, "8M")
    )
    qemu_io(new, "write -q -P 9 1M 2M", form=form)
    overlay(path, None if image == "on nothing" else old, "8M", options=image if "=" in image else "")
    for _ in range(12):
        write(path, chance.randrange(256), str(chance.randrange(16) * (MIB // 2)), "64k")
    before = kept(path, tmp_path)
    below = [] if image == "on nothing" else [old]
    result = ask("flatten", onto_args(path, below, new, form=form))
    assert result.get("swapped"), result
    info = image_info(path)
    assert (info["backing-filename"], info["backing-filename-format"]) == (new.name, form)
    assert reads_as(path, before)


def test_only_what_differs_is_written_and_an_undo_brings_the_old_base_back(pool: Path, tmp_path: Path) -> None:
    root, old, new, path = (pool / f"{name}.qcow2" for name in ("root", "old", "new", "vm"))
    make_image(root, "64M")
    write(root, 0x51, "0", "40M")
    for one in (old, new):
        overlay(one, root, "64M")
        write(one, 0x52, "41M", "1M")
    write(old, 0x53, "43M", "1M")
    overlay(path, old, "64M")
    before, inode = kept(path, tmp_path), path.stat().st_ino
    result = ask("flatten", onto_args(path, [old, root], new, root))
    assert result.get("swapped"), result
    assert path.stat().st_blocks * 512 < 2 * MIB
    assert reads_as(path, before)
    assert ask("undo", undo_args(path), job="u1")["inode"] == inode
    assert image_info(path)["backing-filename"] == "old.qcow2"
    assert leftovers(pool) == set()


def test_a_name_with_a_colon_and_another_folder_are_named_so_that_they_are_found(pool: Path, tmp_path: Path) -> None:
    new, path = make_image(pool / "a:b.qcow2", "8M"), pool / "vm.qcow2"
    make_image(path, "8M")
    before = kept(path, tmp_path)
    assert ask("flatten", onto_args(path, [], new))["swapped"]
    assert image_info(path)["backing-filename"] == "./a:b.qcow2"
    assert reads_as(path, before)
    (pool / "deep").mkdir()
    deep = make_image(pool / "deep" / "base.qcow2", "8M")
    ask("discard_undo", undo_args(path), job="d1")
    assert ask("flatten", onto_args(path, [new], deep), job="j2")["swapped"]
    assert image_info(path)["backing-filename"] == str(deep)
    assert reads_as(path, before)


def test_what_would_not_be_right_is_refused_and_nothing_changes(pool: Path) -> None:
    base, path, above, other = (pool / f"{name}.qcow2" for name in ("base", "vm", "above", "other"))
    make_image(base, "8M")
    overlay(path, base, "8M")
    overlay(above, path, "8M")
    make_image(other, "8M")
    before = path.read_bytes()
    wrong = {
        "itself": (onto_args(path, [base], path, base), "chain_cycle"),
        "an overlay on it": (onto_args(path, [base], above, path, base), "chain_cycle"),
        "the present one": (onto_args(path, [base], base), "invalid"),
        "with keep": (onto_args(path, [base], other) | {"keep": 1}, "invalid"),
    }
    for name, (args, code) in wrong.items():
        assert ask("flatten", args).get("code") == code, name
    stale = onto_args(path, [base], other)
    write(other, 0x11, "0", "64k")
    assert ask("flatten", stale)["code"] == "stale_plan"
    with other.open("r+b"):
        assert ask("flatten", onto_args(path, [base], other))["code"] == "image_in_use"
    assert path.read_bytes() == before
    assert leftovers(pool) == set()
