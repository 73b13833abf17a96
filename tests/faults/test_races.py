"""Somebody who may rename in a pool exchanges folders and files while the agent works on them."""

import random
import shutil
from pathlib import Path

import pytest

from tests.agent.harness import ask, at_ready, leftovers, make_image, reclaim_args
from tests.chance import seed
from tests.faults.scene import Scene
from tests.faults.swapper import Swapper, exchange
from tests.harness.filesystems import new_file, new_folder

pytestmark = [pytest.mark.faults, pytest.mark.qemu]


def outcome(args: dict[str, object], *names: Path) -> dict[str, object]:
    """What comes of it where these names change places before the swap."""
    with at_ready("reclaim", args) as agent:
        assert exchange(*names)
        return agent.go()


def test_a_folder_that_is_exchanged_before_the_swap(tmp_path: Path, templates: list[Path]) -> None:
    scene, other = Scene(tmp_path / "scene", templates[0]), Scene(tmp_path / "other", templates[0])
    answer = outcome(reclaim_args(scene.image, pool=tmp_path / "scene"), scene.pool, other.pool)
    assert answer["code"] == "stale_plan", answer
    assert exchange(scene.pool, other.pool)
    for one in (scene, other):
        assert not one.swapped
        one.verify()


def test_the_temporary_file_is_exchanged_before_the_swap(tmp_path: Path, templates: list[Path]) -> None:
    scene = Scene(tmp_path / "scene", templates[0])
    answer = outcome(reclaim_args(scene.image), scene.pool / ".sa-j1.new", new_file(tmp_path / "evil", b"evil"))
    assert answer["code"] == "tool_failed", answer
    # It may be anybody's last: it stays, and is told of until somebody has looked at it.
    assert (scene.recover(), leftovers(scene.pool)) == (["failed"], {".sa-j1.new", ".sa-j1.journal"})
    assert (scene.pool / ".sa-j1.new").read_bytes() == b"evil"
    (scene.pool / ".sa-j1.new").unlink()
    assert scene.recover() == ["reverted"]
    scene.verify()


def test_a_folder_and_a_link_change_places_all_the_time(tmp_path: Path, templates: list[Path]) -> None:
    """Nothing outside the pool is opened for writing, made, replaced or removed, whoever wins each race."""
    rng, pool, outside = random.Random(seed()), tmp_path / "pool", new_folder(tmp_path / "outside")
    secret = make_image(outside / "vm.qcow2").read_bytes()
    stamp = (outside / "vm.qcow2").stat()
    outcomes: dict[str, int] = {}
    for trial in range(12):
        scene = Scene(tmp_path / f"scene-{trial}", templates[trial % len(templates)])
        pool.mkdir()
        folder, link = pool / "vms", pool / "link"
        scene.pool.rename(folder)
        link.symlink_to(outside)
        args = reclaim_args(folder / "vm.qcow2", pool=pool)
        with Swapper(rng, [(folder, link)], pause=0.003):
            answer = ask("reclaim", args)
        if folder.is_symlink():
            assert exchange(folder, link)
        said = str(answer.get("code", "swapped"))
        outcomes[said] = outcomes.get(said, 0) + 1
        assert sorted(path.name for path in outside.iterdir()) == ["vm.qcow2"]
        now = (outside / "vm.qcow2").stat()
        assert (now.st_ino, now.st_mtime_ns, now.st_nlink) == (stamp.st_ino, stamp.st_mtime_ns, 1)
        assert (outside / "vm.qcow2").read_bytes() == secret
        folder.rename(scene.pool)
        scene.verify()
        assert leftovers(scene.pool) <= {".sa-j1.journal", ".sa-j1.orig"}
        shutil.rmtree(pool)
    print(outcomes)
    assert set(outcomes) <= {"outside_pool", "stale_plan", "swapped"}
