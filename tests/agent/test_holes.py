"""Digging holes into files on real filesystems."""

import contextlib
import ctypes
import itertools
import mmap
import os
import random
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage_admin.agent.host import priority
from storage_admin.agent.measure import holes
from tests.agent.harness import held_open
from tests.agent.test_analyze import priorities
from tests.chance import seed
from tests.harness.filesystems import loop_filesystem, mounted, new_file, new_folder
from tests.working import allocated, refused_as

BLOCK = 4096
#: What a filesystem may need for itself to remember where the pieces of a fragmented file are.
EXTENT_TREE = 64 << 10


@pytest.fixture(scope="module", params=[("ext4", 100), ("ext4", 600), ("xfs", 320)], ids=["ext4-1k", "ext4-4k", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A filesystem; a small ext4 has blocks of 1 KiB, less than a page of memory."""
    form, size_mib = request.param
    with loop_filesystem(tmp_path_factory.mktemp(form), size_mib, form=form) as place:
        yield place


def dig(path: Path, piece_bytes: int = holes.PIECE_BYTES, at_once: int = 2, rest: Callable[[], bool] = bool) -> int:
    """Digs through a whole file, with a pause where ``rest`` says so; how many bytes were let go of."""
    with digging(path, piece_bytes, at_once) as (digger, fd):
        while not digger.done:
            before = digger.position
            digger.step(fd)
            assert digger.position >= before
            if rest():
                digger.finish_run(fd)
                digger.pause()
        return digger.dug


@contextlib.contextmanager
def digging(path: Path, piece_bytes: int = holes.PIECE_BYTES, at_once: int = 2) -> Iterator[tuple[holes.Digger, int]]:
    """Who digs into a file, and its descriptor; what is done is on the disk in the end."""
    with held_open(path, os.O_RDWR) as fd:
        with contextlib.closing(holes.Digger(os.fstat(fd).st_size, holes.block_size(fd), piece_bytes, at_once)) as one:
            yield one, fd
        os.fsync(fd)


def random_content(rng: random.Random) -> bytes:
    """Runs of zeros, of noise, and of zeros with a single other byte, up to a size that need be no whole block."""
    parts = []
    for _ in range(rng.randrange(1, 60)):
        length = rng.choice([1, 3, 16, 200]) * BLOCK
        kind = rng.choice(["zeros", "noise", "almost"])
        part = bytearray(rng.randbytes(length) if kind == "noise" else length)
        if kind == "almost":
            part[rng.choice([0, length - 1, rng.randrange(length)])] = 1
        parts.append(bytes(part))
    content = b"".join(parts)
    return content[: len(content) - rng.choice([0, 0, 1, 511, 512, BLOCK - 1])]


@pytest.mark.sampled(5)
@pytest.mark.fuzz
@pytest.mark.parametrize("trial", range(12))
def test_every_block_of_zeros_goes_and_no_byte_changes(disk: Path, trial: int) -> None:
    rng = random.Random(f"{seed()}-{trial}")
    content, path = random_content(rng), disk / "file"
    path.write_bytes(content)
    if rng.random() < 0.5:
        os.sync()  # else its blocks have no place on the disk yet
    size = os.statvfs(disk).f_bsize
    blocks = [content[at : at + size] for at in range(0, len(content), size)]
    zeros = [block for block in blocks if not block.strip(b"\0")]
    dug = dig(
        path,
        rng.choice([BLOCK, 5 * BLOCK, 1 << 20, holes.PIECE_BYTES]),
        rng.choice([1, 2, 5]),
        lambda: rng.random() < 0.2,
    )
    assert path.read_bytes() == content
    assert dug == sum(map(len, zeros))
    kept = (len(blocks) - len(zeros)) * size
    assert kept <= allocated(path) <= kept + EXTENT_TREE
    assert dig(path) == 0


def test_neighbouring_zeros_go_with_one_call(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that tells its disk of every hole takes time for each."""
    path, punched, punch = disk / "file", list[int](), holes.punch

    def note(fd: int, offset: int, length: int) -> None:
        punched.append(length)
        punch(fd, offset, length)

    monkeypatch.setattr(holes, "punch", note)
    path.write_bytes(b"x" * BLOCK + bytes(40 << 20) + b"x" * BLOCK)
    assert dig(path) == sum(punched) == 40 << 20
    assert len(punched) == 1


@pytest.mark.parametrize("block", [BLOCK, 8 * BLOCK, 64 * BLOCK])
def test_a_filesystem_whose_blocks_are_larger_than_its_holes_is_gone_through(
    disk: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """As ZFS is where the size of its records was raised after the file was written."""
    path, size = disk / "file", 100 * BLOCK + 300
    with path.open("wb") as file:
        for at in range(BLOCK, size, 6 * BLOCK):
            file.seek(at)
            file.write(b"x" * BLOCK)
        file.truncate(size)
    before = path.read_bytes()
    monkeypatch.setattr(holes, "block_size", lambda _: block)
    steps = itertools.count()
    dig(path, rest=lambda: next(steps) > 10_000 and pytest.fail("it comes to no end"))
    assert path.read_bytes() == before


def test_a_long_run_is_let_go_of_in_parts_that_nobody_waits_long_for(disk: Path) -> None:
    path = new_file(disk / "file", b"x" * BLOCK + bytes(holes.RUN_BYTES * 5 // 4))
    with digging(path) as (digger, fd):
        while not digger.dug:
            digger.step(fd)
        assert digger.dug < holes.RUN_BYTES + holes.PIECE_BYTES
        assert not digger.done


def test_what_was_seen_before_a_pause_does_not_count_after_it(disk: Path) -> None:
    path = new_file(disk / "file", b"x" * BLOCK + bytes(30 << 20) + b"x" * BLOCK)
    with digging(path, at_once=4) as (digger, fd):
        while not digger.position:
            digger.step(fd)
        assert digger.position == BLOCK  # the zeros are seen by now, and more may follow them
        assert digger.dug == 0
        digger.pause()
        path_content = os.urandom(30 << 20)
        os.pwrite(fd, path_content, BLOCK)
        while not digger.done:
            digger.step(fd)
            assert digger.dug == 0
    assert path.read_bytes() == b"x" * BLOCK + path_content + b"x" * BLOCK


def test_after_a_pause_nobody_is_at_work_and_what_was_not_begun_never_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended, told = list[int](), list[int](), threading.Event()

    def slow(_fd: int, start: int, _end: int, _block: int, is_dropped: Callable[[], bool]) -> list[tuple[int, int]]:
        begun.append(start)
        told.set()
        deadline = time.monotonic() + 20
        while not is_dropped() and time.monotonic() < deadline:
            time.sleep(0.01)
        ended.append(start)
        return []

    monkeypatch.setattr(holes, "zero_runs", slow)
    path = new_file(tmp_path / "file", b"x" * (64 * BLOCK))
    before = threading.active_count()
    with path.open("rb+") as file, contextlib.closing(holes.Digger(64 * BLOCK, BLOCK, BLOCK, at_once=3)) as digger:
        assert digger.step(file.fileno()) == 0
        assert told.wait(10)
        asked = time.monotonic()
        digger.pause()
        assert time.monotonic() - asked < 10
        assert sorted(begun) == sorted(ended)
        assert len(begun) <= 3
    assert threading.active_count() == before


def test_it_is_read_at_the_priority_of_who_digs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = set[tuple[int, int | None]]()

    def looked(*_args: object) -> list[tuple[int, int]]:
        told.add(priorities())
        return []

    monkeypatch.setattr(holes, "zero_runs", looked)
    path = new_file(tmp_path / "file", b"x" * (64 * BLOCK))
    with priority.idle(True):
        dig(path, BLOCK)
    assert told == {(19, 3 << 13)}


def test_blocks_that_were_preallocated_and_never_written_go_as_well(disk: Path) -> None:
    path = disk / "file"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 32 << 20)
        os.pwrite(file.fileno(), b"x" * 5000, 10 << 20)
    os.sync()
    assert allocated(path) >= 32 << 20
    before = path.read_bytes()
    dig(path)
    assert path.read_bytes() == before
    assert path.stat().st_size == 32 << 20
    assert allocated(path) <= 2 * BLOCK + EXTENT_TREE


def test_what_was_preallocated_and_is_written_in_memory_only_stays(disk: Path) -> None:
    path = disk / "file"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 << 20)
        os.fsync(file.fileno())
        for at in range(0, 8 << 20, 64 << 10):
            os.pwrite(file.fileno(), b"not on the disk yet", at)
        before = path.read_bytes()
        dig(path)
    assert path.read_bytes() == before


def test_a_file_without_anything_to_win_is_not_touched(disk: Path) -> None:
    path = new_file(disk / "file", b"x" * 100_000)
    with path.open("r+b") as file:
        file.truncate(50 << 20)
        file.seek(70 << 20)
        file.write(b"y")
    dig(path)  # XFS may have reserved blocks behind the end
    before = path.stat()
    assert dig(path) == 0
    after = path.stat()
    assert (after.st_ctime_ns, after.st_blocks) == (before.st_ctime_ns, before.st_blocks)


def test_what_is_reserved_behind_the_end_goes_as_well(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path, 320, form="xfs") as place:
        path = new_file(place / "file", b"x" * 10_000)
        subprocess.run(["fallocate", "--keep-size", "--length", "64M", path], check=True)
        assert allocated(path) >= 64 << 20
        dig(path)
        assert allocated(path) == 3 * BLOCK
        assert path.read_bytes() == b"x" * 10_000


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_small_file_keeps_its_size(disk: Path, size: int) -> None:
    path = new_file(disk / "file", bytes(size))
    dig(path)
    assert path.read_bytes() == bytes(size)
    assert allocated(path) == 0


@pytest.mark.parametrize(("form", "size_mib"), [("ext4", 64), ("xfs", 320)])
def test_a_full_disk_is_helped(tmp_path: Path, form: str, size_mib: int) -> None:
    """Splitting extents takes blocks as well; it must not need any that are not there."""
    with loop_filesystem(tmp_path, size_mib, form=form) as place:
        path, content = place / "file", bytearray(random.Random(7).randbytes(40 << 20))
        for at in range(0, len(content), 2 * BLOCK):
            content[at : at + BLOCK] = bytes(BLOCK)
        path.write_bytes(content)
        os.sync()
        fill(place / "ballast")
        dig(path)
        assert path.read_bytes() == content
        assert allocated(path) < (21 << 20)


def fill(ballast: Path) -> None:
    """Takes all that a filesystem gives."""
    with ballast.open("wb") as file:
        size, take = 0, 1 << 30
        while take >= 512:
            try:
                os.posix_fallocate(file.fileno(), size, take)
                size += take
            except OSError:
                take //= 2  # no room for so much
    assert os.statvfs(ballast).f_bavail < 100


def test_a_filesystem_without_holes_is_named(tmp_path: Path) -> None:
    with mounted("none", new_folder(tmp_path / "ramfs"), "-t", "ramfs") as place:  # which cannot make holes
        path = new_file(place / "file", bytes(1 << 20))
        assert refused_as(dig, path) == "unsupported_pool"
        assert path.read_bytes() == bytes(1 << 20)


def test_what_was_read_does_not_stay_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    half = 8 << 20
    path.write_bytes(random.Random(3).randbytes(2 * half))
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, half, os.POSIX_FADV_DONTNEED)
        assert in_memory(file.fileno(), 0, half) == 0
        dig(path)
        # The kernel may read ahead of what was asked for, after that was let go of: 5 MiB were seen on a busy machine.
        assert in_memory(file.fileno(), 0, half) < half
        assert in_memory(file.fileno(), half, half) == half  # it is somebody's who uses the file


def test_a_tebibyte_takes_no_more_memory_than_a_gibibyte(tmp_path: Path) -> None:
    peaks = []
    for size in (1 << 30, 1 << 40):
        path = tmp_path / str(size)
        with path.open("wb") as file:
            file.truncate(size)
            for part in range(50):
                os.pwrite(file.fileno(), b"x" + bytes(100_000), part * (size // 50))
        tracemalloc.start()
        dig(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert allocated(path) <= 50 * 2 * BLOCK + EXTENT_TREE
    assert peaks[1] < peaks[0] * 1.1 + 100_000


def in_memory(fd: int, start: int, length: int) -> int:
    """How many bytes of a part of a file are in the page cache; asking reads nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    states = ctypes.create_string_buffer(length // mmap.PAGESIZE)
    try:
        assert libc.mincore(address, length, states) == 0
    finally:
        libc.munmap(address, length)
    return sum(state & 1 for state in states.raw[: length // mmap.PAGESIZE]) * mmap.PAGESIZE
