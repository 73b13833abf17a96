"""A base that nothing but the disk itself proves: the right one is taken; other states and other disks are refused."""

from pathlib import Path

import pytest

from tests.agent.harness import ask, heard, image_info, leftovers, reads_as, undo_args
from tests.agent.lost_base import LATER, MADE, USED, args_for, as_qcow2, damaged, disk, overlay, partitioned, used
from tests.agent.test_relink import pair

pytestmark = pytest.mark.qemu
SOUND = [{"device": "/dev/sda", "type": "ext4", "state": "sound", "why": ""}]


BETWEEN = (MADE + USED) // 2


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A disk as its overlay's guest found it and left it, and as it was before, between and after."""
    folder = tmp_path_factory.mktemp("states")
    older = disk(folder / "older", 1)
    base = used(older, folder / "base", MADE + 1000, 2)
    return {
        "older": older, "base": base, "left": used(base, folder / "left", USED, 3),
        "used before the guest's last change": used(base, folder / "between", BETWEEN, 4, files=2),
        "used after it": used(base, folder / "later", LATER, 5),
        "another guest of its template": used(used(older, folder / "a", MADE + 500, 6), folder / "b", MADE + 1000, 7),
        "another guest": disk(folder / "other", 9),
    }  # fmt: skip


def broken(pool: Path, states: dict[str, Path]) -> tuple[Path, Path]:
    """The base, moved away and touched, and its overlay."""
    base = as_qcow2(states["base"], pool / "base.qcow2")
    path = overlay(states["base"], states["left"], base, pool / "vm.qcow2")
    moved = base.rename(pool / "moved.qcow2")
    moved.touch()
    return moved, path


def test_the_base_that_was_moved_and_touched_is_proven_by_its_filesystem(
    pool: Path, tmp_path: Path, states: dict[str, Path]
) -> None:
    moved, path = broken(pool, states)
    result, events = heard("relink", args_for(path, moved))
    told = [one["filesystems"] for one in events if one["event"] == "filesystems"]
    assert result.get("swapped") is True, result
    assert (result["filesystems"], told) == (SOUND, [SOUND])
    assert 0 < result["alike"] <= result["compared"]
    assert image_info(path)["backing-filename"] == "moved.qcow2"
    assert reads_as(path, as_qcow2(states["left"], tmp_path / "left.qcow2"))
    assert "code" not in ask("undo", undo_args(path), job="u1")
    assert image_info(path)["backing-filename"] == "base.qcow2"
    assert leftovers(pool) == set()


@pytest.mark.parametrize(
    "state",
    ["older", "used after it", "used before the guest's last change", "another guest of its template", "another guest"],
)
def test_another_state_of_the_base_is_refused(pool: Path, states: dict[str, Path], state: str) -> None:
    moved, path = broken(pool, states)
    moved.unlink()
    wrong, before = as_qcow2(states[state], pool / "base of another.qcow2"), path.read_bytes()
    assert ask("relink", args_for(path, wrong))["code"] in {"unproven", "filesystem_damaged"}
    assert (path.read_bytes() == before, leftovers(pool)) == (True, set())


def test_a_base_on_which_the_filesystem_is_damaged_is_refused(
    pool: Path, tmp_path: Path, states: dict[str, Path]
) -> None:
    left = used(states["base"], tmp_path / "left", USED, 8, files=2)
    base = as_qcow2(states["base"], pool / "base.qcow2")
    path = overlay(states["base"], left, base, pool / "vm.qcow2")
    base.unlink()
    wrong, before = as_qcow2(damaged(states["base"], tmp_path / "damaged"), pool / "wrong.qcow2"), path.read_bytes()
    answer, events = heard("relink", args_for(path, wrong))
    assert answer["code"] == "filesystem_damaged"
    (told,) = [one["filesystems"] for one in events if one["event"] == "filesystems"]
    assert [(one["device"], one["state"]) for one in told] == [("/dev/sda", "damaged")]
    assert (path.read_bytes() == before, leftovers(pool)) == (True, set())


def test_a_root_on_a_logical_volume_beside_swap_and_a_boot_partition(
    pool: Path, tmp_path: Path, states: dict[str, Path]
) -> None:
    wanted = [states[name] for name in ("base", "left", "used before the guest's last change")]
    base, left, between = partitioned(wanted, tmp_path)
    was = as_qcow2(base, pool / "base.qcow2")
    path = overlay(base, left, was, pool / "vm.qcow2")
    was.rename(pool / "moved.qcow2").touch()
    wrong, before = as_qcow2(between, pool / "between.qcow2"), path.read_bytes()
    assert ask("relink", args_for(path, wrong))["code"] in {"unproven", "filesystem_damaged"}
    assert path.read_bytes() == before
    result = ask("relink", args_for(path, pool / "moved.qcow2"), job="j2")
    assert result.get("swapped") is True, result
    found = [(one["device"], one["type"], one["state"]) for one in result["filesystems"]]
    assert found == [("/dev/guest/root", "ext4", "sound"), ("/dev/sda2", "vfat", "sound")]
    assert reads_as(path, as_qcow2(left, tmp_path / "left.qcow2"))


def test_a_disk_without_a_filesystem_is_refused(pool: Path) -> None:
    base, path = pair(pool)
    moved, before = base.rename(pool / "moved.qcow2"), path.read_bytes()
    assert ask("relink", args_for(path, moved))["code"] == "unproven"
    assert (path.read_bytes() == before, leftovers(pool)) == (True, set())
