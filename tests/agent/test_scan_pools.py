"""A file of a pool is reached component by component, and never through a symbolic link."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.folders import image_folders
from storage_admin.agent.folders.pools import open_beneath, open_parent
from storage_admin.agent.protocol import RefusedError, display
from tests.working import refused_as


def content(pool: Path, path: Path | str) -> bytes:
    with os.fdopen(open_beneath(bytes(pool), os.fsencode(path)), "rb", buffering=0) as file:
        return file.read(100)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    folder = tmp_path / "pool"
    (folder / "sub").mkdir(parents=True)
    (folder / "disk").write_bytes(b"top")
    (folder / "sub" / "disk").write_bytes(b"below")
    (tmp_path / "secret").write_bytes(b"secret")
    return folder


def test_opens_files_of_the_pool_and_of_its_folders(pool: Path) -> None:
    assert content(pool, pool / "disk") == b"top"
    assert content(pool, f"{pool}//sub/./disk") == b"below"
    folder, name = open_parent(bytes(pool), bytes(pool / "sub" / "disk"))
    assert (os.fstat(folder).st_ino, name) == ((pool / "sub").stat().st_ino, b"disk")
    os.close(folder)


def test_the_pools_own_path_may_hold_a_link(pool: Path) -> None:
    (pool.parent / "link").symlink_to(pool)
    assert content(pool.parent / "link", pool.parent / "link" / "disk") == b"top"


@pytest.mark.parametrize(
    "path", ["{0}", "{0}/", "{0}/../secret", "{0}/sub/../../secret", "{0}2/disk", "/etc/passwd", "disk", "", "{0}/a\0b"]
)
def test_refuses_what_is_not_beneath_the_pool(pool: Path, path: str) -> None:
    assert refused_as(content, pool, path.format(pool)) == "outside_pool"


@pytest.mark.parametrize("place", ["file", "folder/secret"])
def test_refuses_symbolic_links_wherever_they_stand(pool: Path, place: str) -> None:
    (pool / "file").symlink_to(pool.parent / "secret")
    (pool / "folder").symlink_to(pool.parent)
    with pytest.raises(RefusedError, match="symbolic link"):
        content(pool, pool / place)


def test_what_is_missing_is_missing_and_not_refused(pool: Path) -> None:
    with pytest.raises(FileNotFoundError):
        content(pool, pool / "gone")
    with pytest.raises(NotADirectoryError):
        content(pool, pool / "disk" / "below")


def test_somebody_who_swaps_folders_for_links_never_gets_the_secret_read(pool: Path) -> None:
    (pool.parent / "outside").mkdir()
    (pool.parent / "outside" / "disk").write_bytes(b"secret")
    (pool / "link").symlink_to(pool.parent / "outside")
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            for source, target in (("sub", "kept"), ("link", "sub"), ("sub", "link"), ("kept", "sub")):
                (pool / source).rename(pool / target)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen: set[bytes] = set()
    # Which of the two is found is a matter of luck and of the machine's load: until both were, and often.
    wanted, until = {b"below", b"RefusedError"}, time.monotonic() + 60
    tries = 0
    try:
        while tries < 1000 or (not wanted <= seen and time.monotonic() < until):
            tries += 1
            try:
                seen.add(content(pool, pool / "sub" / "disk"))
            except (RefusedError, FileNotFoundError) as error:
                seen.add(type(error).__name__.encode())
    finally:
        over.set()
        swapper.join()
    assert b"secret" not in seen
    assert wanted <= seen


def test_a_link_that_is_a_folder_at_the_second_look_is_gone_into(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, really_open = pool.with_name("kept"), os.open
    pool.rename(kept)
    pool.symlink_to(kept)

    def exchanging(path: Any, *how: Any, **where: Any) -> int:
        try:
            return really_open(path, *how, **where)
        except NotADirectoryError:
            pool.unlink()
            kept.rename(pool)
            raise

    monkeypatch.setattr(os, "open", exchanging)
    found = image_folders.reach(bytes(pool))
    assert (found.real, os.fstat(found.fd).st_ino) == (bytes(pool), pool.stat().st_ino)
    os.close(found.fd)


def test_shows_any_bytes_as_text_that_harms_nobody() -> None:
    assert display(b"a\xff\x1b[31m\n\xc3\xa4") == "a\\xff\\x1b[31m\\n\u00e4"
