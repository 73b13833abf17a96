"""Whether an image is in use, asked of real programs that use it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent.host import in_use, locking
from tests.agent.harness import Writer, held_open, make_image
from tests.harness.filesystems import loop_device, new_file
from tests.working import create

pytestmark = pytest.mark.qemu


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return make_image(tmp_path / "image.qcow2")


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


def test_sees_the_base_of_an_overlay_in_use(image: Path, fd: int) -> None:
    overlay = create(image.parent / "overlay.qcow2", base=image)
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
    program = "import sys; f = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, image], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        assert str(locking.user(fd)).startswith(f"process {reader.pid} ")
        reader.communicate()
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
    with held_open(area) as fd:
        subprocess.run(["mkswap", "-q", area], check=True)
        subprocess.run(["swapon", area], check=True)
        try:
            assert locking.user(fd) == "the swap area of this host"
        finally:
            subprocess.run(["swapoff", area], check=True)


@pytest.mark.parametrize(("mode", "uses"), [("rb", False), ("r+b", True)])
def test_another_agent_that_only_reads_is_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, uses: bool
) -> None:
    image, program = tmp_path / "image", str(tmp_path / "agent-0.pyz")
    image.write_bytes(b"x")
    monkeypatch.setattr(sys, "argv", [program])
    hold = f"import sys; f = open({str(image)!r}, {mode!r}); print(flush=True); sys.stdin.read()"
    for words, is_fellow in (([program], True), ([], False)):
        command = [sys.executable, "-c", hold, *words]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            with image.open("rb") as file:
                assert (locking.user(file.fileno()) is not None) is (uses or not is_fellow)
            holder.communicate()


def test_another_agent_that_ends_before_it_is_known_to_be_one_is_no_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, program = tmp_path / "image", str(tmp_path / "agent-0.pyz")
    image.write_bytes(b"x")
    monkeypatch.setattr(sys, "argv", [program])
    hold = f"import sys; f = open({str(image)!r}, 'rb'); print(flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", hold, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    asked, ask = [], in_use.is_fellow

    def ends_first(pid: str) -> bool:
        asked.append(pid)
        holder.kill()
        holder.communicate()
        return ask(pid)

    monkeypatch.setattr(locking, "is_fellow", ends_first)
    assert holder.stdout is not None
    holder.stdout.readline()
    with image.open("rb") as file:
        assert locking.user(file.fileno()) is None
    assert asked, "nobody had it open"
