"""The filesystems of an image are trimmed, and anything of it dies, is cancelled, or has no room: the image reads the
same as before, but for what was deleted, and nothing of the appliance stays.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from storage_admin.agent import protocol
from tests.agent import test_sparsify
from tests.agent.harness import Agent, ask, leftovers, qemu_img, recover_args
from tests.agent.test_files import left
from tests.faults.test_full_disk import disk, fill
from tests.faults.test_kills import kill, run_to_death, tools_of, wait_until_gone
from tests.faults.test_power_cuts import Power, power
from tests.faults.trials import WHEN, Trial, Trials, steps

__all__ = ["disk", "power"]

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

#: Parts of the work, by the event that begins them, how often that came before, and about how many seconds they take.
PARTS = [
    ("starting", 0, 20.0), ("reading files", 0, 3.0), ("copying", 0, 0.3), ("starting", 1, 20.0),
    ("starting", 2, 20.0), ("syncing", 0, 0.2), ("swapping", 0, 0.2),
]  # fmt: skip
#: Seconds within which an agent that was told to stop has put everything back.
SOON = 5.0


@pytest.fixture(scope="session")
def filesystem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ext4 in which data was deleted."""
    return test_sparsify.made(tmp_path_factory.mktemp("small"), 16, 6)


@dataclass
class Trimmed:
    """An image on which there is a filesystem with deleted data, as a guest reads it ``before``."""

    pool: Path
    before: Path
    form: str = "qcow2"
    undo_hours: float = 0.0
    image: Path = field(init=False)

    def __post_init__(self) -> None:
        self.pool.mkdir(parents=True)
        self.image = test_sparsify.disk_of(self.pool, self.before, self.form)
        self._inode = self.image.stat().st_ino

    @property
    def args(self) -> dict[str, Any]:
        return test_sparsify.args_for(self.image, self.form, undo_hours=self.undo_hours)

    @property
    def swapped(self) -> bool:
        return self.image.stat().st_ino != self._inode

    def verify(self, agent: int) -> None:
        """Every byte that is data is there, and nothing of the job but its undo copy; after a recovery."""
        if self.form == "qcow2":
            assert b"No errors" in qemu_img("check", "-f", "qcow2", self.image)
        self._reads_as_before(self.image)
        undo = {".sa-j1.journal", ".sa-j1.orig"}
        assert leftovers(self.pool) in ([undo, set()] if self.swapped and self.undo_hours else [set()])
        assert {one.name for one in self.pool.iterdir()} - undo == {self.image.name}
        assert left(self.image, agent) == []

    def _reads_as_before(self, image: Path) -> None:
        raw = self.pool.parent / "after.raw"
        qemu_img("convert", "-f", self.form, "-O", "raw", image, raw)
        there, was = raw.read_bytes(), self.before.read_bytes()
        raw.unlink()
        if there == was:
            return
        assert self.swapped, "only the result may differ"
        size, free = free_blocks(self.before)
        for block in range(len(was) // size):
            part = slice(block * size, block * size + size)
            # In the superblock stand the times of the mounts.
            if block != 1 and there[part] != was[part]:
                assert block in free, block
                assert not there[part].strip(b"\0"), block

    def again(self) -> None:
        """The next job of the kind does its work."""
        was_trimmed = self.swapped
        answer = ask("sparsify", self.args, job="j9")
        assert answer.get("swapped") is not was_trimmed, answer


def free_blocks(filesystem: Path) -> tuple[int, set[int]]:
    """The size of a block, and which of them are free, by dumpe2fs."""
    told = subprocess.run(["dumpe2fs", filesystem], capture_output=True, text=True, check=True).stdout
    size = int(re.findall(r"Block size:\s+(\d+)", told)[0])
    assert size == 1024, "the superblock has a block of its own"
    ranges = re.findall(r"(\d+)(?:-(\d+))?", " ".join(re.findall(r"^  Free blocks: (.*)$", told, re.MULTILINE)))
    return size, {block for first, last in ranges for block in range(int(first), int(last or first) + 1)}


def disturbed(agent: Agent, trial: Trial, act: Callable[[], None]) -> dict[str, Any] | None:
    """What an agent answers, if it does, that trims while something happens to it at a random moment."""
    stage, earlier, span = trial.rng.choice(PARTS)
    delay = trial.rng.uniform(0, span)
    trial.note(f"{stage} {earlier + 1}" if stage == "starting" else stage)
    timer = threading.Timer(delay, act)
    seen, begun, told = 0, False, ""
    while (event := agent.next()) is not None:
        # What is said anew of the same stage only tells how far it is.
        if event["event"] == "progress" and event["stage"] != told:
            told = event["stage"]
            seen += told == stage
            if not begun and seen > earlier:
                begun = True
                timer.start()
        if event["event"] == protocol.READY:
            agent.say(protocol.GO, generation=1)
        if event["event"] in {protocol.RESULT, protocol.ERROR}:
            break
    timer.cancel()
    if begun:
        timer.join()
    return event


def strike(agent: Agent, victim: str, trial: Trial, tools: list[psutil.Process]) -> None:
    """Kill the agent, one of its tools, or all of them."""
    tools.extend(tools_of(agent))
    struck = {"agent": [], "tool": trial.rng.sample(tools, min(1, len(tools))), "tree": tools}[victim]
    trial.note(*(f"tool {process.name()}" for process in struck if victim == "tool"))
    for process in struck:
        kill(process.pid)
    if victim != "tool":
        agent.process.kill()


def cancel(agent: Agent, told: list[float], tools: list[psutil.Process]) -> None:
    tools.extend(tools_of(agent))
    told.append(time.monotonic())
    agent.say(protocol.CANCEL)


def cut_off(agent: Agent, power: Power, tools: list[psutil.Process]) -> None:
    power.goes()
    tools.extend(tools_of(agent))
    agent.process.kill()


def trimmed(trial: Trial, folder: Path, filesystem: Path) -> Trimmed:
    """An image of a trial's own."""
    return Trimmed(folder / "pool", filesystem, trial.rng.choice(["qcow2", "raw"]), trial.rng.choice([0.0, 24.0]))


def test_kills_at_random_moments_leave_the_image_as_it_was_or_trimmed(tmp_path: Path, filesystem: Path) -> None:
    trials = Trials("trims", "kills while filesystems are trimmed")
    for trial in trials:
        with trial:
            one, tools = trimmed(trial, trial.folder(tmp_path), filesystem), list[psutil.Process]()
            victim = ("tool", "agent", "tree")[trial.number % 3]
            trial.note(victim)
            with Agent() as agent:
                agent.request("sparsify", one.args)
                answer = disturbed(agent, trial, partial(strike, agent, victim, trial, tools))
            wait_until_gone(tools)
            trial.note("late" if answer and answer["event"] == protocol.RESULT else "struck")
            if victim == "tool" and not one.swapped:
                assert leftovers(one.pool) == set(), "an agent that lives puts everything back by itself"
            ask("recover", recover_args(one.pool), job="r1")
            one.verify(agent.process.pid)
            if trial.number % 5 == 0:
                one.again()
    assert not trials.all or len(trials.numbers) < 20 or trials.tally["struck"] > len(trials.numbers) // 2


def test_a_cancel_at_a_random_moment_ends_within_seconds(tmp_path: Path, filesystem: Path) -> None:
    trials = Trials("trims", "cancels while filesystems are trimmed", part=0.5)
    for trial in trials:
        with trial:
            one, told, tools = trimmed(trial, trial.folder(tmp_path), filesystem), list[float](), list[psutil.Process]()
            with Agent() as agent:
                agent.request("sparsify", one.args)
                answer = disturbed(agent, trial, partial(cancel, agent, told, tools))
                took = time.monotonic() - told[0] if told else 0.0
                assert answer is not None
                agent.process.wait(20)
            trial.note("late" if answer["event"] == protocol.RESULT else answer["code"])
            if took > SOON:
                trial.note(f"more than {SOON:.0f} s")
                print(f"trial {trial.number} took {took:.1f} s to stop")
            wait_until_gone(tools)
            assert answer["event"] == protocol.RESULT or not one.swapped
            one.verify(agent.process.pid)
    assert trials.tally[f"more than {SOON:.0f} s"] <= len(trials.numbers) // 10


def test_a_power_cut_leaves_the_image_as_it_was_or_trimmed(power: Power, filesystem: Path) -> None:
    trials = Trials("trims", "power cuts while filesystems are trimmed", part=0.5)
    for trial in trials:
        with trial:
            tools = list[psutil.Process]()
            with power.on(128) as folder:
                one = trimmed(trial, folder / "here", filesystem)
                subprocess.run(["sync", "-f", one.pool], check=True)
                with Agent() as agent:
                    agent.request("sparsify", one.args)
                    disturbed(agent, trial, partial(cut_off, agent, power, tools))
                wait_until_gone(tools)
                if not power.is_gone:  # it was done before
                    power.goes()
            with power.on_again():
                ask("recover", recover_args(one.pool), job="r1")
                one.verify(agent.process.pid)
                trial.note("result" if one.swapped else "original")


@pytest.mark.parametrize("when", WHEN)
def test_an_agent_that_dies_at_a_line_of_its_journal_leaves_the_image_as_it_was_or_trimmed(
    tmp_path: Path, filesystem: Path, when: str
) -> None:
    outcomes = set()
    for at in steps(stride=1, most=20):
        one = Trimmed(tmp_path / str(at) / "pool", filesystem, undo_hours=24.0)
        died = run_to_death("sparsify", one.args, "j1", at, when, "journal")
        if died is None:
            break
        told = [row["outcome"] for row in ask("recover", recover_args(one.pool), job="r1")["recovered"]]
        print(f"line {at} {when}: {died}: {told}")
        one.verify(0)
        outcomes.add(one.swapped)
    assert at > 4
    assert outcomes == {True, False}


@pytest.mark.parametrize("point", ["space", "trimming"])
def test_a_disk_that_fills_up_leaves_the_image_as_it_was(disk: Path, filesystem: Path, point: str) -> None:
    """When the copy is made, or when it is there and its filesystems are trimmed."""
    one = Trimmed(disk / "here" / "pool", filesystem)
    with Agent() as agent:
        agent.request("sparsify", one.args)
        if point == "space":
            agent.until("space")
        else:
            agent.until("progress", stage="trimming")
        os.kill(agent.process.pid, signal.SIGSTOP)
        ballast = fill(disk, 64 << 10)
        os.kill(agent.process.pid, signal.SIGCONT)
        answer = agent.answer()
    ballast.unlink()
    assert point == "trimming" or answer.get("code") == "not_enough_space", answer
    assert "code" in answer or one.swapped, answer
    one.verify(agent.process.pid)
    one.again()
