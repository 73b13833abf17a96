"""Somebody who may rename in a pool exchanges folders and files while the agent works on them."""

import ctypes
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest

from tests.agent.harness import ask, at_ready, leftovers, make_image, reclaim_args
from tests.chance import seed
from tests.faults.scene import Scene

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

RENAME_EXCHANGE, AT_FDCWD = 2, -100


def exchange(first: Path, second: Path) -> None:
    """Swap two names in one step, as ``renameat2`` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer = libc.renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE)
    assert answer == 0, os.strerror(ctypes.get_errno())


def outcome(args: dict[str, object], tease: object) -> dict[str, object]:
    assert callable(tease)
    with at_ready("reclaim", args) as agent:
        tease()
        return agent.go()


def test_a_folder_that_is_exchanged_before_the_swap(tmp_path: Path, templates: list[Path]) -> None:
    scene, other = Scene(tmp_path / "scene", templates[0]), Scene(tmp_path / "other", templates[0])
    pool = tmp_path / "scene"
    args = reclaim_args(scene.image, pool=pool)
    answer = outcome(args, lambda: exchange(scene.pool, other.pool))
    assert answer["code"] == "stale_plan", answer
    exchange(scene.pool, other.pool)
    for one in (scene, other):
        assert not one.swapped
        one.verify()


def test_the_temporary_file_is_exchanged_before_the_swap(tmp_path: Path, templates: list[Path]) -> None:
    scene = Scene(tmp_path / "scene", templates[0])
    evil = tmp_path / "evil"
    evil.write_bytes(b"evil")
    answer = outcome(reclaim_args(scene.image), lambda: exchange(scene.pool / ".sa-j1.new", evil))
    assert answer["code"] == "tool_failed", answer
    # It may be anybody's last: it stays, and is told of until somebody has looked at it.
    [row] = scene.recover()
    assert (row["outcome"], leftovers(scene.pool)) == ("failed", {".sa-j1.new", ".sa-j1.journal"})
    assert (scene.pool / ".sa-j1.new").read_bytes() == b"evil"
    (scene.pool / ".sa-j1.new").unlink()
    assert [row["outcome"] for row in scene.recover()] == ["reverted"]
    scene.verify()


def test_a_folder_and_a_link_change_places_all_the_time(tmp_path: Path, templates: list[Path]) -> None:
    """Nothing outside the pool is opened for writing, made, replaced or removed, whoever wins each race."""
    start = seed()
    rng = random.Random(start)
    pool, outside = tmp_path / "pool", tmp_path / "outside"
    outside.mkdir()
    make_image(outside / "vm.qcow2")
    secret = (outside / "vm.qcow2").read_bytes()
    stamp = (outside / "vm.qcow2").stat()
    outcomes: dict[str, int] = {}
    for trial in range(12):
        scene = Scene(tmp_path / f"scene-{trial}", templates[trial % len(templates)])
        pool.mkdir()
        folder, link = pool / "vms", pool / "link"
        scene.pool.rename(folder)
        link.symlink_to(outside)
        args = reclaim_args(folder / "vm.qcow2", pool=pool)
        stop = threading.Event()

        def swapper(stop: threading.Event = stop, folder: Path = folder, link: Path = link) -> None:
            while not stop.is_set():
                exchange(folder, link)
                time.sleep(rng.uniform(0, 0.003))

        thread = threading.Thread(target=swapper)
        thread.start()
        answer = ask("reclaim", args)
        stop.set()
        thread.join()
        if folder.is_symlink():
            exchange(folder, link)
        said = str(answer.get("code", "swapped"))
        outcomes[said] = outcomes.get(said, 0) + 1
        assert sorted(path.name for path in outside.iterdir()) == ["vm.qcow2"]
        now = (outside / "vm.qcow2").stat()
        assert (now.st_ino, now.st_mtime_ns, now.st_nlink) == (stamp.st_ino, stamp.st_mtime_ns, 1)
        assert (outside / "vm.qcow2").read_bytes() == secret
        folder.rename(scene.pool)
        scene.image.stat()
        scene.verify()
        assert leftovers(scene.pool) <= {".sa-j1.journal", ".sa-j1.orig"}
        shutil.rmtree(pool)
    print(outcomes)
    assert set(outcomes) <= {"outside_pool", "stale_plan", "swapped"}
