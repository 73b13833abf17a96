"""The controller cancels, goes away or falls silent at any moment (faults F13 and F14)."""

import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from storage_admin.agent import protocol
from tests.agent.harness import Agent, leftovers, reclaim_args
from tests.faults.scene import Scene, seed
from tests.faults.test_kills import listen, tools_of

pytestmark = [pytest.mark.faults, pytest.mark.qemu]

TRIALS = 10


def stop(agent: Agent, how: str) -> None:
    """What may happen to the line."""
    assert agent.process.stdin is not None
    if how == "cancel":
        agent.say(protocol.CANCEL)
    elif how == "end of file":
        agent.process.stdin.close()
    else:
        agent.process.send_signal(signal.SIGHUP)


@pytest.mark.parametrize("how", ["cancel", "end of file", "hang-up"])
def test_work_that_is_stopped_ends_within_seconds_and_leaves_nothing(
    tmp_path: Path, templates: list[Path], how: str
) -> None:
    start = seed()
    print(f"STORAGE_ADMIN_SEED={start}")
    stopped = 0
    for trial in range(TRIALS):
        rng = random.Random(f"{start}-{how}-{trial}")
        scene = Scene(tmp_path / str(trial), rng.choice(templates))
        with Agent() as agent:
            agent.request("reclaim", reclaim_args(scene.image, bandwidth_bytes_sec=2 << 20))
            listen(agent, time.monotonic() + rng.uniform(0, 0.9))
            tools = tools_of(agent)
            stop(agent, how)
            asked = time.monotonic()
            agent.process.wait(10)
            assert time.monotonic() - asked < 5
        assert psutil.wait_procs(tools, timeout=1)[1] == []
        if scene.swapped:
            assert leftovers(scene.pool) == {".sa-j1.journal", ".sa-j1.orig"}
        else:
            stopped += 1
        scene.verify()
    assert stopped >= TRIALS // 4


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
