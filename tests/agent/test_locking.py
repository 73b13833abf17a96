"""Whether an image is in use, asked of real programs that use it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent.host import in_use, locking
from tests.agent.harness import Writer, held_open
from tests.harness.filesystems import loop_device, new_file, swap_area
from tests.harness.processes import holder

pytestmark = pytest.mark.qemu


@pytest.fixture
def fd(image: Path) -> Iterator[int]:
    with held_open(image) as descriptor:
        yield descriptor


def test_nobody_uses_an_image_that_nobody_opened(fd: int) -> None:
    assert locking.locked_bytes(fd) == []
    assert locking.user(fd) is None
    assert locking.open_for_writing(fd) is False


def test_sees_a_writer_by_its_locks_and_by_name(image: Path, fd: int) -> None:
    with Writer(image) as writer:
        assert set(locking.CHANGES) <= set(locking.locked_bytes(fd))
        assert locking.user(fd) == f"process {writer.process.pid} (qemu-io)"
        assert locking.open_for_writing(fd) is True
    assert locking.locked_bytes(fd) == []


def test_a_reader_is_no_writer(image: Path, fd: int) -> None:
    with Writer(image, read_only=True):
        held = locking.locked_bytes(fd)
        assert held
        assert not set(held) & set(locking.CHANGES)
        assert locking.open_for_writing(fd) is False


def test_sees_the_base_of_an_overlay_in_use(overlay: Path, fd: int) -> None:
    with Writer(overlay):
        assert locking.locked_bytes(fd)
        assert "qemu-io" in str(locking.user(fd))


def test_no_guest_starts_while_writers_are_kept_away(image: Path, fd: int) -> None:
    locking.keep_writers_away(fd)
    with Writer(image) as refused:
        assert refused.refused
        assert b'Failed to get "write" lock' in refused.said
    with Writer(image, read_only=True) as reader:
        assert not reader.refused
    assert locking.locked_bytes(fd) == []


def test_a_writer_that_was_there_before_is_seen_after_the_locks_are_taken(image: Path, fd: int) -> None:
    with Writer(image):
        locking.keep_writers_away(fd)
        assert set(locking.locked_bytes(fd, locking.CHANGES)) == set(locking.CHANGES)


def test_sees_a_program_that_locks_nothing(image: Path, fd: int) -> None:
    with holder(image) as reader:
        assert str(locking.user(fd)).startswith(f"process {reader.pid} ")
    assert locking.user(fd) is None


def test_sees_a_loop_device(tmp_path: Path) -> None:
    raw = new_file(tmp_path / "disk.raw", bytes(1 << 20))
    with held_open(raw) as fd, loop_device(raw) as loop:
        assert locking.locked_bytes(fd) == []
        assert locking.user(fd) == f"loop device {loop}"
        assert locking.open_for_writing(fd) is True


def test_sees_swap(tmp_path: Path) -> None:
    area = new_file(tmp_path / "swap area", bytes(8 << 20))
    area.chmod(0o600)
    with held_open(area) as fd, swap_area(area):
        assert locking.user(fd) == "the swap area of this host"


@pytest.mark.parametrize(("mode", "uses"), [("rb", False), ("r+b", True)])
def test_another_agent_that_only_reads_is_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, uses: bool
) -> None:
    image, program = tmp_path / "image", str(tmp_path / "agent-0.pyz")
    image.write_bytes(b"x")
    monkeypatch.setattr(sys, "argv", [program])
    for words, is_fellow in (([program], True), ([], False)):
        with holder(image, mode, *words), image.open("rb") as file:
            assert (locking.user(file.fileno()) is not None) is (uses or not is_fellow)


def test_another_agent_that_ends_before_it_is_known_to_be_one_is_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, program = tmp_path / "image", str(tmp_path / "agent-0.pyz")
    image.write_bytes(b"x")
    monkeypatch.setattr(sys, "argv", [program])
    asked, ask = [], in_use.is_fellow
    with holder(image, "rb", program) as other, image.open("rb") as file:

        def ends_first(pid: str) -> bool:
            asked.append(pid)
            other.kill()
            other.wait()
            return ask(pid)

        monkeypatch.setattr(locking, "is_fellow", ends_first)
        assert locking.user(file.fileno()) is None
    assert asked, "nobody had it open"
