"""Who is kept away on network filesystems while a file takes another one's place.

Locks are this machine's own here. What NFSv3 answers to a question about them is a stand-in for what was recorded
between two machines: F_OFD_GETLK says "nobody" whoever holds one, F_OFD_SETLK tells the truth. So is what NFSv4.2 makes
of a lease: whatever was opened before the file got another name has none any more.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host import locking
from storage_admin.agent.host.mounts import Mount, Mounts
from storage_admin.agent.protocol import RefusedError, Request
from storage_admin.agent.swap import fence
from storage_admin.agent.swap.fence import Fence
from storage_admin.agent.verbs import aside, undo
from tests.agent.aside import ASIDE, aside_args, delete_args
from tests.agent.harness import Writer, ask, held_open, make_image, reclaim_args, undo_args
from tests.agent.recording import GoIO, RecordingIO

pytestmark = pytest.mark.qemu

GETLK, SETLEASE = 36, 1024
Files = tuple[int, int, int]


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Mount]]:
    """Folders lie on NFSv3, as this mount of the list says; nobody tells of locks, and there are no leases."""
    found = [Mount(1, 1, b"/", b"/", "nfs", b"server:/export", b"rw,vers=3,local_lock=none")]
    real = fcntl.fcntl

    def told(fd: int, command: int, argument: Any = 0) -> Any:
        if command == SETLEASE:
            raise OSError(errno.EINVAL, "no leases")
        answer = real(fd, command, argument)
        return locking._FLOCK.pack(fcntl.F_UNLCK, 0, 0, 0, 0) if command == GETLK else answer

    monkeypatch.setattr(Mounts, "of_descriptor", lambda self, fd: found[0])
    monkeypatch.setattr(fcntl, "fcntl", told)
    monkeypatch.setattr(fence, "NAMES_KEPT", 0.0)
    yield found
    assert locking.fenced == {}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    """Descriptors of a folder, of an image in it, and of a new file that is to take its place."""
    old, new = make_image(tmp_path / "image.qcow2"), make_image(tmp_path / "new.qcow2")
    with held_open(tmp_path) as folder, held_open(old) as image, held_open(new, os.O_RDWR) as file:
        yield folder, image, file


def _code(*files: int) -> str:
    with pytest.raises(RefusedError) as refused, Fence(*files):
        raise AssertionError("it was let in")
    return refused.value.code


def test_a_writer_on_another_machine_is_seen_though_a_question_says_nobody(
    nfs: list[Mount], files: Files, tmp_path: Path
) -> None:
    with Writer(tmp_path / "image.qcow2"):
        assert locking.locked_bytes(files[1]) == []
        assert _code(*files) == "image_in_use"
    with Writer(tmp_path / "image.qcow2", read_only=True):
        assert _code(*files) == "image_in_use"
    with Fence(*files):
        pass


def test_nobody_opens_either_file_elsewhere_until_it_is_over_and_we_read_on(
    nfs: list[Mount], files: Files, tmp_path: Path
) -> None:
    with Fence(*files):
        for name in ("image.qcow2", "new.qcow2"):
            for read_only in (True, False):
                with Writer(tmp_path / name, read_only=read_only) as other:
                    assert other.refused
        assert locking.locked_bytes(files[1]) == locking.locked_bytes(files[2]) == []
        assert locking.user(files[1]) is None
        assert os.pread(files[1], 4, 0) == b"QFI\xfb"
    with Writer(tmp_path / "image.qcow2") as other:
        assert not other.refused


@pytest.mark.parametrize("option", ["nolock", "local_lock=all", "local_lock=posix"])
def test_locks_that_no_other_machine_hears_of_are_none(nfs: list[Mount], files: Files, option: str) -> None:
    nfs[0] = replace(nfs[0], options=b"rw," + option.encode())
    assert _code(*files) == "locks_missing"


def test_a_server_without_locks_is_refused(nfs: list[Mount], files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locking, "take", take)
    assert _code(*files) == "locks_missing"


def test_the_locks_outlast_the_old_name_on_other_clients_unless_the_file_is_gone(
    nfs: list[Mount], files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "NAMES_KEPT", 1.2)
    io = RecordingIO()
    with Fence(*files) as held:
        held.outlast_names(files[1], io)
        for name, is_refused in (("image.qcow2", True), ("new.qcow2", False)):
            with Writer(tmp_path / name) as other:
                assert other.refused == is_refused, name
        assert len(io.all("progress")) == 3
        (tmp_path / "image.qcow2").unlink()
        held.outlast_names(files[1], io)
        assert len(io.all("progress")) == 3


def test_on_a_disk_of_this_machine_guests_that_read_are_let_in(files: Files, tmp_path: Path) -> None:
    with Fence(*files) as held:
        with Writer(tmp_path / "image.qcow2") as other:
            assert other.refused
        assert locking.fenced == {}
        held.outlast_names(files[1], RecordingIO())


def test_a_lease_is_asked_on_a_fresh_descriptor_where_an_older_one_has_lost_it(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = locking.is_leased
    monkeypatch.setattr(locking, "is_leased", lambda fd: False if fd == files[1] else real(fd))
    assert locking.open_for_writing(files[1]) is True
    monkeypatch.setattr(locking, "_is_network", lambda fd: True)
    assert locking.open_for_writing(files[1]) is False
    with Path(f"/proc/self/fd/{files[1]}").open("r+b"):
        assert locking.open_for_writing(files[1]) is True


def test_a_server_that_gives_no_leases_is_told_from_a_writer_and_nothing_is_left_of_the_question(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(locking, "_is_network", lambda fd: True)
    with Path(f"/proc/self/fd/{files[1]}").open("r+b"):
        assert locking.open_for_writing(files[1]) is True
        monkeypatch.setattr(locking, "is_leased", lambda fd: False)
        assert locking.open_for_writing(files[1]) is None
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("link", [True, False], ids=["link", "folder"])
def test_nothing_is_made_in_a_folder_that_took_the_place_of_the_files_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    """Who owns a folder above puts another one there once the file's path was read."""
    pool, elsewhere = tmp_path / "above" / "pool", tmp_path / "elsewhere"
    for folder in (pool, elsewhere):
        folder.mkdir(parents=True)
        (folder / "image.qcow2").touch()
        os.utime(folder, ns=(0, 0))
    real = os.readlink

    def then_exchanged(path: str) -> str:
        found = real(path)
        pool.parent.rename(tmp_path / "away")
        if link:
            pool.parent.symlink_to(elsewhere.parent)
            elsewhere.rename(tmp_path / "pool")
        else:
            pool.parent.mkdir()
            elsewhere.rename(pool)
        return found

    monkeypatch.setattr(locking, "_is_network", lambda fd: True)
    monkeypatch.setattr(locking, "is_leased", lambda fd: False)
    with (pool / "image.qcow2").open("rb") as image:
        monkeypatch.setattr(os, "readlink", then_exchanged)
        assert locking.open_for_writing(image.fileno()) is True
    assert (pool.stat().st_mtime_ns, (tmp_path / "away" / "pool").stat().st_mtime_ns) == (0, 0)


# One file alone loses its name


@pytest.fixture
def elsewhere(nfs: list[Mount], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has a file open is on another machine: no process of this one tells of it."""
    monkeypatch.setattr(locking, "_process", lambda files, unseen: None)


@pytest.mark.usefixtures("elsewhere")
def test_what_a_guest_elsewhere_has_locked_is_neither_set_aside_nor_deleted(tmp_path: Path) -> None:
    image = make_image(tmp_path / "left.qcow2")
    inode = image.stat().st_ino

    def set_aside() -> dict[str, Any]:
        return aside.set_aside(Request("set_aside", "j1", 1, aside_args(image)), GoIO())

    def delete() -> dict[str, Any]:
        return aside.delete(Request("delete_aside", "j2", 1, delete_args(image, inode)), GoIO())

    for act, named in ((set_aside, image), (delete, tmp_path / ASIDE)):
        for read_only in (False, True):
            with Writer(named, read_only=read_only), pytest.raises(RefusedError) as refused:
                act()
            assert (refused.value.code, named.stat().st_ino) == ("image_in_use", inode)
        act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("elsewhere")
def test_an_undo_copy_that_a_guest_elsewhere_has_locked_is_not_removed(tmp_path: Path) -> None:
    image, copy = make_image(tmp_path / "disk.qcow2"), tmp_path / ".sa-j1.orig"
    assert ask("reclaim", reclaim_args(image, method="copy", undo_hours=24))["swapped"]

    def discard() -> dict[str, Any]:
        return undo.discard(Request("discard_undo", "d1", 1, undo_args(image, force=True)), GoIO())

    with Writer(copy, read_only=True), pytest.raises(RefusedError) as refused:
        discard()
    assert (refused.value.code, copy.exists()) == ("image_in_use", True)
    assert (discard()["found"], copy.exists()) == (True, False)


@pytest.mark.usefixtures("elsewhere")
def test_an_image_set_aside_is_held_until_no_other_machine_finds_it_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "NAMES_KEPT", 0.6)
    image, seen = make_image(tmp_path / "left.qcow2"), []

    class Trying(GoIO):
        def progress(self, stage: str, done: int, total: int | None, message: str = "") -> None:
            if total is not None:
                with Writer(tmp_path / ASIDE) as other:
                    seen.append(other.refused)

    aside.set_aside(Request("set_aside", "j1", 1, aside_args(image)), Trying())
    assert set(seen) == {True}
    with Writer(tmp_path / ASIDE) as other:
        assert not other.refused
