"""The power goes at a random moment (fault F2).

The image lies on an ext4 of its own, mounted without the heuristic that hides a missing fsync; its disk is a file.
What has reached that file at a random moment is cloned in one step, as if the power had gone then. The clone is
mounted, which replays ext4's journal, and recovered.
"""

import contextlib
import fcntl
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import Agent
from tests.faults.scene import Scene, Work
from tests.faults.test_kills import listen, tools_of, wait_until_gone
from tests.faults.trials import Trials
from tests.harness.filesystems import formatted

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

_FICLONE = 0x40049409


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def mounted(device: Path, folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    run("mount", "-o", options, device, folder)
    try:
        yield folder
    finally:
        unmount(folder)


def unmount(folder: Path) -> None:
    """Somebody who looks at all processes' files may still hold one of its for a moment."""
    for _ in range(50):
        if subprocess.run(["umount", folder], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    run("umount", "--lazy", folder)


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Path]:
    """A folder in which a file can be cloned as it is in one moment."""
    host = formatted(tmp_path / "host.img", 1 << 30, "xfs", ("-m", "reflink=1"))
    with mounted(host, tmp_path / "host", "loop") as folder:
        yield folder


def test_a_power_cut_leaves_the_original_or_the_result(tmp_path: Path, disks: Path, all_templates: list[Path]) -> None:
    trials = Trials("F2", "power cuts while an image is rewritten")
    for trial in trials:
        disk, cut = disks / "disk.img", disks / "cut.img"
        with trial:
            formatted(disk, 128 << 20)
            with mounted(disk, tmp_path / "disk", "loop,noauto_da_alloc") as folder:
                scene = Scene(folder / "scene", trial.rng.choice(all_templates))
                works = [one for one in scene.works() if not one.in_place]
                # Most of all those where names change hands.
                work = trial.rng.choice([*works, *(one for one in works if one.swaps)])
                trial.note(f"{work.name} of {scene.form}")
                cut_in_the_middle(trial.rng, scene, work, partial(clone, disk, cut))
            with mounted(cut, tmp_path / "cut", "loop,noauto_da_alloc") as folder:
                after = scene.moved(folder / "scene")
                after.recover()
                after.verify()
                trial.note("result" if after.swapped else "original")
        disk.unlink(missing_ok=True)
        cut.unlink(missing_ok=True)
    assert not trials.all or len(trials.numbers) < 10 or {"original", "result"} <= set(trials.tally)


def cut_in_the_middle(rng: random.Random, scene: Scene, work: Work, cut: Callable[[], None]) -> None:
    """Has an agent at work when the power goes at a random moment."""
    request = scene.begin(work)
    run("sync", "-f", scene.pool)
    asked = request(undo_hours=float(rng.choice([0, 24])))
    cut_after(rng.uniform(0.05, work.seconds + 0.25), cut, *asked)


def cut_after(seconds: float, cut: Callable[[], None], *asked: Any) -> None:
    """Has an agent at work on a request, and the power go after so many seconds."""
    with Agent() as agent:
        agent.request(*asked)
        listen(agent, time.monotonic() + seconds)
        cut()
        tools = tools_of(agent)
        agent.process.kill()
    wait_until_gone(tools)


def clone(disk: Path, cut: Path) -> None:
    """The disk's bytes as they are in this moment."""
    with disk.open("rb") as source, cut.open("wb") as target:
        fcntl.ioctl(target, _FICLONE, source.fileno())
