"""What an internal snapshot alone holds is what deleting it gives back.

QEMU writes its tables anew then: the new list of snapshots may take a cluster that has just become free, and the old
one becomes free. So it is compared within two clusters.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from storage_admin.agent.formats.facts import Reader
from storage_admin.agent.formats.qcow2 import parse_header
from storage_admin.agent.measure import qcow2_snapshots
from storage_admin.agent.measure.file_data import DataMap
from storage_admin.agent.measure.qcow2_snapshots import Held, held_by_each
from storage_admin.agent.protocol import StoppedError
from tests.agent.formats.test_against_qemu import create, qemu_img
from tests.agent.harness import held_open, number_at, overwrite, qemu_io
from tests.agent.recording import cancel
from tests.agent.test_analyze import MIB, analyzed

pytestmark = pytest.mark.qemu


def held_of(path: Path, deadline: float | None = None, check: Callable[[], None] = lambda: None) -> Held:
    with held_open(path) as fd:
        reader = Reader(fd, path.stat().st_size)
        data = DataMap(fd, reader.file_size, lambda: None)
        return held_by_each(reader, parse_header(reader), data, check, deadline)


def data_of(path: Path, cluster: int) -> dict[int, int]:
    """Of each cluster of the file that is no hole, how many bytes are there."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        size = path.stat().st_size
        data = DataMap(file.fileno(), size, lambda: None)
        return {at: found for at in range(0, size, cluster) if (found := data.bytes_in(at, cluster))}


def write(path: Path, *pieces: tuple[int, int, int]) -> None:
    """Bytes of a value at an offset, of a length, each."""
    qemu_io(path, *(f"write -P {byte} {at} {length}" for byte, at, length in pieces))


def with_snapshots(path: Path, options: str, seed: int) -> list[str]:
    """An image with snapshots between writes at random; their names."""
    chance = random.Random(seed)
    create(path, "qcow2", options, "24M")
    names = []
    for number in range(chance.randint(1, 4)):
        pieces = [(chance.randint(1, 250), chance.randrange(0, 20 * MIB), chance.randint(1, 2 * MIB)) for _ in range(3)]
        write(path, *pieces)
        names.append(f"s{number}")
        qemu_img("snapshot", "-c", names[-1], path)
    write(path, (255, chance.randrange(0, 20 * MIB), 3 * MIB))
    return names


@pytest.mark.parametrize(
    "options", ["", "compat=0.10", "cluster_size=4k", "cluster_size=2M", "extended_l2=on", "lazy_refcounts=on"]
)
@pytest.mark.parametrize("seed", range(3))
def test_is_what_deleting_it_gives_back(tmp_path: Path, options: str, seed: int) -> None:
    path = tmp_path / "disk.qcow2"
    names = with_snapshots(path, options, seed)
    held, cluster = held_of(path), 1 << number_at(path, ">I", 20)
    assert held.each is not None, held.reason
    assert len(held.each) == len(names)
    before = data_of(path, cluster)
    for name, told in zip(names, held.each, strict=True):
        copy = tmp_path / "copy.qcow2"
        subprocess.run(["cp", "--sparse=auto", path, copy], check=True)
        qemu_img("snapshot", "-d", name, copy)
        after = data_of(copy, cluster)
        freed = sum(found for at, found in before.items() if at not in after)
        assert abs(freed - told) <= 2 * cluster, f"{name}, seed {seed}"


def test_what_two_snapshots_hold_together_neither_holds_alone(tmp_path: Path) -> None:
    path = create(tmp_path / "disk.qcow2", "qcow2", "", "24M")
    write(path, (1, 0, 4 * MIB))
    qemu_img("snapshot", "-c", "one", path)
    qemu_img("snapshot", "-c", "two", path)
    write(path, (2, 0, 4 * MIB))
    held = held_of(path).each
    assert held is not None
    assert max(held) < MIB
    qemu_img("snapshot", "-d", "one", path)
    (alone,) = held_of(path).each or ()
    assert alone >= 4 * MIB


def test_what_cannot_be_told_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "disk.qcow2"
    with_snapshots(path, "", 1)
    assert held_of(path, deadline=0.0).each is None
    monkeypatch.setattr(qcow2_snapshots, "MAX_MARKS", 10)
    assert held_of(path).each is None
    monkeypatch.undo()
    overwrite(path, number_at(path, ">Q", 64), struct.pack(">Q", 1 << 40))
    assert held_of(path) == Held(None, held_of(path).reason)
    assert held_of(path).reason


def test_a_stop_reaches_it(tmp_path: Path) -> None:
    path = tmp_path / "disk.qcow2"
    with_snapshots(path, "", 1)
    with pytest.raises(StoppedError):
        held_of(path, check=cancel)


def test_an_analysis_tells_it(tmp_path: Path) -> None:
    path = tmp_path / "disk.qcow2"
    names = with_snapshots(path, "", 2)
    told = analyzed(path, mode="full")["basis"]["snapshots"]
    assert [one["held_bytes"] for one in told] == list(held_of(path).each or ())
    assert len(told) == len(names)
    plain = create(tmp_path / "plain.qcow2", "qcow2", "", "24M")
    assert "snapshots" not in analyzed(plain, mode="full")["basis"]
