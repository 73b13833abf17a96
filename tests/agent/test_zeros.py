"""Which blocks of a file hold zeros: cached or not, of any block size, and what happens where it cannot be read."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage_admin.agent.measure import holes
from tests.agent.harness import held_open
from tests.harness.filesystems import loop_filesystem, new_file
from tests.working import refused_as

#: A page and some more, so that blocks smaller than a page are looked at from the middle of one as well.
SIZES = (512, 1024, 4096, 16384)
MIB = 1 << 20


@pytest.fixture(params=["cached", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A filesystem, or a kernel, that does not say what is in its cache: all is read as from the disk."""
    if request.param == "read":
        monkeypatch.setattr(holes, "_read_cached", lambda *_: 0)
    return str(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    with held_open(tmp_path / "file", os.O_RDWR | os.O_CREAT) as fd:
        yield fd


def naive(content: bytes, start: int, end: int, block: int) -> set[int]:
    """Every byte that is in a block of zeros."""
    found: set[int] = set()
    for at in range(start, end, block):
        if not content[at : min(at + block, end)].strip(b"\0"):
            found |= set(range(at, min(at + block, end)))
    return found


blocks = st.sampled_from(SIZES)
#: Blocks by their kind: zeros, one other byte at a place in it, noise.
kinds = st.lists(st.one_of(st.just(None), st.integers(0, 16383), st.just(-1)), min_size=1, max_size=24)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(block=blocks, kinds=kinds, first=st.integers(0, 4), cut=st.integers(0, 600))
def test_every_block_of_zeros_is_found_and_no_other(
    way: str, file: int, block: int, kinds: list[int | None], first: int, cut: int
) -> None:
    content = bytearray()
    for kind in kinds:
        part = bytearray(b"\7" * block if kind == -1 else block)
        if kind is not None and kind >= 0:
            part[kind % block] = 1
        content += part
    content = content[: max(len(content) - cut % block, 1)]
    os.ftruncate(file, 0)
    os.pwrite(file, content, 0)
    start = min(first, (len(content) - 1) // block) * block
    runs = holes.zero_runs(file, start, len(content), block)
    assert runs == sorted(runs)
    assert {byte for run in runs for byte in range(*run)} == naive(bytes(content), start, len(content), block)


@pytest.mark.parametrize("odd", [None, 0, 1, 4095, 4096, 3 * MIB, 4 * MIB - 1])
def test_a_single_byte_in_mebibytes_of_zeros_is_seen(way: str, file: int, odd: int | None) -> None:
    os.ftruncate(file, 6 * MIB)
    start = MIB
    if odd is not None:
        os.pwrite(file, b"\1", start + odd)
    runs = holes.zero_runs(file, start, start + 4 * MIB, 4096)
    assert runs == sorted(runs)
    if odd is None:
        assert sum(end - begin for begin, end in runs) == 4 * MIB
        assert (runs[0][0], runs[-1][1]) == (start, start + 4 * MIB)
    else:
        block = start + odd // 4096 * 4096
        assert sum(end - begin for begin, end in runs) == 4 * MIB - 4096
        assert all(end <= block or begin >= block + 4096 for begin, end in runs)


def test_a_stretch_of_several_parts_is_looked_at_to_its_end(way: str, file: int) -> None:
    os.ftruncate(file, 14 * MIB)
    for place in (0, 5 * MIB + 4096, 9 * MIB, 14 * MIB - 1):
        os.pwrite(file, b"x", place)
    runs = holes.zero_runs(file, 0, 14 * MIB, 4096)
    held = {block for block in range(0, 14 * MIB, 4096) if not any(begin <= block < end for begin, end in runs)}
    assert held == {0, 5 * MIB + 4096, 9 * MIB, 14 * MIB - 4096}


def test_who_wants_to_know_no_more_has_it_stop_after_a_part(way: str, file: int) -> None:
    os.ftruncate(file, holes.MOST_BYTES)
    answers = iter([False, False, True])
    runs = holes.zero_runs(file, 0, holes.MOST_BYTES, 4096, lambda: next(answers))
    assert sum(end - begin for begin, end in runs) == 2 * holes.PART_BYTES


def test_what_is_only_in_memory_counts(way: str, file: int) -> None:
    os.pwrite(file, bytes(2 * MIB), 0)
    os.fsync(file)
    os.pwrite(file, b"not on the disk yet", MIB)
    runs = holes.zero_runs(file, 0, 2 * MIB, 4096)
    assert all(end <= MIB or begin >= MIB + 4096 for begin, end in runs)
    assert os.pread(file, 19, MIB) == b"not on the disk yet"


def test_a_file_that_became_shorter_is_a_stale_plan(way: str, file: int) -> None:
    os.pwrite(file, b"x" * MIB, 0)
    assert refused_as(holes.zero_runs, file, 0, 2 * MIB, 4096) == "stale_plan"


def test_what_was_in_memory_stays_and_nothing_else(way: str, file: int) -> None:
    os.pwrite(file, os.urandom(8 * MIB), 0)
    os.fsync(file)
    os.posix_fadvise(file, 4 * MIB, 4 * MIB, os.POSIX_FADV_DONTNEED)
    for start in (0, 4 * MIB):
        before = cached(file, start)
        holes.zero_runs(file, start, start + 4 * MIB, 4096)
        assert cached(file, start) is before is (start == 0)


def cached(fd: int, offset: int) -> bool:
    """Whether a byte of a file can be read without the disk; to try that would have the kernel read it."""
    told = ctypes.create_string_buffer(1)
    with mmap.mmap(fd, mmap.PAGESIZE, offset=offset) as mapped:
        page = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(page)), mmap.PAGESIZE, told) == 0
        del page
    return bool(told.raw[0] & 1)


def test_a_disk_that_cannot_be_read_is_an_error_and_not_the_end(way: str, tmp_path: Path) -> None:
    """The filesystem's device ends in the middle of the file: the kernel answers with an I/O error behind that."""
    with loop_filesystem(tmp_path, 64) as place:
        path = new_file(place / "file", os.urandom(48 * MIB))
        os.sync()
        device = device_of(place)
        os.truncate(tmp_path / "disk.img", 24 * MIB)
        subprocess.run(["losetup", "--set-capacity", device], check=True)
        with held_open(path, os.O_RDWR) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with pytest.raises(OSError, match="Input/output error") as caught:
                look_through(fd, 48 * MIB)
            assert caught.value.errno == errno.EIO


def look_through(fd: int, size: int) -> None:
    """All of a file."""
    for start in range(0, size, 4 * MIB):
        holes.zero_runs(fd, start, start + 4 * MIB, 4096)


def device_of(place: Path) -> str:
    """The loop device that is mounted there."""
    answer = subprocess.run(
        ["findmnt", "--noheadings", "--output", "SOURCE", place], capture_output=True, text=True, check=True
    )
    return answer.stdout.strip()
