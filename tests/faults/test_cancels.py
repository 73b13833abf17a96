"""The controller cancels, goes away or falls silent at any moment (faults F13 and F14)."""

import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from storage_admin.agent import protocol
from tests.agent.harness import Agent, leftovers, reclaim_args
from tests.faults.scene import Scene, Work
from tests.faults.test_kills import all_ways, listen, tools_of
from tests.faults.trials import Trials

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

#: Seconds within which an agent that was told to stop has put everything back.
SOON = 5


def stop(agent: Agent, how: str) -> None:
    """What may happen to the line."""
    assert agent.process.stdin is not None
    if how == "cancel":
        agent.say(protocol.CANCEL)
    elif how == "end of file":
        agent.process.stdin.close()
    else:
        agent.process.send_signal(signal.SIGHUP)


@pytest.mark.parametrize(("fault", "how"), [("F14", "cancel"), ("F13", "end of file"), ("F13", "hang-up")])
def test_work_that_is_stopped_ends_within_seconds_and_leaves_nothing(
    tmp_path: Path, by_format: dict[str, list[Path]], fault: str, how: str
) -> None:
    trials = Trials(fault, f"{how} while an image is rewritten")
    ways = all_ways(tmp_path, by_format, random.Random(trials.outcome.seed))
    for trial in trials:
        with trial:
            template, name = ways[trial.number % len(ways)]
            scene = Scene(trial.folder(tmp_path), template)
            trial.note(f"{name} of {scene.form}")
            how_it_ended, took = stop_in_the_middle(trial.rng, scene, scene.work(name), how)
            trial.note(how_it_ended)
            if took > SOON:  # a disk that others keep busy takes its time for what has to be synced
                trial.note(f"more than {SOON:.0f} s")
                print(f"{name} of {scene.form} took {took:.1f} s to stop")
            scene.verify()
    assert trials.tally[f"more than {SOON:.0f} s"] <= len(trials.numbers) // 50
    assert not trials.all or len(trials.numbers) < 10 or trials.tally["stopped"] >= len(trials.numbers) // 4


def stop_in_the_middle(rng: random.Random, scene: Scene, work: Work, how: str) -> tuple[str, float]:
    """Stops an agent at a random moment, and sees to it that it and its tools are gone soon; in how many seconds."""
    request, before = scene.begin(work), scene.there.stat().st_ino
    slow = rng.choice([None, 2 << 20, 8 << 20])
    with Agent() as agent:
        agent.request(*request(bandwidth_bytes_sec=slow))
        answered = listen(agent, time.monotonic() + rng.uniform(0, work.seconds + (0.4 if slow else 0)))
        tools = tools_of(agent)
        stop(agent, how)
        asked = time.monotonic()
        listen(agent, asked + 4 * SOON, go=False)
        agent.process.wait(4 * SOON)
        took = time.monotonic() - asked
    assert psutil.wait_procs(tools, timeout=1)[1] == []
    if not work.first:
        assert leftovers(scene.pool) == ({".sa-j1.journal", ".sa-j1.orig"} if scene.swapped else set())
    changed = scene.there.stat().st_ino != before
    return "late" if answered or changed else "stopped", took


def test_a_controller_that_stopped_gets_no_swap_and_its_agent_ends_by_itself(
    tmp_path: Path, templates: list[Path]
) -> None:
    scene = Scene(tmp_path / "scene", templates[0])
    program = (
        "import sys; from storage_admin.agent import lifeline, main\n"
        "lifeline.Lifeline.__init__.__defaults__ = (1.0, 30.0)\nsys.exit(main.main())"
    )
    with Agent([*Agent.python(), "-c", program]) as agent:
        agent.request("reclaim", reclaim_args(scene.image, bandwidth_bytes_sec=1 << 20))
        answer = agent.answer()
        assert answer["code"] == "interrupted", answer
        assert "silent" in answer["detail"]
    assert not scene.swapped
    scene.verify()
