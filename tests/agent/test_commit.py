"""An overlay is merged into its base: the base reads as the overlay does, whenever the work is cut off."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.agent.aside import pool_of
from tests.agent.harness import (
    ask,
    image_info,
    kept,
    leftovers,
    make_image,
    qemu_img,
    qemu_io,
    reads_as,
    rewrite_args,
    write,
)
from tests.agent.test_rebase import overlay
from tests.chance import seed
from tests.working import create

pytestmark = pytest.mark.qemu
MIB = 1 << 20


def args_for(path: Path, *below: Path, form: str = "qcow2") -> dict[str, Any]:
    args = rewrite_args(path, *below)
    args["chain"][-1]["format"] = form
    return args


def same(path: Path, form: str, expected: Path) -> bool:
    as_large = image_info(path, form)["virtual-size"] == image_info(expected)["virtual-size"]
    return as_large and reads_as(path, expected, form)


@pytest.mark.parametrize("options", ["", "cluster_size=4k", "lazy_refcounts=on", "extended_l2=on", "larger"])
@pytest.mark.parametrize("form", ["qcow2", "raw"])
def test_the_base_reads_as_the_overlay_did(pool: Path, tmp_path: Path, options: str, form: str) -> None:
    chance = random.Random(seed())
    base, path = create(pool / f"base.{form}", form=form), pool / "vm.qcow2"
    qemu_io(base, "write -q -P 9 1M 3M", form=form)
    overlay(path, base, "12M" if options == "larger" else "8M", form, options if "=" in options else "")
    for _ in range(12):
        write(path, chance.randrange(1, 256), str(chance.randrange(100) * 65536), "40k")
    qemu_io(path, "write -q -z 2M 1M")
    before, inode = kept(path, tmp_path), base.stat().st_ino
    result = ask("commit", args_for(path, base, form=form))
    assert result.get("method") == "commit", result
    assert (base.stat().st_ino, base.stat().st_blocks * 512) == (inode, result["after_bytes"])
    assert same(base, form, before)
    assert same(path, "qcow2", before)
    assert leftovers(pool) == set()


def test_a_base_in_the_middle_of_a_chain_keeps_its_own_base(pool: Path, tmp_path: Path) -> None:
    root, middle, path = (pool / f"{name}.qcow2" for name in ("root", "middle", "vm"))
    make_image(root, "8M")
    write(root, 0x21, "0", "4M")
    overlay(middle, root, "8M", options="cluster_size=1M")
    overlay(path, middle, "8M", options="cluster_size=4k")
    write(path, 0x22, "1028k", "4k")
    before = kept(path, tmp_path)
    digest = root.read_bytes()
    assert "code" not in ask("commit", args_for(path, middle, root))
    assert same(middle, "qcow2", before)
    assert image_info(middle)["backing-filename"] == "root.qcow2"
    assert root.read_bytes() == digest


def test_what_would_lose_something_is_refused_and_nothing_changes(pool: Path) -> None:
    base, path, alone = (pool / f"{name}.qcow2" for name in ("base", "vm", "alone"))
    make_image(base, "8M")
    make_image(alone, "8M")
    overlay(path, base, "8M")
    write(path, 0x22, "0", "1M")
    before = base.read_bytes()
    assert ask("commit", args_for(alone, base) | {"chain": []})["code"] == "invalid"
    for one in (path, base):
        with one.open("rb"):
            assert ask("commit", args_for(path, base))["code"] == "image_in_use"
    qemu_img("bitmap", "--add", path, "backup")
    assert ask("commit", args_for(path, base))["code"] == "unsupported_subformat"
    qemu_img("bitmap", "--remove", path, "backup")
    qemu_img("snapshot", "-c", "s", path)
    assert ask("commit", args_for(path, base))["code"] == "has_internal_snapshots"
    qemu_img("snapshot", "-d", "s", path)
    other = pool / "name.qcow2"
    os.link(base, other)
    assert ask("commit", args_for(path, base))["code"] == "hard_linked"
    other.unlink()
    assert base.read_bytes() == before
    qemu_img("resize", "-q", base, "16M")
    grown = base.read_bytes()
    sibling = pool / "sibling.qcow2"
    overlay(sibling, base, "16M")
    overlay(path, base, "16M")
    assert ask("commit", args_for(path, base) | {"pools": [pool_of(pool)]})["code"] == "has_overlays"
    sibling.unlink()
    path.unlink()
    overlay(path, base, "8M")
    assert ask("commit", args_for(path, base))["code"] == "invalid"
    assert leftovers(pool) == set()
    assert base.read_bytes() == grown
