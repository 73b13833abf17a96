"""Keys of the data folder: one for all who start at once, whole or not there."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from storage_admin import sealing
from storage_admin.key_files import key_in
from tests.harness.patching import raising


def test_those_that_start_at_once_have_one_key(tmp_path: Path) -> None:
    path, together = tmp_path / "data" / "key", Barrier(8)

    def make(number: int) -> str:
        together.wait(10)  # nobody has found a file
        return f"key {number}"

    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda number: key_in(path, lambda: make(number)), range(8)))
    assert keys == {path.read_text()}
    assert [(one.name, one.stat().st_mode & 0o777) for one in path.parent.iterdir()] == [("key", 0o600)]


def test_a_key_is_on_the_disk_before_anybody_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "key", list[tuple[str, bool]]()

    def fsync(descriptor: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    key_in(path, lambda: "key")
    assert [(Path(name).parent, there) for name, there in synced] == [(tmp_path, False), (tmp_path.parent, True)]


def test_a_key_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        key_in(tmp_path / "key", lambda: "key")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"short", b"\xff\xfe\x00", b"k" * 43 + b"\xe4"], ids=ascii)
def test_a_damaged_key_of_the_secrets_is_told(
    content: bytes, tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.DATA_DIR = tmp_path
    monkeypatch.delenv("STORAGE_ADMIN_SECRETS_KEY", raising=False)
    monkeypatch.setattr(sealing, "_box", sealing._box.__wrapped__)  # which nobody has asked before
    (tmp_path / "secrets.key").write_bytes(content)
    with pytest.raises(sealing.SealError, match="damaged"):
        sealing.lock("x")
