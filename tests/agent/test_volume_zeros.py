"""Zeros of a volume by the chunks of its pool: found to the chunk, whatever its size, and foretold from a sample."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent.measure import volume_zeros
from tests.agent.harness import held_open
from tests.agent.recording import RecordingIO

KIB, MIB = 1 << 10, 1 << 20
#: As large as is no multiple of any of the chunks.
SIZE = 40 * MIB + 64 * KIB
#: Where there is data: a byte in the first chunk, one in the middle of another, a stretch.
DATA = ((3, 1), (10 * MIB + 5, 1), (20 * MIB, MIB))


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[int]:
    with held_open(tmp_path / "volume", os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, SIZE)
        for start, length in DATA:
            os.pwrite(fd, b"x" * length, start)
        yield fd


def whole(chunk: int) -> list[tuple[int, int]]:
    return [(0, -(-SIZE // chunk))]


def kept(chunk: int) -> set[int]:
    """The chunks with data."""
    return {number for at, length in DATA for number in range(at // chunk, (at + length - 1) // chunk + 1)}


@pytest.mark.parametrize("chunk", [64 * KIB, 192 * KIB, MIB, 5 * MIB, 17 * MIB])
def test_every_whole_chunk_of_zeros_is_found_and_no_other(volume: int, chunk: int) -> None:
    read: list[int] = []
    found = volume_zeros.find(volume, whole(chunk), chunk, read.append)
    assert all(start % chunk == 0 and end % chunk == 0 for start, end in found)
    chunks = {number for start, end in found for number in range(start // chunk, end // chunk)}
    assert chunks == set(range(SIZE // chunk)) - kept(chunk)
    assert sum(read) == SIZE


def test_what_the_volume_does_not_have_is_not_looked_at(volume: int) -> None:
    read: list[int] = []
    assert volume_zeros.find(volume, [(2, 4), (160, 161)], 64 * KIB, read.append) == [(128 * KIB, 256 * KIB)]
    assert sum(read) == 192 * KIB


@pytest.mark.parametrize("chunk", [64 * KIB, 5 * MIB])
def test_a_sample_of_all_chunks_foretells_exactly_and_one_of_some_within_its_range(volume: int, chunk: int) -> None:
    found = volume_zeros.sample(volume, whole(chunk), chunk, RecordingIO())
    in_place = found["methods"]["in_place"]
    assert found["allocated_size"] == whole(chunk)[0][1] * chunk
    assert in_place["predicted_after_bytes"] == len(kept(chunk)) * chunk
    assert in_place["predicted_low"] == in_place["predicted_high"]


def test_a_sample_of_some_chunks_has_the_truth_in_its_range(volume: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_zeros, "SAMPLES", 100)
    found = volume_zeros.sample(volume, whole(64 * KIB), 64 * KIB, RecordingIO())["methods"]["in_place"]
    truth = len(kept(64 * KIB)) * 64 * KIB
    assert found["predicted_low"] <= truth <= found["predicted_high"]
    assert found["predicted_low"] < found["predicted_high"]


def test_a_volume_that_has_nothing_gives_nothing_back(volume: int) -> None:
    assert volume_zeros.sample(volume, [], 64 * KIB, RecordingIO())["allocated_size"] == 0
    assert volume_zeros.find(volume, [], 64 * KIB, lambda _: None) == []
