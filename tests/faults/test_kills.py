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
from tests.faults.scene import Scene, seed

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

DRIVER = str(Path(__file__).with_name("kill_self.py"))
#: Random kills in a run; more with STORAGE_ADMIN_KILLS.
RANDOM_KILLS = int(os.environ.get("STORAGE_ADMIN_KILLS", "300"))
#: More steps than any run takes: a run that gets through ends the walk.
MOST_STEPS = 80


def wait_until_gone(processes: list[psutil.Process]) -> None:
    """The death signal has to reach the tool of a killed agent."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive, f"still running after their agent was killed: {alive}"


def run_to_death(verb: str, args: dict[str, object], job: str, at: int, when: str) -> str | None:
    """Runs an agent that kills itself at a step; where that was, or ``None`` if it got through before."""
    with Agent([sys.executable, DRIVER, str(at), when]) as agent:
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


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("undo_hours", "first"), [(24, 1), (0, 15)])
def test_a_reclaim_that_dies_at_any_step_leaves_the_original_or_the_result(
    tmp_path: Path, templates: list[Path], when: str, undo_hours: int, first: int
) -> None:
    outcomes = set()
    for at in range(first, MOST_STEPS):
        scene = Scene(tmp_path / str(at), templates[at % len(templates)])
        died = run_to_death("reclaim", reclaim_args(scene.image, undo_hours=undo_hours), "j1", at, when)
        if died is None:
            break
        rows = scene.recover()
        print(f"step {at} {when}: {died}: {[row['outcome'] for row in rows]}")
        scene.verify()
        outcomes.add(scene.swapped)
        assert [row["outcome"] for row in scene.recover()] == (["kept"] if scene.swapped and undo_hours else [])
        scene.verify()
    else:
        raise AssertionError("no run came to its end")
    assert at > 17
    assert outcomes == {True, False} if first == 1 else True in outcomes


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_undo_that_dies_at_any_step_leaves_the_original_or_the_result(
    tmp_path: Path, templates: list[Path], when: str
) -> None:
    outcomes = set()
    for at in range(1, MOST_STEPS):
        scene = Scene(tmp_path / str(at), templates[at % len(templates)])
        assert ask("reclaim", reclaim_args(scene.image))["swapped"]
        died = run_to_death("undo", undo_args(scene.image), "u1", at, when)
        if died is None:
            break
        rows = scene.recover()
        print(f"step {at} {when}: {died}: {[row['outcome'] for row in rows]}")
        scene.verify()
        outcomes.add(scene.swapped)
        if scene.swapped:
            assert ask("undo", undo_args(scene.image), job="u2")["inode"] == scene.original.st_ino
            scene.verify()
    else:
        raise AssertionError("no run came to its end")
    assert outcomes == {True, False}


def tools_of(agent: Agent) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(agent.process.pid).children(recursive=True)
    return []


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("batch", range(4))
def test_kills_at_random_moments_leave_the_original_or_the_result(
    tmp_path: Path, all_templates: list[Path], batch: int
) -> None:
    start = seed()
    print(f"STORAGE_ADMIN_SEED={start}")
    tally: dict[str, int] = {}
    for trial in range(batch, RANDOM_KILLS, 4):
        rng = random.Random(f"{start}-{trial}")
        scene = Scene(tmp_path / str(trial), rng.choice(all_templates))
        verb, own = rng.choice(scene.works())
        args = scene.args(**own, bandwidth_bytes_sec=rng.choice([None, 8 << 20]))
        when = kill_in_the_middle(rng, verb, args, scene)
        how = own.get("method") or own.get("repair") or ""
        what = f"{verb} {how} of {scene.form}{' on a base' if scene.bases else ''}"
        scene.recover()
        try:
            scene.verify()
        except AssertionError as error:
            raise AssertionError(f"trial {trial} of seed {start}, {what}, {when}: {error}") from error
        tally[what] = tally.get(what, 0) + 1
        tally[when] = tally.get(when, 0) + 1
        shutil.rmtree(tmp_path / str(trial))
    print(f"kills: {tally}")
    assert len(tally) >= 2


def kill_in_the_middle(rng: random.Random, verb: str, args: dict[str, object], scene: Scene) -> str:
    """Kills the agent, its tool or both at a random moment; tells whom, and whether the work had ended by then."""
    victim = rng.choice(["agent", "tool", "tree"])
    with Agent() as agent:
        began = time.monotonic()
        agent.request(verb, args)
        answered = listen(agent, began + rng.uniform(0, 0.6))
        tools = tools_of(agent)
        for tool in tools if victim in {"tool", "tree"} else []:
            kill(tool.pid)
        if victim in {"agent", "tree"}:
            kill(agent.process.pid)
        listen(agent, time.monotonic() + 30)
    wait_until_gone(tools)
    if victim == "tool" and not scene.swapped:
        # The agent lived on: it has put everything back by itself.
        assert leftovers(scene.pool) == set()
    return f"{victim}{' late' if answered else ''}"


def listen(agent: Agent, until: float) -> bool:
    """Takes events and says go until a moment; whether the agent has answered by then."""
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
            if line.startswith(b'{"event":"ready"'):
                agent.say(protocol.GO, generation=1)
            if line.startswith((b'{"event":"result"', b'{"event":"error"')):
                return True
    return False
