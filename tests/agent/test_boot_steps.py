"""Steps of a boot storm as they travel, what is refused of them, and what of a host's files is never copied."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.bench import boot, boot_files, memory
from storage_admin.agent.bench.step import Bench
from storage_admin.agent.folders import image_folders, scratch
from storage_admin.agent.host import facts, space
from storage_admin.agent.protocol import RefusedError, b64
from tests.agent.harness import held_open
from tests.agent.recording import RecordingIO
from tests.faults.swapper import Watch
from tests.harness.filesystems import new_file, new_folder
from tests.working import refused_as

MIB = 1 << 20
IMAGE = {
    "path_b64": b64(b"/pool/a.qcow2"), "pool_path_b64": b64(b"/pool"), "format": "qcow2", "dev": 1, "inode": 2,
    "file_size": 3, "mtime_ns": 4, "ctime_ns": 5,
}  # fmt: skip
STEP: dict[str, Any] = {
    "layout": "raw", "guests": 4, "memory_bytes": 256 * MIB, "seconds": 60, "up": "console", "pattern": "login:",
    "kernel": "/boot/vmlinuz", "initrd": "/boot/initrd", "append": "console=ttyS0", "virtual_bytes": 64 * MIB,
    "growth_bytes": 32 * MIB, "setting": {"layout": "raw", "guests": 4},
}  # fmt: skip


@contextlib.contextmanager
def bench_in(pool: Path) -> Iterator[Bench]:
    """A run in the folder of a pool."""
    with held_open(pool) as fd:
        claimed = space.SpaceClaim("job1", fd)
        with scratch.made(fd, bytes(pool), "job1", RecordingIO()) as folder, claimed as claim:
            yield Bench(RecordingIO(), folder, space.Reserve(0.0, 0), space.Others(), "ext4", "job1", claim)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with bench_in(tmp_path) as bench:
        yield bench


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"kernel": "", "initrd": ""}, "name one of them"),
        ({"kernel": "", "image": IMAGE}, "goes with a kernel"),
        ({"kernel": "boot/vmlinuz"}, "not an absolute path"),
        ({"initrd": "../initrd"}, "not an absolute path"),
        ({"image": IMAGE | {"format": "vmdk"}}, "qcow2 or a raw"),
        ({"image": {"path_b64": "!"}}, "not described completely"),
        ({"pattern": " "}, "must not be empty"),
        ({"pattern": "a\nb"}, "one line"),
        ({"append": "a\0b"}, "one line"),
        ({"append": "a" * 3000}, "one line"),
        ({"layout": "vmdk"}, "layout is one of"),
        ({"guests": 0}, "guests is 1 to 64"),
        ({"guests": 65}, "guests is 1 to 64"),
        ({"memory_bytes": 1}, "memory_bytes is"),
        ({"up": "ping"}, "up is one of"),
        ({"seconds": 0}, "seconds is"),
        ({"argv": ["rm"]}, "unknown option: argv"),
        ({"xml": "<domain/>"}, "unknown option: xml"),
    ],
)
def test_what_cannot_boot_or_is_not_known_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(RefusedError, match=why) as caught:
        boot.parse([STEP | wrong])
    assert caught.value.code == "invalid"


def test_all_steps_boot_the_same() -> None:
    with pytest.raises(RefusedError, match="boot the same"):
        boot.parse([STEP, STEP | {"memory_bytes": 128 * MIB}])


def test_each_layout_needs_its_disks_and_what_the_guests_write() -> None:
    needed = {}
    for layout in boot.LAYOUTS:
        (step,) = boot.parse(
            [STEP | {"layout": layout, "image": IMAGE, "kernel": "", "initrd": "", "image_bytes": 20 * MIB}]
        )
        needed[layout] = step.needed_bytes // MIB
    assert 20 + 4 * (20 + 32) <= needed["raw"] < 20 + 4 * (20 + 32) + 8
    assert 20 + 4 * 32 <= needed["raw+qcow2"] < 20 + 4 * 33 + 8
    assert needed["raw+qcow2"] + 20 < needed["qcow2+qcow2"] < needed["raw+qcow2"] + 30


def test_more_guests_than_the_memory_has_room_for_are_left_out_and_none_at_all_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = boot.parse([STEP | {"guests": number} for number in (8, 1, 4)])
    monkeypatch.setattr(facts, "memory_bytes", lambda _which: memory.KEPT_BYTES + 4 * 320 * MIB)
    told = [step.unsupported(bench) for step in steps]
    assert told[1:] == [None, None]
    assert told[0] is not None
    assert "8 guests need" in told[0]
    assert "4 fit: left out" in told[0]
    monkeypatch.setattr(facts, "memory_bytes", lambda _which: memory.KEPT_BYTES)
    assert refused_as(steps[1].unsupported, bench) == "not_enough_memory"
    monkeypatch.setattr(facts, "memory_bytes", lambda _which: None)
    assert steps[0].unsupported(bench) is None


def secret(folder: Path) -> Path:
    return new_file(folder / "shadow", "root:$y$j9T$secret:19700:0:99999:7:::\n" * 100)


def test_a_file_that_is_no_kernel_and_no_archive_is_not_copied(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(secret(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name in ("shadow", "link", "pipe", "empty", "nothing", ".", "shadow/x"):
        for marks, what in ((boot_files.KERNELS, "kernel"), (boot_files.ARCHIVES, "archive")):
            code = refused_as(boot_files.bring, bench, str(tmp_path / name), "copy", marks, what)
            # The folder itself stands in the one above it.
            assert code in {"invalid", "folder_not_listed"}, name
    for device in ("/dev/zero", "/proc/kcore", "/proc/1/mem"):
        assert refusal(bench, device) == "folder_not_listed"
    assert bench.scratch.names() == []


def refusal(bench: Bench, path: Path | str) -> str:
    """The code with which a file is not copied; the files that are tried begin as an archive does."""
    return refused_as(boot_files.bring, bench, str(path), "copy", boot_files.ARCHIVES, "archive")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Watch]:
    """A folder ``hidden`` with an archive that only root may read, and who opens something in it."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "backup.gz").write_bytes(b"\x1f\x8b\x08" + os.urandom(5000))
    (tmp_path / "hidden" / "backup.gz").chmod(0o600)
    with contextlib.closing(Watch(tmp_path / "hidden")) as watch:
        yield watch


@pytest.mark.parametrize("folder", ["hidden", "root", "strange", "images/../hidden"])
def test_an_archive_of_roots_outside_of_the_image_folders_is_not_even_opened(
    bench: Bench, tmp_path: Path, opened: Watch, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    lists = new_file(tmp_path / "image-folders", f"{tmp_path}/images\n")
    monkeypatch.setenv(image_folders.VARIABLE, str(lists))
    (tmp_path / "images").mkdir()
    (tmp_path / "root").symlink_to("hidden")
    (tmp_path / "strange").symlink_to("hidden")
    os.lchown(tmp_path / "strange", 65534, 65534)
    code = "pool_changed" if folder == "strange" else "folder_not_listed"
    assert refusal(bench, tmp_path / folder / "backup.gz") == code
    (tmp_path / "images" / "link").symlink_to(tmp_path / "hidden" / "backup.gz")
    assert refusal(bench, tmp_path / "images" / "link") == "invalid"
    assert (opened.seen(), bench.scratch.names()) == ([], [])
    (tmp_path / "hidden" / "backup.gz").rename(tmp_path / "images" / "backup.gz")
    boot_files.bring(bench, str(tmp_path / "images" / "backup.gz"), "copy", boot_files.ARCHIVES, "archive")
    assert bench.scratch.names() == ["copy"]


def test_of_the_systems_own_files_those_are_booted_that_everybody_may_read(
    bench: Bench, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder of kernels is one of the test's own here."""
    own, file = new_folder(shared_folder / "boot"), shared_folder / "boot" / "initrd"
    file.write_bytes(b"\x1f\x8b\x08" + os.urandom(5000))
    monkeypatch.setattr(boot_files, "_OF_THE_SYSTEM", (bytes(own),))
    watch = Watch(own)
    for mode, uid, folder in ((0o600, 0, 0o755), (0o640, 0, 0o755), (0o600, 65534, 0o755), (0o644, 0, 0o700)):
        file.chmod(mode)
        os.chown(file, uid, 0)
        own.chmod(folder)
        watch.seen()
        assert refusal(bench, file) == "invalid"
        assert watch.seen() == []
    watch.close()
    own.chmod(0o755)
    boot_files.bring(bench, str(file), "copy", boot_files.ARCHIVES, "archive")
    assert bench.scratch.names() == ["copy"]


def test_a_file_that_is_larger_than_any_kernel_is_not_copied(bench: Bench, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.write(b"070701")
        file.truncate(boot_files.MOST_BYTES + 1)
    with pytest.raises(RefusedError, match="at most"):
        boot_files.bring(bench, str(tmp_path / "large"), "copy", boot_files.ARCHIVES, "archive")
    assert bench.scratch.names() == []


def test_a_kernel_is_copied_whole_for_its_owner_alone(bench: Bench, tmp_path: Path) -> None:
    content = b"\0" * 0x202 + b"HdrS" + os.urandom(3 * MIB)
    (tmp_path / "vmlinuz-1").write_bytes(content)
    boot_files.bring(bench, str(tmp_path / "vmlinuz-1"), "kernel", boot_files.KERNELS, "kernel")
    copy = Path(bench.scratch.named_path.decode()) / "kernel"
    assert copy.read_bytes() == content
    assert copy.stat().st_mode & 0o777 == 0o600
