"""Pools inside pools: each image belongs to the deepest one, and to no other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import b64, unb64
from storage_admin.agent.verbs import scan
from tests.agent.recording import RecordingIO, request
from tests.harness.filesystems import mounted, new_folder


def image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 4096)
    return path


def scanned(
    *pools: tuple[Path, str], known: dict[int, bytes] | None = None, named: tuple[Path, ...] = ()
) -> RecordingIO:
    """A scan of these pools, whose ids are their places in the list, from 0 on."""
    io = RecordingIO()
    asked: list[dict[str, Any]] = [
        {"id": number, "path_b64": b64(bytes(path)), "kind": kind, "known_b64": b64((known or {}).get(number, b""))}
        for number, (path, kind) in enumerate(pools)
    ]
    scan.run(request("scan", pools=asked, named_b64=[b64(bytes(path)) for path in named]), io)
    return io


def told(io: RecordingIO) -> dict[str, list[int]]:
    """In which pools each file was told, by its name."""
    found: dict[str, list[int]] = {}
    for event in io.all("image"):
        found.setdefault(Path(unb64(event["path_b64"]).decode()).name, []).append(event["pool"])
    return found


def test_an_image_belongs_to_the_deepest_pool_whatever_their_order(tmp_path: Path) -> None:
    for place in ("top.raw", "a/mid.raw", "a/b/deep.raw", "c/side.raw"):
        image(tmp_path / place)
    pools = [(tmp_path, "dir"), (tmp_path / "a", "dir"), (tmp_path / "a/b", "dir")]
    assert told(scanned(*pools)) == {"top.raw": [0], "side.raw": [0], "mid.raw": [1], "deep.raw": [2]}
    assert told(scanned(*reversed(pools))) == {"top.raw": [2], "side.raw": [2], "mid.raw": [1], "deep.raw": [0]}


def test_what_a_flat_pool_does_not_walk_stays_with_the_one_around_it(tmp_path: Path) -> None:
    image(tmp_path / "images/flat.raw")
    image(tmp_path / "images/below/deeper.raw")
    io = scanned((tmp_path, "dir"), (tmp_path / "images", "libvirt"))
    assert told(io) == {"flat.raw": [1], "deeper.raw": [0]}


def test_a_proxmox_storage_inside_keeps_its_volumes(tmp_path: Path) -> None:
    image(tmp_path / "store/images/100/vm-100-disk-0.raw")
    image(tmp_path / "store/loose.raw")
    io = scanned((tmp_path, "dir"), (tmp_path / "store", "proxmox"))
    assert told(io) == {"vm-100-disk-0.raw": [1], "loose.raw": [0]}


def test_a_pool_that_is_reached_through_a_link_is_known_by_its_folder(tmp_path: Path) -> None:
    image(tmp_path / "all/inner/one.raw")
    (tmp_path / "short").symlink_to(tmp_path / "all/inner")
    assert told(scanned((tmp_path / "all", "dir"), (tmp_path / "short", "dir"))) == {"one.raw": [1]}


def test_what_a_guest_names_belongs_to_the_deepest_pool_too(tmp_path: Path) -> None:
    odd, deep = image(tmp_path / "images/odd.name"), image(tmp_path / "images/below/odd.deep")
    io = scanned((tmp_path, "dir"), (tmp_path / "images", "libvirt"), named=(odd, deep))
    assert told(io) == {"odd.name": [1], "odd.deep": [1]}


def test_nothing_vanishes_from_a_pool_inside_another_and_nothing_is_told_twice(tmp_path: Path) -> None:
    image(tmp_path / "top.raw")
    image(tmp_path / "a/mid.raw")
    pools = [(tmp_path, "dir"), (tmp_path / "a", "dir")]
    first = scanned(*pools)
    known = dict.fromkeys(range(2), b"")
    for event in first.all("image"):
        known[event["pool"]] += bytes.fromhex(event["fp"])
    again = scanned(*pools, known=known)
    assert again.all("image") == []
    assert [event["vanished_b64"] for event in again.all("pool")] == ["", ""]
    assert [event["images"] for event in again.all("pool")] == [1, 1]


@pytest.mark.services
def test_a_folder_that_is_mounted_twice_is_walked_once(tmp_path: Path) -> None:
    image(tmp_path / "a/one.raw")
    with mounted(tmp_path / "a", new_folder(tmp_path / "b")):
        assert told(scanned((tmp_path, "dir"))) == {"one.raw": [0]}


@pytest.mark.parametrize("seconds", [-(2**33), 2**33 + 6_000_000_000])
def test_a_file_from_another_century_is_an_image_like_any_other(tmp_path: Path, seconds: int) -> None:
    path = image(tmp_path / "old.raw")
    os.utime(path, (seconds, seconds))
    (event,) = scanned((tmp_path, "dir")).all("image")
    assert event["mtime_ns"] == path.stat().st_mtime_ns
