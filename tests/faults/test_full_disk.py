"""The disk is full, or fills up while work goes on (fault F4)."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.harness import ask, at_stage, leftovers, make_image, qemu_io, reclaim_args
from tests.faults.scene import Scene
from tests.faults.trials import Trials
from tests.harness.filesystems import loop_filesystem, new_file, new_folder

pytestmark = [pytest.mark.faults, pytest.mark.qemu]


def small_disk(folder: Path) -> contextlib.AbstractContextManager[Path]:
    """An ext4 of 24 MiB."""
    return loop_filesystem(folder, 24, make=("-m", "0"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path) as place:
        yield place


def fill(disk: Path, but: int) -> Path:
    """Takes all space of a disk but some bytes."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    os.sync()
    status = os.statvfs(disk)
    with ballast.open("wb") as file:
        take = status.f_bavail * status.f_frsize - but
        if take > 0:
            os.posix_fallocate(file.fileno(), 0, take)
    return ballast


def noisy(path: Path, folder: Path) -> None:
    """Half a megabyte more of bytes that do not compress, so that the copy has some size."""
    noise = new_file(folder / "noise", os.urandom(1 << 20))
    qemu_io(path, f"write -s {noise} 2M 1M")


def test_without_room_for_the_copy_it_is_refused_before_anything_is_written(
    disk: Path, tmp_path: Path, templates: list[Path]
) -> None:
    scene = Scene(disk / "scene", templates[0])
    fill(disk, 1 << 20)
    assert ask("reclaim", reclaim_args(scene.image))["code"] == "not_enough_space"
    assert leftovers(scene.pool) == set()
    scene.verify()


def test_a_disk_that_is_full_at_any_point_leaves_the_original(tmp_path: Path) -> None:
    """The bound that the plan gave was wrong, so that only the disk itself says stop."""
    points = [0, 4096, 12 << 10, 20 << 10, *range(64 << 10, 1664 << 10, 100 << 10)]
    trials = Trials("F4", "full with so many bytes left", points=len(points))
    for trial in trials:
        left = points[trial.number]
        with trial, small_disk(new_folder(trial.folder(tmp_path))) as place:
            trial.note(f"{left} left")
            full_with(place, left, trial.folder(tmp_path))


def full_with(disk: Path, left: int, folder: Path) -> None:
    """Reclaims an image on a disk that has so many bytes left."""
    pool = new_folder(disk / "pool")
    image = make_image(pool / "vm.qcow2")
    noisy(image, folder)
    before = folder / "before"
    shutil.copyfile(image, before)
    inode = image.stat().st_ino
    ballast = fill(disk, left)
    answer = ask("reclaim", reclaim_args(image, predicted_high=1))
    if "code" in answer:
        assert answer["code"] == "not_enough_space", answer
        assert image.stat().st_ino == inode
        assert leftovers(pool) == set()
        assert image.read_bytes() == before.read_bytes()
        ballast.unlink()
        assert ask("reclaim", reclaim_args(image), job="j2")["swapped"]
    else:
        assert answer["swapped"]
        assert left > 1 << 20


def test_the_reserve_is_kept_for_running_guests(disk: Path, tmp_path: Path) -> None:
    image = make_image(new_folder(disk / "pool") / "vm.qcow2")
    noisy(image, tmp_path)
    noisy(image, tmp_path)
    reserve = 8 << 20
    fill(disk, reserve + (6 << 20))
    args = reclaim_args(image, reserve={"percent": 0, "bytes": reserve}, bandwidth_bytes_sec=512 << 10)
    with at_stage("copying", "reclaim", args) as agent:
        # Somebody else takes the room meanwhile.
        with (disk / "more").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 7 << 20)
        answer = agent.answer()
    assert answer["code"] == "not_enough_space", answer
    assert leftovers(image.parent) == set()
