"""Which files are in use, by real programs that hold them."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage_admin.agent.host import in_use, locking
from tests.agent.formats.test_against_qemu import create
from tests.agent.harness import held_open
from tests.agent.recording import RecordingIO, encoded
from tests.agent.test_scan import scanned
from tests.harness.filesystems import loop_device, new_file

pytestmark = pytest.mark.qemu


@contextmanager
def opened_by_qemu(path: Path) -> Iterator[None]:
    """A process of qemu that has the image open for writing."""
    command = ["qemu-io", "-f", "qcow2", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"read 0 512\n")
            process.stdin.flush()
            assert b"512" in process.stdout.readline()
            yield
        finally:
            process.stdin.close()
            process.wait(10)


@contextmanager
def orphan(*command: str) -> Iterator[None]:
    """A process that is no child of this one, as on a host everything is."""
    shell = ["sh", "-c", 'setsid "$@" >/dev/null 2>&1 & echo $!', "sh", *command]
    pid = int(subprocess.check_output(shell, text=True))
    try:
        time.sleep(0.3)
        yield
    finally:
        os.kill(pid, 15)


def reasons(io: RecordingIO, path: Path) -> list[str]:
    status = path.stat()
    return [why for dev, inode, why in io.one("seen")["busy"] if (dev, inode) == (status.st_dev, status.st_ino)]


def test_an_image_and_its_base_are_in_use_while_qemu_has_them_open(tmp_path: Path) -> None:
    create(tmp_path / "base.qcow2", "qcow2")
    create(tmp_path / "over.qcow2", "qcow2", "", "", "-b", "base.qcow2", "-F", "qcow2")
    create(tmp_path / "idle.qcow2", "qcow2")
    known = b"".join(bytes.fromhex(image["fp"]) for image in scanned(tmp_path).all("image"))
    with opened_by_qemu(tmp_path / "over.qcow2"):
        first, again = scanned(tmp_path), scanned(tmp_path, known=known)
    for io in (first, again):
        assert "locked by qemu or a like program" in reasons(io, tmp_path / "over.qcow2")
        assert "locked by qemu or a like program" in reasons(io, tmp_path / "base.qcow2")
        assert reasons(io, tmp_path / "idle.qcow2") == []
        assert io.one("seen")["busy_complete"] is True
    assert reasons(scanned(tmp_path), tmp_path / "over.qcow2") == []


def test_a_file_that_a_program_without_locks_has_open_is_in_use(tmp_path: Path) -> None:
    for name in ("held.raw", "idle.raw"):
        (tmp_path / name).write_bytes(bytes(4096))
    with orphan("tail", "-f", str(tmp_path / "held.raw")):
        io = scanned(tmp_path)
    (why,) = reasons(io, tmp_path / "held.raw")
    assert why.startswith("open in process ")
    assert why.endswith("(tail)")
    assert reasons(io, tmp_path / "idle.raw") == []


def test_a_process_that_ends_before_it_is_known_whose_it_is_uses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tool of an agent that samples the image, beside a scan."""
    image = new_file(tmp_path / "sampled.raw", bytes(4096))
    status, ask = image.stat(), in_use._own_processes
    tool = subprocess.Popen(["tail", "-f", image], stdout=subprocess.DEVNULL)
    asked: list[int] = []

    def own() -> set[int]:
        found = ask() - {tool.pid}
        tool.kill()
        tool.wait()
        asked.append(tool.pid)
        return found

    monkeypatch.setattr(in_use, "_own_processes", own)
    time.sleep(0.3)
    assert in_use.holds({status.st_dev: {status.st_ino}}).holds == ()
    assert asked, "nobody had it open"


def test_scan_and_rewrite_agree_on_a_file_in_shared_memory() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".raw") as file:
        file.write(bytes(4096))
        file.flush()
        status = Path(file.name).stat()
        with orphan("tail", "-f", file.name):
            (hold,) = in_use.holds({status.st_dev: {status.st_ino}}).holds
            who = locking.opener([in_use.FileId(status.st_dev, status.st_ino)])
    assert hold.why.endswith("(tail)")
    assert who is not None
    assert who.endswith("(tail)")


def test_a_file_behind_a_loop_device_is_in_use(tmp_path: Path) -> None:
    image = new_file(tmp_path / "container.raw", bytes(1 << 20))
    with loop_device(image) as device:
        assert f"behind the loop device {device.name}" in reasons(scanned(tmp_path), image)


@pytest.mark.parametrize(("first", "length", "held"), [(100, 1, True), (203, 1, True), (0, 0, True), (104, 96, False)])
def test_only_the_bytes_that_qemu_locks_count(tmp_path: Path, first: int, length: int, held: bool) -> None:
    path = new_file(tmp_path / "disk.raw", bytes(4096))
    with held_open(path, os.O_RDWR) as fd:
        fcntl.fcntl(fd, 37, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, first, length, 0))  # F_OFD_SETLK
        assert bool(reasons(scanned(tmp_path), path)) is held


def test_a_file_on_a_filesystem_with_two_device_numbers_is_found_by_both(tmp_path: Path) -> None:
    path = new_file(tmp_path / "disk.raw", bytes(4096))
    status = path.stat()
    shown = os.makedev(0, 77)  # what stat would say on btrfs, where /proc/locks has the superblock's device
    with held_open(path, os.O_RDWR) as fd:
        fcntl.fcntl(fd, 37, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 100, 1, 0))
        assert in_use.holds({shown: {status.st_ino}}).holds == ()
        (hold,) = in_use.holds({shown: {status.st_ino}}, {status.st_dev: shown}).holds
        assert (hold.device, hold.inode) == (shown, status.st_ino)


def test_a_swap_file_is_in_use(tmp_path: Path) -> None:
    swap = new_file(tmp_path / "with space")
    table = tmp_path / "swaps"
    name = str(swap).replace(" ", "\\040")
    table.write_text(f"Filename Type Size Used Priority\n{name} file 1 0 -2\n/dev/vdb partition 1 0 -3\n")
    status = swap.stat()
    assert list(in_use.swap_files(str(table))) == [(status.st_dev, status.st_ino)]


def test_files_outside_the_pools_are_not_told(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    create(tmp_path / "outside.qcow2", "qcow2")
    with opened_by_qemu(tmp_path / "outside.qcow2"):
        assert scanned(tmp_path / "pool").one("seen")["busy"] == []
        assert scanned(tmp_path / "pool", probe_b64=[encoded(tmp_path)]).one("seen")["busy"] == []


def test_one_of_ours_that_ends_while_processes_are_looked_through_uses_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (image := tmp_path / "a.raw").touch()
    status = image.stat()
    children = [subprocess.Popen(["sleep", "60"])]

    def opened(*_: object) -> Iterator[tuple[int, int, int]]:
        """Each look finds one of ours that samples the image, and is gone by its end; the next one is there by then."""
        children.append(subprocess.Popen(["sleep", "60"]))
        yield status.st_dev, status.st_ino, children[-2].pid
        children[-2].kill()
        children[-2].wait()

    monkeypatch.setattr(in_use, "_descriptors", opened)
    try:
        assert in_use.holds({status.st_dev: {status.st_ino}}) == in_use.Holds((), True)
    finally:
        children[-1].kill()
        children[-1].wait()
    assert len(children) == 3, "the first look does not know it, the second one does"
