"""``kill -9`` of the agent, of its tool or of both, at every step and at random moments (fault F1)."""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from storage_admin.agent import protocol
from tests.agent.harness import Agent, ask, leftovers, reclaim_args, undo_args
from tests.faults.scene import FORMATS, Scene, Work
from tests.faults.trials import WHEN, Trials, steps

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

DRIVER = str(Path(__file__).with_name("kill_self.py"))


def wait_until_gone(processes: list[psutil.Process]) -> None:
    """The death signal has to reach the tool of a killed agent."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive, f"still running after their agent was killed: {alive}"


def run_to_death(verb: str, args: dict[str, object], job: str, at: int, *how: str) -> str | None:
    """Runs an agent that kills itself at a step; where that was, or ``None`` if it got through before."""
    with Agent([sys.executable, DRIVER, str(at), *how]) as agent:
        agent.request(verb, args, job)
        while (event := agent.next()) is not None:
            if event["event"] == protocol.READY:
                agent.say(protocol.GO, generation=1)
            assert event["event"] != protocol.ERROR, event
            if event["event"] == protocol.RESULT:
                return None
        died = re.search(r"killed at (.*)", agent.stderr())
        assert died, "it ended otherwise"
        return died.group(1)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(("undo_hours", "first"), [(24, 1), (0, 15)])
def test_a_reclaim_that_dies_at_any_step_leaves_the_original_or_the_result(
    tmp_path: Path, templates: list[Path], when: str, undo_hours: int, first: int
) -> None:
    outcomes = set()
    for at in steps(first):
        scene = Scene(tmp_path / str(at), templates[at % len(templates)])
        died = run_to_death("reclaim", reclaim_args(scene.image, undo_hours=undo_hours), "j1", at, when)
        if died is None:
            break
        print(f"step {at} {when}: {died}: {scene.recover()}")
        scene.verify()
        outcomes.add(scene.swapped)
        assert scene.recover() == (["kept"] if scene.swapped and undo_hours else [])
        scene.verify()
    assert at > 17
    assert outcomes == {True, False} if first == 1 else True in outcomes


@pytest.mark.parametrize("when", WHEN)
def test_an_undo_that_dies_at_any_step_leaves_the_original_or_the_result(
    tmp_path: Path, templates: list[Path], when: str
) -> None:
    outcomes = set()
    for at in steps():
        scene = Scene(tmp_path / str(at), templates[at % len(templates)])
        assert ask("reclaim", reclaim_args(scene.image))["swapped"]
        died = run_to_death("undo", undo_args(scene.image), "u1", at, when)
        if died is None:
            break
        print(f"step {at} {when}: {died}: {scene.recover()}")
        scene.verify()
        outcomes.add(scene.swapped)
        if scene.swapped:
            assert ask("undo", undo_args(scene.image), job="u2")["inode"] == scene.original.st_ino
            scene.verify()
    assert outcomes == {True, False}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("undo", [False, True], ids=["reclaim", "undo"])
def test_the_instant_without_a_name_that_other_filesystems_need_ends_with_the_recovery(
    tmp_path: Path, templates: list[Path], undo: bool, when: str
) -> None:
    """As on NFS, which can exchange nothing: a kill between two renames leaves no file of that name at all."""
    nameless = 0
    for at in steps(1 if undo else 15, stride=1):
        scene = Scene(tmp_path / str(at), templates[at % len(templates)])
        if undo:
            assert ask("reclaim", reclaim_args(scene.image))["swapped"]
        asked = ("undo", undo_args(scene.image), "u1") if undo else ("reclaim", reclaim_args(scene.image), "j1")
        died = run_to_death(*asked, at, when, "no-exchange")
        if died is None:
            break
        nameless += not scene.image.exists()
        print(f"step {at} {when}: {died}: {scene.recover()}")
        scene.verify()
    assert nameless


@pytest.mark.parametrize("way", ["convert to raw", "create an overlay"])
def test_what_makes_a_file_beside_and_dies_at_any_step_leaves_no_half_of_it(
    tmp_path: Path, templates: list[Path], way: str
) -> None:
    outcomes = set()
    # The steps before are those of a reclaim.
    for at in steps(4):
        scene = Scene(tmp_path / str(at), templates[at % len(templates)])
        died = run_to_death(*scene.begin(scene.work(way))(), at, "after")
        if died is None:
            break
        print(f"step {at}: {died}: {scene.recover()}")
        scene.verify()
        assert not scene.swapped
        outcomes.add(bool(list(scene.pool.glob("converted.*"))))
    assert outcomes == {True, False}


def tools_of(agent: Agent) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(agent.process.pid).children(recursive=True)
    return []


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("form", FORMATS)
def test_kills_at_random_moments_leave_the_original_or_the_result(
    tmp_path: Path, by_format: dict[str, list[Path]], form: str
) -> None:
    # There is most that can be done to a qcow2 image.
    trials = Trials("F1", f"kills while a {form} image is rewritten", part=1 / 2 if form == "qcow2" else 1 / 6)
    ways = ways_of(tmp_path, by_format[form])
    for trial in trials:
        with trial:
            template, name = ways[trial.number % len(ways)]
            scene = Scene(trial.folder(tmp_path), template)
            trial.note(name)
            trial.note(kill_in_the_middle(trial.rng, scene, scene.work(name)))
            scene.recover()
            scene.verify()
            trial.note("result" if scene.swapped else "original")
    if trials.all and len(trials.numbers) >= len(ways):
        assert {"result", "original", *(name for _, name in ways)} <= set(trials.tally)


def ways_of(folder: Path, templates: list[Path]) -> list[tuple[Path, str]]:
    """Templates, each with the name of each work that can be done to its image."""
    ways = []
    for template in templates:
        scene = Scene(folder / "look", template)
        ways += [(template, work.name) for work in scene.works()]
        shutil.rmtree(folder / "look")
    return ways


def all_ways(folder: Path, by_format: dict[str, list[Path]], rng: random.Random) -> list[tuple[Path, str]]:
    """The ways of all formats in a random order: first each work once for each format, then the other layouts."""
    parts = [
        ways_of(folder, [templates[-1] for templates in by_format.values()]),
        ways_of(folder, [template for templates in by_format.values() for template in templates[:-1]]),
    ]
    return [way for part in parts for way in rng.sample(part, len(part))]


def kill_in_the_middle(rng: random.Random, scene: Scene, work: Work) -> str:
    """Kills the agent, its tool or both at a random moment; tells whom, and whether the work had ended by then."""
    request = scene.begin(work)
    victim = rng.choice(["agent", "tool", "tree"])
    swapped = scene.swapped
    with Agent() as agent:
        began = time.monotonic()
        slow = rng.choice([None, 8 << 20])
        agent.request(*request(bandwidth_bytes_sec=slow))
        answered = listen(agent, began + rng.uniform(0.02, work.seconds + (0.3 if slow else 0.05)))
        tools = tools_of(agent)
        for tool in tools if victim in {"tool", "tree"} else []:
            kill(tool.pid)
        if victim in {"agent", "tree"}:
            kill(agent.process.pid)
        listen(agent, time.monotonic() + 30)
    wait_until_gone(tools)
    if victim == "tool" and not scene.swapped and not swapped:
        # The agent lived on: it has put everything back by itself.
        assert leftovers(scene.pool) == set()
    return f"{victim}{' late' if answered else ''}"


def listen(agent: Agent, until: float, *, go: bool = True) -> bool:
    """Takes events, and says go unless told otherwise, until a moment; whether the agent has answered by then."""
    assert agent.process.stdout is not None
    fd = agent.process.stdout.fileno()
    os.set_blocking(fd, False)
    while time.monotonic() < until:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            time.sleep(0.002)
            continue
        if not chunk:
            return True
        for line in chunk.splitlines():
            if go and line.startswith(b'{"event":"ready"'):
                agent.say(protocol.GO, generation=1)
            if line.startswith((b'{"event":"result"', b'{"event":"error"')):
                return True
    return False
