"""What an image is after a reclaim: smaller, and otherwise as it was."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.agent.formats.test_against_qemu import facts_of
from tests.agent.harness import (
    ask,
    at_ready,
    heard,
    image_info,
    kept,
    leftovers,
    make_image,
    qemu_img,
    qemu_io,
    reclaim_args,
    same_content,
    stamp,
    undo_args,
    write,
)
from tests.harness.filesystems import new_file

pytestmark = pytest.mark.qemu


def keep_copy(path: Path) -> Path:
    """The image as it was, under another folder so that nothing of it is in the way."""
    copy = path.parent.parent / (path.name + ".before")
    subprocess.run(["cp", "--sparse=always", path, copy], check=True)
    return copy


def test_the_image_shrinks_and_a_guest_reads_the_same(image: Path) -> None:
    before, copy = image.stat(), keep_copy(image)
    result = ask("reclaim", reclaim_args(image))
    after = image.stat()
    assert result["before_bytes"] == before.st_blocks * 512
    assert result["after_bytes"] == after.st_blocks * 512 < before.st_blocks * 512 / 4
    assert (result["dev"], result["inode"]) == (after.st_dev, after.st_ino) != (before.st_dev, before.st_ino)
    assert same_content(image, copy)
    assert image_info(image)["format-specific"]["data"]["compression-type"] == result["compression"] == "zstd"
    assert b"No errors were found" in qemu_img("check", image)


def test_the_original_waits_as_undo_copy_and_is_not_counted_as_freed(image: Path) -> None:
    before = image.stat()
    result = ask("reclaim", reclaim_args(image))
    undo = image.parent / result["undo"]["path"]
    assert undo.stat().st_ino == before.st_ino
    assert result["held_bytes"] == result["undo"]["bytes"] == before.st_blocks * 512
    assert result["freed_bytes"] == 0
    assert leftovers(image.parent) == {".sa-j1.orig", ".sa-j1.journal"}


def test_without_an_undo_window_nothing_is_left_and_the_space_is_freed(image: Path) -> None:
    result = ask("reclaim", reclaim_args(image, undo_hours=0))
    assert leftovers(image.parent) == set()
    assert result["held_bytes"] == 0
    assert result["undo"] is None
    assert result["freed_bytes"] == result["before_bytes"] - result["after_bytes"] > 0


def test_an_image_that_cannot_shrink_is_left_as_it_is(image: Path) -> None:
    ask("reclaim", reclaim_args(image, undo_hours=0))
    before = image.stat()
    result = ask("reclaim", reclaim_args(image), job="j2")
    after = image.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (result["swapped"], result["freed_bytes"], result["undo"]) == (False, 0, None)
    assert leftovers(image.parent) == set()


@pytest.mark.parametrize(
    "options",
    [
        "cluster_size=2M",
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=1",
        "refcount_bits=64",
        "lazy_refcounts=on",
        "extended_l2=on,cluster_size=128k",
        "compat=0.10",
        "compat=0.10,cluster_size=2M",
        "compression_type=zstd",
        "preallocation=metadata",
    ],
)
def test_creation_options_stay(pool: Path, options: str) -> None:
    image = make_image(pool / "vm.qcow2", options=options)
    before, copy = facts_of(image, "qcow2"), keep_copy(image)
    result = ask("reclaim", reclaim_args(image))
    after = facts_of(image, "qcow2")
    for name in ("virtual_size", "cluster_size", "compat", "refcount_bits", "extended_l2", "backing_file"):
        assert getattr(after, name) == getattr(before, name), name
    assert bool(after.lazy_refcounts) == bool(before.lazy_refcounts)
    assert result["compression"] == ("zlib" if before.compat == "0.10" else "zstd")
    assert same_content(image, copy)


@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_the_compression_that_is_asked_for_is_used(image: Path, compression: str) -> None:
    assert ask("reclaim", reclaim_args(image, compression=compression))["compression"] == compression
    assert facts_of(image, "qcow2").compression == compression


def test_an_overlay_keeps_its_own_layer_on_the_same_relative_base(pool: Path) -> None:
    (pool / "bases").mkdir()
    (pool / "vms").mkdir()
    lowest, base, overlay = pool / "bases/lowest.qcow2", pool / "bases/base.qcow2", pool / "vms/vm.qcow2"
    make_image(lowest)
    qemu_img("create", "-q", "-f", "qcow2", "-b", "lowest.qcow2", "-F", "qcow2", base)
    write(base, 0x33, "1M", "1M")
    qemu_img("create", "-q", "-f", "qcow2", "-b", "../bases/base.qcow2", "-F", "qcow2", overlay)
    write(overlay, 0x44, "2M", "3M")
    write(overlay, 0, "0", "256k")
    flat = kept(overlay, pool.parent)
    bases = [stamp(path) for path in (lowest, base)]

    result = ask("reclaim", reclaim_args(overlay, base, lowest, pool=pool))

    assert result["swapped"]
    after = facts_of(overlay, "qcow2")
    assert (after.backing_file, after.backing_format) == (b"../bases/base.qcow2", "qcow2")
    assert same_content(overlay, flat)
    # Only its own layer: the zeros hide the base, the rest of the base is not pulled in.
    mapped = qemu_img("map", "-f", "qcow2", "--output=json", overlay)
    assert b'"depth": 2' in mapped
    assert [stamp(path) for path in (lowest, base)] == bases


def test_an_overlay_on_a_raw_base(pool: Path) -> None:
    base, overlay = pool / "base.raw", pool / "vm.qcow2"
    base.write_bytes(os.urandom(1 << 20) + bytes(7 << 20))
    qemu_img("create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", overlay)
    write(overlay, 0x44, "2M", "3M")
    flat = kept(overlay, pool.parent)
    args = reclaim_args(overlay, base)
    args["chain"][0]["format"] = "raw"
    assert ask("reclaim", args)["swapped"]
    assert same_content(overlay, flat)
    assert facts_of(overlay, "qcow2").backing_format == "raw"


def test_a_base_shrinks_under_overlays_that_are_switched_off(image: Path, overlay: Path) -> None:
    write(overlay, 0x55, "1M", "1M")
    flat = kept(overlay, image.parent.parent)
    assert ask("reclaim", reclaim_args(image))["swapped"]
    assert same_content(overlay, flat)


def test_persistent_bitmaps_stay(image: Path) -> None:
    qemu_img("bitmap", "-f", "qcow2", "--add", image, "backup-1")
    assert ask("reclaim", reclaim_args(image))["swapped"]
    assert [one.name for one in facts_of(image, "qcow2").bitmaps] == ["backup-1"]


def test_owner_mode_and_acl_stay(image: Path) -> None:
    os.chown(image, 64055, 108)
    image.chmod(0o640)
    subprocess.run(["setfacl", "-m", "u:1234:r", image], check=True)
    os.setxattr(image, "user.note", b"mine")
    listing = subprocess.run(["getfacl", "-cn", image], capture_output=True, check=True).stdout
    ask("reclaim", reclaim_args(image))
    status = image.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (64055, 108, 0o640 | 0o000)
    assert subprocess.run(["getfacl", "-cn", image], capture_output=True, check=True).stdout == listing
    assert os.getxattr(image, "user.note") == b"mine"


NAMES: list[Any] = [
    b"-f",
    b"--help",
    b"a,b.qcow2",
    b"a,,b=c,driver=raw",
    b"nbd:x",
    b"json:{}",
    b"file:x.qcow2",
    b"new\nline.qcow2",
    b"not-\xff-utf8.qcow2",
    b"\x1b[31mred<script>alert(1)</script>".replace(b"/", b"_"),
    b"%s%n \"quoted\" 'too' $(touch x) `id`",
    b"x" * 255,
    "ü".encode() * 127,
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_only_a_name(pool: Path, name: bytes) -> None:
    path = make_image(os.fsencode(pool) + b"/" + name)
    copy = os.fsencode(pool.parent) + b"/before"
    subprocess.run([b"cp", path, copy], check=True)
    result = ask("reclaim", reclaim_args(path))
    assert result["swapped"]
    assert same_content(path, copy)
    assert names_in(pool) == {name, b".sa-j1.orig", b".sa-j1.journal"}
    assert ask("undo", undo_args(path), job="u1")["after_bytes"] == result["before_bytes"]
    assert names_in(pool) == {name}


@pytest.mark.parametrize("name", [b"a,b.qcow2", b"-f", b"new\nline", b"not-\xff-utf8", b"x" * 255])
def test_any_name_of_a_base_is_only_a_name(pool: Path, name: bytes) -> None:
    base, overlay = os.fsencode(pool) + b"/" + name, os.fsencode(pool) + b"/vm.qcow2"
    make_image(base)
    qemu_img("create", "-q", "-f", "qcow2", "-b", name, "-F", "qcow2", overlay)
    write(overlay, 0x44, "2M", "3M")
    flat = os.fsencode(pool.parent) + b"/flat"
    qemu_img("convert", "-f", "qcow2", "-O", "qcow2", overlay, flat)
    assert ask("reclaim", reclaim_args(overlay, base))["swapped"]
    assert same_content(overlay, flat)
    assert facts_of(Path(os.fsdecode(overlay)), "qcow2").backing_file == name


def names_in(folder: Path) -> set[bytes]:
    return {os.fsencode(path.name) for path in folder.iterdir()}


def test_tells_stages_and_commands_as_they_come(image: Path) -> None:
    _, events = heard("reclaim", reclaim_args(image))
    stages = [event["stage"] for event in events if event["event"] == "progress"]
    commands = [event["argv"] for event in events if event["event"] == "command"]
    assert list(dict.fromkeys(stages)) == ["checking", "copying", "verifying", "syncing", "swapping"]
    convert = next(argv for argv in commands if argv[:2] == ["qemu-img", "convert"])
    assert convert[-2:] == [str(image), str(image.parent / ".sa-j1.new")]
    assert all("/proc/" not in argument for argv in commands for argument in argv)


def test_bandwidth_is_limited(image: Path) -> None:
    qemu_img("create", "-q", "-f", "qcow2", image, "8M")
    noise = new_file(image.parent.parent / "noise", os.urandom(4 << 20))
    qemu_io(image, f"write -s {noise} 0 4M")
    write(image, 0, "4M", "4M")
    result = ask("reclaim", reclaim_args(image, bandwidth_bytes_sec=2 << 20))
    assert result["swapped"]
    assert result["seconds"] > 1.0


def test_a_copy_is_roots_alone_until_it_takes_the_images_place(pool: Path) -> None:
    """Whatever got into it in spite of all, nobody else reads it before everything was checked."""
    path = make_image(pool / "vm.qcow2")
    os.chown(path, 12345, 12345)
    path.chmod(0o666)
    with at_ready("reclaim", reclaim_args(path)) as agent:
        waiting = (pool / ".sa-j1.new").stat()
        assert (waiting.st_uid, waiting.st_gid, waiting.st_mode & 0o777) == (0, 0, 0o600)
        assert agent.go()["swapped"]
    now = path.stat()
    assert (now.st_uid, now.st_gid, now.st_mode & 0o777) == (12345, 12345, 0o666)
