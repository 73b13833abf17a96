"""An image is written in another format, under a name of its own; the original stays as it is."""

import os
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from tests.agent.harness import (
    Agent,
    ask,
    at_ready,
    image_info,
    leftovers,
    location,
    qemu_img,
    reads_as,
    recovered,
    rewrite_args,
    stamp,
    write,
)
from tests.harness.filesystems import new_file, new_folder
from tests.working import create

pytestmark = pytest.mark.qemu


def convert_args(
    path: Path, *below: Path, to: Path, form: str, source: str = "qcow2", **options: str
) -> dict[str, Any]:
    return rewrite_args(path, *below, format=source, target={**location(to), "format": form, "options": options})


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("qcow2", {}),
        ("qcow2", {"cluster_size": "2M", "lazy_refcounts": "on"}),
        ("qcow2", {"compression_type": "zstd"}),
        ("qcow2", {"preallocation": "metadata"}),
        ("qcow2", {"compat": "0.10"}),
        ("raw", {}),
        ("raw", {"preallocation": "full"}),
        ("vmdk", {"subformat": "monolithicSparse"}),
        ("vmdk", {"subformat": "streamOptimized"}),
        ("vdi", {}),
        ("vhdx", {}),
        ("vhdx", {"subformat": "fixed"}),
        ("vpc", {}),
        ("vpc", {"subformat": "fixed"}),
    ],
)
def test_a_guest_reads_the_same_from_the_other_format(
    pool: Path, image: Path, form: str, options: dict[str, str]
) -> None:
    before, was, target = image.stat(), stamp(image), pool / f"other.{form}"
    result = ask("convert", convert_args(image, to=target, form=form, **options))
    assert result.get("swapped"), result
    assert (result["dev"], result["inode"]) == (target.stat().st_dev, target.stat().st_ino)
    assert result["freed_bytes"] == 0
    assert image_info(target, form)["virtual-size"] == 8 << 20
    assert reads_as(image, target, "qcow2", form)
    assert stamp(image) == was
    assert leftovers(pool) == set()
    assert target.stat().st_nlink == 1
    assert (target.stat().st_mode, target.stat().st_uid) == (before.st_mode, before.st_uid)
    if "cluster_size" in options:
        assert image_info(target)["cluster-size"] == 2 << 20
    if options.get("compression_type"):
        assert target.stat().st_blocks < before.st_blocks / 4


@pytest.mark.parametrize("source", ["raw", "vmdk", "vdi", "vhdx", "vpc"])
def test_any_format_becomes_qcow2(pool: Path, image: Path, source: str) -> None:
    other = pool / f"from.{source}"
    options = ["-o", "force_size=on"] if source == "vpc" else []
    qemu_img("convert", "-f", "qcow2", "-O", source, *options, image, other)
    result = ask("convert", convert_args(other, to=pool / "back.qcow2", form="qcow2", source=source))
    assert result.get("swapped"), result
    assert reads_as(image, pool / "back.qcow2")


def test_a_chain_becomes_one_image_in_another_pool(tmp_path: Path, pool: Path, image: Path) -> None:
    top = create(pool / "top.qcow2", base="vm.qcow2")
    write(top, 0x33, "1M", "1M")
    other = new_folder(tmp_path / "other")
    result = ask("convert", convert_args(top, image, to=other / "vm.raw", form="raw"))
    assert result.get("swapped"), result
    assert reads_as(top, other / "vm.raw", "qcow2", "raw")
    assert leftovers(other) == leftovers(pool) == set()


def test_a_vmdk_names_its_own_file(pool: Path, image: Path) -> None:
    target = pool / "a name.vmdk"
    ask("convert", convert_args(image, to=target, form="vmdk", subformat="monolithicSparse"))
    head = target.read_bytes()[:20480]
    assert b'"a name.vmdk"' in head
    assert b".sa-" not in head


@pytest.mark.parametrize("size", ["1M", "8193K", "10000000512", "137G"])
def test_the_virtual_size_stays_to_the_byte_in_vpc(pool: Path, size: str) -> None:
    image = create(pool / "odd.qcow2", size)
    result = ask("convert", convert_args(image, to=pool / "odd.vhd", form="vpc"))
    assert result.get("swapped"), result
    assert image_info(pool / "odd.vhd", "vpc")["virtual-size"] == image_info(image)["virtual-size"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"format": "qed"}, "invalid"),
        ({"options": {"backing_file": "x"}}, "invalid"),
        ({"options": {"cluster_size": "64k,backing_file=/etc/passwd"}}, "invalid"),
        ({"options": {"cluster_size": "3"}}, "tool_failed"),
        ({"format": "vmdk", "options": {"subformat": "twoGbMaxExtentFlat"}}, "unsupported_subformat"),
        ({"path_b64": b64(b"/etc/cron.d/x")}, "outside_pool"),
        ({"path_b64": b64(b"relative")}, "outside_pool"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    pool: Path, image: Path, changes: dict[str, Any], code: str
) -> None:
    args = convert_args(image, to=pool / "x.qcow2", form="qcow2")
    args["target"] |= changes
    assert ask("convert", args)["code"] == code
    assert {path.name for path in pool.iterdir()} == {"vm.qcow2"}


def test_a_name_that_is_taken_is_never_overwritten(pool: Path, image: Path) -> None:
    target = new_file(pool / "taken.raw", b"somebody's")
    assert ask("convert", convert_args(image, to=target, form="raw"))["code"] == "target_exists"
    target.unlink()
    with at_ready("convert", convert_args(image, to=target, form="raw"), "j2") as agent:
        target.write_bytes(b"somebody's")
        assert agent.go()["code"] == "target_exists"
    assert target.read_bytes() == b"somebody's"
    assert leftovers(pool) == set()


@pytest.mark.parametrize("ready", [True, False])
def test_a_kill_leaves_no_half_file(pool: Path, image: Path, ready: bool) -> None:
    with Agent() as agent:
        agent.request("convert", convert_args(image, to=pool / "x.raw", form="raw"))
        agent.until("ready") if ready else agent.until("progress", stage="copying")
        agent.process.kill()
    assert recovered(pool) == ["reverted"]
    assert {path.name for path in pool.iterdir()} == {"vm.qcow2"}


def test_what_was_named_before_a_kill_is_finished(pool: Path, image: Path) -> None:
    ask("convert", convert_args(image, to=pool / "x.raw", form="raw"))
    # As a kill right after the link leaves it: both names, and a journal that ends with READY.
    with at_ready("convert", convert_args(image, to=pool / "y.raw", form="raw"), "j2") as agent:
        os.link(pool / ".sa-j2.new", pool / "y.raw")
        agent.process.kill()
    assert recovered(pool) == ["finished"]
    assert leftovers(pool) == set()
    assert (pool / "y.raw").stat().st_nlink == 1
    assert reads_as(image, pool / "y.raw", "qcow2", "raw")
