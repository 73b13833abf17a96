"""What lies below block devices: of real loop devices, and of LVM's by what its tools and the kernel print."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import RefusedError, b64
from storage_admin.agent.verbs import beneath
from tests.agent.recording import RecordingIO, request
from tests.harness.filesystems import loop_device, new_file, new_folder, new_program

#: What ``dmsetup`` prints of a Debian 12 with LVM, by what it is asked; 254:4 is the pool of 254:7 to 254:9.
TOLD = {
    ("table", "254:7"): "0 2097152 thin 254:4 1",
    ("table", "254:8"): "0 131072 linear 253:0 2048",
    ("status", "254:4"): "0 1048576 thin-pool 4 226/2048 1920/8192 - rw {discards} queue_if_no_space - 512",
}


def look(*paths: bytes) -> list[dict[str, Any]]:
    told = beneath.run(request("beneath", paths_b64=[b64(path) for path in paths]), RecordingIO())
    return list(told["devices"])


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[bytes]:
    raw = new_file(tmp_path / "disk.raw", bytes(1 << 20))
    with loop_device(raw) as device:
        yield bytes(device)


def test_a_device_that_is_no_volume_says_whether_it_takes_discards(loop: bytes) -> None:
    number = Path(os.fsdecode(loop)).stat().st_rdev
    most = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/queue/discard_max_bytes").read_text()
    assert look(loop) == [{"target": "", "discards": int(most) > 0, "passes_on": None}]


def test_nothing_is_told_of_what_is_no_device_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unknown = {"target": "", "discards": None, "passes_on": None}
    assert look(os.fsencode(tmp_path / "file"), b"/dev/nothing-there", b"/dev/null", b"/dev/\0") == [unknown] * 4


def test_files_say_what_they_occupy(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 30)
        file.write(bytes(4096))
    paths = [os.fsencode(sparse), os.fsencode(tmp_path), b"/dev/null", b"relative", os.fsencode(tmp_path / "gone")]
    told = beneath.occupied(request("occupied", paths_b64=[b64(path) for path in paths]), RecordingIO())
    known = sparse.stat()
    told_of = {"dev": known.st_dev, "inode": known.st_ino, "file_size": 1 << 30, "mtime_ns": known.st_mtime_ns}
    assert told == {"files": [told_of | {"bytes": known.st_blocks * 512}, None, None, None, None]}


@pytest.mark.parametrize(
    ("minor", "discards", "expected"),
    [
        (7, "discard_passdown", {"target": "thin", "discards": True, "passes_on": True}),
        (7, "no_discard_passdown", {"target": "thin", "discards": True, "passes_on": False}),
        (7, "ignore_discard", {"target": "thin", "discards": False, "passes_on": False}),
        (8, "", {"target": "linear", "discards": True, "passes_on": None}),
    ],
)
def test_volumes_of_lvm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: int, discards: str, expected: dict[str, Any]
) -> None:
    folder = tmp_path / f"sys/254:{minor}"
    for name, text in (("queue/discard_max_bytes", "1048576"), ("dm/uuid", "LVM-x")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    bin_folder = new_folder(tmp_path / "bin")
    lines = "\n".join(
        f'"{verb} --noflush --major {number.replace(":", " --minor ")}") echo "{text.format(discards=discards)}" ;;'
        for (verb, number), text in TOLD.items()
    )
    new_program(bin_folder / "dmsetup", f'#!/bin/sh\ncase "$*" in\n{lines}\n*) exit 1 ;;\nesac\n')
    monkeypatch.setenv("PATH", str(bin_folder), prepend=":")
    monkeypatch.setattr(beneath, "_DEVICES", str(tmp_path / "sys"))
    monkeypatch.setattr(beneath, "_number", lambda _path: f"254:{minor}")
    assert look(b"/dev/vg0/volume") == [expected]


def test_what_is_no_list_of_paths_is_refused() -> None:
    with pytest.raises(RefusedError):
        beneath.run(request("beneath", paths_b64=[1]), RecordingIO())
