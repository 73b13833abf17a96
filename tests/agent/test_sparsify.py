"""What was deleted in a guest's filesystems takes no space any more; every file in them is as it was."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.appliance import appliance, sparsify
from storage_admin.agent.formats.crc32c import crc32c
from storage_admin.agent.protocol import HostError, unb64
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.rewrite.file_copies import FileCopy
from tests.agent.harness import ask, heard, image_info, leftovers, overwrite, qemu_img, rewrite_args, undo_args
from tests.harness.filesystems import formatted, new_file
from tests.working import allocated

pytestmark = pytest.mark.qemu
MIB = 1 << 20
KEPT = os.urandom(MIB)


@pytest.fixture(scope="module")
def filesystem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ext4 in which 40 MiB were deleted."""
    return made(tmp_path_factory.mktemp("filesystem"), 120, 40)


def made(folder: Path, size: int, deleted: int) -> Path:
    """An ext4 with one file, in which another one was deleted; sizes in MiB."""
    root, disk, large = folder / "root", folder / "disk.raw", folder / "large"
    (root / "etc").mkdir(parents=True)
    (root / "etc/kept").write_bytes(KEPT)
    large.write_bytes(os.urandom(deleted * MIB))
    formatted(disk, size * MIB, make=("-d", str(root)))
    for command in (f"write {large} gone", "rm gone"):
        subprocess.run(["debugfs", "-w", "-R", command, disk], check=True, capture_output=True)
    subprocess.run(["e2fsck", "-fy", disk], check=False, capture_output=True)
    return disk


def disk_of(pool: Path, filesystem: Path, form: str) -> Path:
    path = pool / f"vm.{form}"
    qemu_img("convert", "-O", form, filesystem, path)
    return path


def args_for(path: Path, form: str, **more: Any) -> dict[str, Any]:
    return rewrite_args(path, format=form, **{"undo_hours": 24, **more})


@pytest.mark.parametrize("form", ["qcow2", "raw"])
def test_deleted_data_takes_no_space_and_every_file_is_as_it_was(pool: Path, filesystem: Path, form: str) -> None:
    path = disk_of(pool, filesystem, form)
    before, content = allocated(path), path.read_bytes()
    result = ask("sparsify", args_for(path, form))
    assert result.get("swapped") is True, result
    assert (result["trimmed"], result["left"]) == ([{"device": "/dev/sda", "type": "ext4"}], [])
    assert result["files"] == 1
    assert allocated(path) == result["after_bytes"] < before - 38 * MIB
    look = {"do": "read", "device": "/dev/sda", "path": "/etc/kept"}
    answer, events = heard("files", {**args_for(path, form), **look}, "j2")
    assert "code" not in answer
    assert b"".join(unb64(one["b64"]) for one in events if one["event"] == "data") == KEPT
    assert "code" not in ask("undo", undo_args(path), job="u1")
    assert (path.read_bytes() == content, leftovers(pool)) == (True, set())


def test_a_bitmap_stays_closed_and_lazy_refcounts_do_not_look_damaged(pool: Path, filesystem: Path) -> None:
    path = pool / "vm.qcow2"
    qemu_img("convert", "-O", "qcow2", "-o", "lazy_refcounts=on", filesystem, path)
    qemu_img("bitmap", "--add", path, "backup-1")
    result = ask("sparsify", args_for(path, "qcow2", undo_hours=0))
    assert result.get("swapped") is True, result
    (bitmap,) = image_info(path)["format-specific"]["data"]["bitmaps"]
    assert (bitmap["name"], bitmap["flags"]) == ("backup-1", ["auto"])


def test_a_copy_that_is_not_smaller_is_given_up(pool: Path, filesystem: Path) -> None:
    path = disk_of(pool, filesystem, "qcow2")
    assert ask("sparsify", args_for(path, "qcow2", undo_hours=0))["swapped"] is True
    inode = path.stat().st_ino
    assert ask("sparsify", args_for(path, "qcow2"), job="j2")["swapped"] is False
    assert (path.stat().st_ino, leftovers(pool)) == (inode, set())


def spoilt(path: Path, how: str) -> None:
    """A disk on which nothing may be written."""
    if how == "not unmounted":
        subprocess.run(["debugfs", "-w", "-R", "feature needs_recovery", path], check=True, capture_output=True)
    elif how == "marked":
        subprocess.run(["debugfs", "-w", "-R", "ssv state 0", path], check=True, capture_output=True)
    elif how == "half of an array":
        header = bytearray(256)
        header[:8] = (0xA92B4EFC).to_bytes(4, "little") + (1).to_bytes(4, "little")
        header[16:32] = os.urandom(16)
        header[144:152] = (8).to_bytes(8, "little")  # where it is, in sectors
        overwrite(path, 0, bytes(4096) + header)
    elif how == "hibernated":
        subprocess.run(["mkswap", "-q", path], check=True, capture_output=True)
        overwrite(path, 4096 - 10, b"S1SUSPEND\0")
    else:
        subprocess.run(["mkfs.btrfs", "-q", "-f", path], check=True, capture_output=True)
        # Of its superblock, the tree of the log, and the checksum.
        overwrite(path, 65536 + 96, (30_000_000).to_bytes(8, "little"))
        overwrite(path, 65536, crc32c(path.read_bytes()[65536:][32:4096]).to_bytes(4, "little"))


@pytest.mark.parametrize("how", ["not unmounted", "marked", "hibernated", "log of btrfs", "half of an array"])
def test_a_disk_that_was_not_left_properly_is_not_written_to(pool: Path, filesystem: Path, how: str) -> None:
    path = disk_of(pool, filesystem, "raw")
    spoilt(path, how)
    before = path.read_bytes()
    assert ask("sparsify", args_for(path, "raw"))["code"] == "unclean_inside"
    assert (path.read_bytes() == before, leftovers(pool)) == (True, set())


def test_a_disk_without_a_filesystem_and_other_formats_are_refused(pool: Path, filesystem: Path) -> None:
    path = new_file(pool / "vm.raw", os.urandom(MIB) + bytes(7 * MIB))
    assert ask("sparsify", args_for(path, "raw"))["code"] == "nothing_to_free"
    vdi = disk_of(pool, filesystem, "vdi")
    assert ask("sparsify", args_for(vdi, "vdi"))["code"] == "unsupported_subformat"
    assert leftovers(pool) == set()


class Inside:
    """An appliance that answers as it is told."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def ask(self, do: str, _patience: float = 0) -> Any:
        return self._answers[do]


class Work:
    """What of a rewrite is asked here."""

    io = type("IO", (), {"progress": lambda *_: None})()
    watch: Callable[[], None] = staticmethod(lambda: None)


def test_a_copy_in_which_a_file_differs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"sums": [["/dev/sda", 3, "other"]]}

    @contextlib.contextmanager
    def on(*_: Any, **__: Any) -> Iterator[Inside]:
        yield Inside(sums=found)

    monkeypatch.setattr(appliance, "on", on)
    monkeypatch.setattr(FileCopy, "verify", lambda *_: None)
    recipe = sparsify.Sparsify()
    recipe._sums = [["/dev/sda", 3, "one"]]
    with pytest.raises(HostError):
        recipe.verify(Work(), Node(0, "raw", b"x"))  # type: ignore[arg-type]
    found["sums"][0][2] = "one"
    recipe.verify(Work(), Node(0, "raw", b"x"))  # type: ignore[arg-type]
