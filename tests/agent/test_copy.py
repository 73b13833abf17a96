"""``reclaim`` by ``copy``: without zeros and unused clusters, uncompressed."""

from pathlib import Path

import pytest

from tests.agent.formats.test_against_qemu import facts_of
from tests.agent.harness import (
    ask,
    image_info,
    leftovers,
    make_image,
    qemu_img,
    reads_as,
    reclaim_args,
    same_content,
    stamp,
    write,
)
from tests.agent.test_reclaim import keep_copy
from tests.harness.filesystems import loop_filesystem, new_file
from tests.working import create

pytestmark = pytest.mark.qemu


@pytest.mark.parametrize("options", ["", "cluster_size=2M", "cluster_size=512", "compat=0.10", "compression_type=zstd"])
def test_a_qcow2_image_loses_its_zeros_and_keeps_its_options(pool: Path, options: str) -> None:
    image = make_image(pool / "vm.qcow2", options=options)
    before, was = facts_of(image, "qcow2"), keep_copy(image)
    result = ask("reclaim", reclaim_args(image, method="copy"))
    assert result["method"] == "copy"
    assert result["after_bytes"] < result["before_bytes"] - (1 << 20)
    assert same_content(image, was)
    assert facts_of(image, "qcow2") == before
    # Nothing of it is compressed: a guest that writes does not make it grow.
    write(image, 0x62, "0", "2M")
    assert image.stat().st_blocks * 512 <= result["after_bytes"] + 65536


def test_an_overlay_stays_one_and_its_base_is_not_touched(pool: Path) -> None:
    base, top = pool / "base.qcow2", pool / "top.qcow2"
    make_image(base)
    make_image(top, base="base.qcow2")
    write(top, 0, "0", "1M")
    was, untouched = keep_copy(top), stamp(base)
    keep_copy(base).rename(pool.parent / "base.qcow2")
    result = ask("reclaim", reclaim_args(top, base, method="copy"))
    assert result.get("swapped"), result
    assert image_info(top)["backing-filename"] == "base.qcow2"
    assert stamp(base) == untouched
    assert same_content(top, was)


def test_a_raw_image_becomes_sparse(pool: Path) -> None:
    image = new_file(pool / "disk.raw", b"x" * 100_000 + bytes(5 << 20) + b"y" * 352 + bytes(1 << 20))
    size, was = image.stat().st_size, image.read_bytes()
    assert size % 512 == 0
    result = ask("reclaim", reclaim_args(image, method="copy", format="raw"))
    assert result["after_bytes"] < 300_000 < result["before_bytes"]
    assert image.read_bytes() == was
    assert leftovers(pool) == {".sa-j1.orig", ".sa-j1.journal"}


def test_what_a_copy_makes_larger_is_left_as_it_is(pool: Path) -> None:
    image = make_image(pool / "vm.qcow2")
    ask("reclaim", reclaim_args(image, undo_hours=0))
    before = image.stat()
    result = ask("reclaim", reclaim_args(image, method="copy"), job="j2")
    assert not result["swapped"]
    assert image.stat().st_ino == before.st_ino
    assert leftovers(pool) == set()


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("vdi", ""),
        ("vpc", "force_size=on"),
        ("vmdk", "subformat=monolithicSparse,adapter_type=lsilogic,hwversion=7"),
        ("vmdk", "subformat=streamOptimized"),
    ],
)
def test_other_formats_are_written_anew_and_keep_what_they_say(pool: Path, form: str, options: str) -> None:
    source, image = pool / "source.qcow2", pool / f"disk.{form}"
    make_image(source)
    words = ["-o", options] if options else []
    compress = ["-c"] if "streamOptimized" in options else []
    qemu_img("convert", "-S", "0", *compress, "-f", "qcow2", "-O", form, *words, source, image)
    before, said = image_info(image, form), descriptor(image) if form == "vmdk" else b""
    result = ask("reclaim", reclaim_args(image, method="copy", format=form))
    assert result.get("swapped") or "streamOptimized" in options, result
    assert reads_as(source, image, "qcow2", form)
    after = image_info(image, form)
    assert after["virtual-size"] == before["virtual-size"]
    if form == "vmdk":
        assert descriptor(image) == said
        assert b'"disk.vmdk"' in said


def test_a_vmdk_that_was_renamed_names_its_file_again(pool: Path) -> None:
    make_image(pool / "source.qcow2")
    qemu_img("convert", "-S", "0", "-f", "qcow2", "-O", "vmdk", pool / "source.qcow2", pool / "old.vmdk")
    image = (pool / "old.vmdk").rename(pool / "new.vmdk")
    assert ask("reclaim", reclaim_args(image, method="copy", format="vmdk")).get("swapped")
    assert b'"new.vmdk"' in descriptor(image)


def descriptor(path: Path) -> bytes:
    return path.read_bytes()[512 : 512 + 20 * 512].rstrip(b"\0")


def test_a_format_that_is_not_written_anew_is_refused(pool: Path) -> None:
    image = create(pool / "disk.vhdx", "4M", form="vhdx")
    refused = ask("reclaim", reclaim_args(image, method="copy", format="vhdx"))
    assert refused["code"] == "unsupported_subformat"


def test_on_xfs_a_copy_takes_no_more_than_it_holds(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path, 400, form="xfs") as folder:
        image = new_file(folder / "disk.raw", b"".join(b"x" * 4096 + bytes(1020 << 10) for _ in range(16)))
        result = ask("reclaim", reclaim_args(image, method="copy", format="raw"))
        assert result.get("swapped"), result
        assert result["after_bytes"] < 1 << 20
