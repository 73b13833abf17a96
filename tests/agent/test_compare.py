"""A large image is compared in parts at the same time: none of them is left out."""

from pathlib import Path

import pytest

from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.img import Effort, Node
from tests.agent import harness
from tests.agent.harness import held_open
from tests.agent.recording import RecordingIO

pytestmark = pytest.mark.qemu

SIZE = 600 << 20


def equal(first: Path, second: Path, size: int = SIZE) -> bool:
    with held_open(first) as one, held_open(second) as other:
        nodes = Node(one, "qcow2", bytes(first)), Node(other, "qcow2", bytes(second))
        return img.compare(RecordingIO(), *nodes, size, Effort())


@pytest.mark.parametrize(
    "offset", [0, SIZE // 4 - 512, SIZE // 4, SIZE // 2 - 512, SIZE // 2, SIZE // 2 + (1 << 20), SIZE - 512]
)
def test_one_sector_that_differs_is_found_wherever_it_is(tmp_path: Path, offset: int) -> None:
    for name in ("a", "b"):
        harness.qemu_img("create", "-q", "-f", "qcow2", tmp_path / name, str(SIZE))
        harness.write(tmp_path / name, 7, "10M", "1M")
        harness.write(tmp_path / name, 8, "500M", "1M")
    assert len(img.parts_of(SIZE)) == 4
    assert equal(tmp_path / "a", tmp_path / "b")
    harness.write(tmp_path / "b", 9, str(offset), "512")
    assert not equal(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("size", [8 << 20, SIZE])
@pytest.mark.parametrize("hides", [True, False])
def test_what_an_overlay_does_not_hold_is_what_its_base_holds(tmp_path: Path, size: int, hides: bool) -> None:
    """Zeros that hide a base's bytes are not the same as nothing, above the same base."""
    base = tmp_path / "base"
    harness.qemu_img("create", "-q", "-f", "qcow2", base, str(size))
    harness.write(base, 7, "2M", "1M")
    for name in ("a", "b"):
        harness.qemu_img("create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", tmp_path / name)
        harness.write(tmp_path / name, 8, "5M", "1M")
    harness.write(tmp_path / "a", 0 if hides else 7, "2M", "64k")
    with held_open(tmp_path / "a") as one, held_open(tmp_path / "b") as other, held_open(base) as lowest:
        below = Node(lowest, "qcow2", b"base")
        first, second = (Node(fd, "qcow2", b"top", below) for fd in (one, other))
        assert img.compare(RecordingIO(), first, second, size, Effort()) is not hides


@pytest.mark.parametrize("size", [512, 1 << 20, (256 << 20) - 512, 256 << 20, (512 << 20) + 1536, 1 << 45])
def test_the_parts_are_the_whole(size: int) -> None:
    parts = img.parts_of(size)
    assert parts[0][0] == 0
    assert [offset + length for offset, length in parts] == [*[offset for offset, _ in parts[1:]], size]
