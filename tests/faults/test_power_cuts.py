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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import Agent
from tests.faults.scene import Scene, Work
from tests.faults.test_kills import listen, tools_of, wait_until_gone
from tests.faults.trials import Trials
from tests.harness.filesystems import formatted, loop_filesystem, mounted, new_folder

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

_FICLONE = 0x40049409


class Power:
    """A machine's power, and the filesystem that is there while it is on: another one each time.

    Args:
        disks: a folder in which a file can be cloned as it is in one moment.
        place: where the filesystem is.
    """

    def __init__(self, disks: Path, place: Path) -> None:
        self._disk, self._left, self._place = disks / "disk.img", disks / "left.img", place

    @contextlib.contextmanager
    def on(self, size_mib: int) -> Iterator[Path]:
        for old in (self._disk, self._left):
            old.unlink(missing_ok=True)
        with self._mounted(formatted(self._disk, size_mib << 20)) as folder:
            yield folder

    def goes(self) -> None:
        """What the disk has in this moment is all that is left."""
        with self._disk.open("rb") as source, self._left.open("wb") as target:
            fcntl.ioctl(target, _FICLONE, source.fileno())

    @property
    def is_gone(self) -> bool:
        return self._left.exists()

    def on_again(self) -> contextlib.AbstractContextManager[Path]:
        """The filesystem with what is left, at the same place."""
        return self._mounted(self._left)

    def _mounted(self, disk: Path) -> contextlib.AbstractContextManager[Path]:
        return mounted(disk, self._place, "-o", "loop,noauto_da_alloc")


@pytest.fixture
def power(tmp_path: Path) -> Iterator[Power]:
    with loop_filesystem(tmp_path, 1024, form="xfs", make=("-m", "reflink=1")) as folder:
        yield Power(folder, new_folder(tmp_path / "powered"))


def test_a_power_cut_leaves_the_original_or_the_result(power: Power, all_templates: list[Path]) -> None:
    trials = Trials("F2", "power cuts while an image is rewritten")
    for trial in trials:
        with trial:
            with power.on(128) as folder:
                scene = Scene(folder / "scene", trial.rng.choice(all_templates))
                works = [one for one in scene.works() if not one.in_place]
                # Most of all those where names change hands.
                work = trial.rng.choice([*works, *(one for one in works if one.swaps)])
                trial.note(f"{work.name} of {scene.form}")
                cut_in_the_middle(trial.rng, scene, work, power)
            with power.on_again():
                scene.recover()
                scene.verify()
                trial.note("result" if scene.swapped else "original")
    assert not trials.all or len(trials.numbers) < 10 or {"original", "result"} <= set(trials.tally)


def cut_in_the_middle(rng: random.Random, scene: Scene, work: Work, power: Power) -> None:
    """Has an agent at work when the power goes at a random moment."""
    request = scene.begin(work)
    subprocess.run(["sync", "-f", scene.pool], check=True)
    asked = request(undo_hours=float(rng.choice([0, 24])))
    cut_after(rng.uniform(0.05, work.seconds + 0.25), power, *asked)


def cut_after(seconds: float, power: Power, *asked: Any) -> None:
    """Has an agent at work on a request, and the power go after so many seconds."""
    with Agent() as agent:
        agent.request(*asked)
        listen(agent, time.monotonic() + seconds)
        power.goes()
        tools = tools_of(agent)
        agent.process.kill()
    wait_until_gone(tools)
