"""Of disks outside of the pools a scan opens files and volumes alone, and in image folders what has the name itself."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.verbs import scan
from tests.agent.harness import qemu_img
from tests.agent.test_image_folders import swapping
from tests.faults.swapper import Watch
from tests.harness.filesystems import new_folder

pytestmark = pytest.mark.qemu


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    return new_folder(tmp_path / "hidden", mode=0o700)


@pytest.fixture
def opened(hidden: Path) -> Iterator[Watch]:
    """Who opens something in that folder."""
    with contextlib.closing(Watch(hidden)) as watch:
        yield watch


def told(*paths: Path) -> dict[bytes, str]:
    """Why each of these disks is told of, by its name."""
    rows = scan.bases_outside([bytes(path) for path in paths], {}, Mounts.of_this_machine())
    return {protocol.unb64(row["path_b64"]).rpartition(b"/")[2]: row["why"] for row in rows}


def overlay(path: Path) -> Path:
    """An image whose base lies outside of every pool, which is told."""
    qemu_img("create", "-q", "-f", "raw", path.with_name("base.raw"), "1M")
    qemu_img("create", "-q", "-f", "qcow2", "-b", path.with_name("base.raw"), "-F", "raw", path)
    return path


def test_a_device_or_a_pipe_that_is_called_a_disk_is_not_opened(
    hidden: Path, opened: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a watchdog's, which would begin to run. Also where a guest's definition names it."""
    os.mkfifo(hidden / "pipe")
    os.mknod(hidden / "null", 0o600 | 0o020000, os.makedev(1, 3))
    (tmp_path / "link").symlink_to(hidden / "null")
    named = [hidden / "pipe", hidden / "null", tmp_path / "link", hidden]
    monkeypatch.setattr(scan, "_definitions", lambda: b"\n".join(map(bytes, named)))
    opened.seen()
    assert told(*named) == {}
    assert opened.seen() == []


def test_a_name_that_is_exchanged_with_a_link_leads_to_no_other_file(
    hidden: Path, opened: Watch, tmp_path: Path
) -> None:
    overlay(hidden / "secret.qcow2")
    disk, link = overlay(tmp_path / "disk.qcow2"), tmp_path / "link"
    link.symlink_to(hidden / "secret.qcow2")
    opened.seen()
    seen: set[str] = set()
    with swapping(disk, link):
        for _ in range(2000):
            seen.update(told(disk).values())
    assert opened.seen() == []
    assert len(seen) == 2


def test_a_link_in_an_image_folder_is_not_followed_to_a_file(hidden: Path, opened: Watch, tmp_path: Path) -> None:
    overlay(hidden / "secret.qcow2")
    (tmp_path / "link").symlink_to(hidden / "secret.qcow2")
    opened.seen()
    assert set(told(tmp_path / "link")) == {b"link"}
    assert opened.seen() == []
