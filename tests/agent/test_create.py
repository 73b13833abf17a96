"""A new image appears under a name that no file had, or not at all; an overlay reads what its base holds."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from tests.agent.harness import (
    NO_RESERVE,
    ask,
    at_stage,
    image_info,
    leftovers,
    link,
    make_image,
    qemu_img,
    same_content,
    write,
)
from tests.harness.filesystems import new_file

pytestmark = pytest.mark.qemu
MIB = 1 << 20


def create_args(
    path: Path,
    form: str,
    *below: Path,
    size: int = 8 * MIB,
    pool: Path | None = None,
    options: dict[str, str] | None = None,
) -> dict[str, Any]:
    where = {"pool_path_b64": b64(bytes(pool or path.parent)), "path_b64": b64(bytes(path))}
    args: dict[str, Any] = {"target": {**where, "format": form, "options": options or {}}, "virtual_size": size}
    args |= {"reserve": NO_RESERVE}
    if below:
        base, *rest = (link(one, one.parent) for one in below)
        args |= {"base": base, "chain": rest}
    return args


@pytest.mark.parametrize(
    ("form", "options", "told"),
    [
        ("qcow2", {}, {"cluster-size": 65536}),
        ("qcow2", {"cluster_size": "2M", "lazy_refcounts": "on"}, {"cluster-size": 2 * MIB}),
        ("qcow2", {"extended_l2": "on", "cluster_size": "128k"}, {"cluster-size": 131072}),
        ("qcow2", {"compression_type": "zstd"}, {}),
        ("qcow2", {"compat": "0.10"}, {}),
        ("qcow2", {"refcount_bits": "64", "preallocation": "metadata"}, {}),
        ("qcow2", {"preallocation": "full"}, {}),
        ("raw", {}, {}),
        ("raw", {"preallocation": "falloc"}, {}),
        ("vmdk", {"subformat": "monolithicSparse"}, {}),
        ("vmdk", {"subformat": "streamOptimized"}, {}),
        ("vdi", {}, {}),
        ("vhdx", {}, {}),
        ("vpc", {}, {}),
        ("vpc", {"subformat": "fixed"}, {}),
    ],
)
def test_an_image_of_every_format_is_as_large_as_was_asked_for_and_empty(
    pool: Path, form: str, options: dict[str, str], told: dict[str, Any]
) -> None:
    path = pool / f"new.{form}"
    result = ask("create", create_args(path, form, options=options))
    assert (result.get("dev"), result.get("inode")) == (path.stat().st_dev, path.stat().st_ino), result
    info = image_info(path, form)
    assert info["virtual-size"] == 8 * MIB == result["virtual_size"]
    assert told.items() <= info.items()
    assert result["after_bytes"] == path.stat().st_blocks * 512
    assert path.stat().st_mode & 0o7777 == 0o600
    subprocess.run(["qemu-io", "-r", "-f", form, "-c", "read -q -P 0 0 8M", path], check=True)
    specific = info.get("format-specific", {}).get("data", {})
    said = {name: specific[there] for name in options if (there := name.replace("_", "-")) in specific}
    assert said == {name: {"on": True, "64": 64}.get(options[name], options[name]) for name in said}
    assert leftovers(pool) == set()


@pytest.mark.parametrize("near", [True, False])
def test_an_overlay_reads_its_base_and_names_it_as_a_guest_will_find_it(pool: Path, near: bool) -> None:
    base = pool / "bases" / "base:1.qcow2"
    base.parent.mkdir()
    make_image(base)
    path = (base.parent if near else pool) / "over.qcow2"
    before = base.stat()
    result = ask("create", create_args(path, "qcow2", base, pool=pool))
    assert "inode" in result, result
    info = image_info(path, "qcow2")
    assert info["backing-filename"] == ("./base:1.qcow2" if near else str(base))
    assert info["backing-filename-format"] == "qcow2"
    assert same_content(path, base)
    assert (base.stat().st_mtime_ns, base.stat().st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    assert result["after_bytes"] < 400_000


def test_an_overlay_may_be_larger_than_its_base_and_stand_on_a_chain(pool: Path) -> None:
    base, middle, path = pool / "base.qcow2", pool / "middle.qcow2", pool / "over.qcow2"
    make_image(base)
    qemu_img("create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", middle)
    result = ask("create", create_args(path, "qcow2", middle, base, size=16 * MIB))
    assert "inode" in result, result
    assert image_info(path, "qcow2")["virtual-size"] == 16 * MIB


def test_a_name_that_is_taken_is_refused_and_the_file_is_untouched(pool: Path) -> None:
    path = new_file(pool / "new.raw", b"mine")
    assert ask("create", create_args(path, "raw"))["code"] == "target_exists"
    assert path.read_bytes() == b"mine"
    assert leftovers(pool) == set()


def test_a_base_that_was_written_to_since_the_plan_is_refused(pool: Path) -> None:
    base = make_image(pool / "base.qcow2")
    args = create_args(pool / "over.qcow2", "qcow2", base)
    write(base, 7, "0", "64k")
    assert ask("create", args)["code"] == "stale_plan"
    assert not (pool / "over.qcow2").exists()


def test_a_base_that_somebody_writes_to_is_refused(pool: Path) -> None:
    base = make_image(pool / "base.qcow2")
    args = create_args(pool / "over.qcow2", "qcow2", base)
    with base.open("r+b"):
        assert ask("create", args)["code"] == "image_in_use"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"virtual_size": 0}, "invalid"),
        ({"virtual_size": 1000}, "invalid"),
        ({"virtual_size": 1 << 63}, "invalid"),
        ({"chain": [{}]}, "invalid"),
        ({"options": {"refcount_bits": "many"}}, "invalid"),
        ({"options": {"cluster_size": "0"}}, "invalid"),
        ({"reserve": {"percent": 0, "bytes": 1 << 60}}, "not_enough_space"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is_written(
    pool: Path, change: dict[str, Any], code: str
) -> None:
    args = create_args(pool / "new.qcow2", "qcow2", options=change.pop("options", None))
    assert ask("create", args | change)["code"] == code
    assert list(pool.iterdir()) == []


def test_a_disk_that_has_no_room_for_what_is_preallocated_is_not_filled(pool: Path) -> None:
    free = os.statvfs(pool)
    size = (free.f_bavail * free.f_frsize // MIB + 1024) * MIB
    args = create_args(pool / "new.raw", "raw", size=size, options={"preallocation": "full"})
    assert ask("create", args)["code"] == "not_enough_space"
    assert list(pool.iterdir()) == []


def test_a_cancel_while_an_image_is_filled_leaves_nothing(pool: Path) -> None:
    args = create_args(pool / "new.raw", "raw", size=4 << 30, options={"preallocation": "full"})
    with at_stage("creating", "create", args) as agent:
        agent.say("cancel")
        assert agent.answer()["code"] == "cancelled"
    assert list(pool.iterdir()) == []
