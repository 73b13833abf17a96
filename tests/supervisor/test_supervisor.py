"""The supervisor over small children: their output, their crashes, their end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes import Daemon, wait_until

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[2]
POLITE = 'trap "echo bye; exit 0" TERM; echo "pid $$"; while :; do sleep 0.05; done'
DEAF = 'trap "" TERM INT; echo "pid $$"; while :; do sleep 0.05; done'
QUICK = {"first": 0.1, "limit": 0.4, "good_after": 60}


def supervise(folder: Path, *children: dict[str, Any], backoff: dict[str, float] | None = None) -> Daemon:
    plan = json.dumps({"children": children, "backoff": backoff or QUICK})
    argv = [sys.executable, "-m", "tests.supervisor.driver", plan]
    return Daemon(argv, folder / "log", cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"})


def pids(said: str) -> list[int]:
    return [int(number) for number in re.findall(r"\| pid (\d+)", said)]


def child_of(daemon: Daemon) -> int:
    """Its only child, once that is there."""
    daemon.wait_for(lambda: pids(daemon.said()), 20, "the child")
    (child,) = pids(daemon.said())
    return child


def is_gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_all_in_reverse_order(tmp_path: Path, number: signal.Signals) -> None:
    names = ("first", "second", "third")
    with supervise(tmp_path, *({"name": name, "script": POLITE} for name in names)) as daemon:
        daemon.wait_for(lambda: len(pids(daemon.said())) == 3 and "all ready" in daemon.said(), 20, "three children")
        children = pids(daemon.said())
        daemon.process.send_signal(number)
        assert daemon.process.wait(20) == 0
    assert re.findall(r"(\w+) +\| bye", daemon.said()) == ["third", "second", "first"]
    assert "ended unexpectedly" not in daemon.said()
    assert all(is_gone(child) for child in children)


def test_a_ctrl_c_in_the_terminal_reaches_no_child(tmp_path: Path) -> None:
    with supervise(tmp_path, {"name": "child", "script": POLITE}) as daemon:
        child = child_of(daemon)
        assert os.getsid(child) != os.getsid(daemon.pid)
        assert os.getpgid(child) != os.getpgid(daemon.pid)


def test_restarts_a_crashed_child_with_doubling_pauses_and_names_it(tmp_path: Path) -> None:
    crashing = {"name": "web", "script": "echo here; exit 3"}
    with supervise(tmp_path, crashing, {"name": "calm", "script": POLITE}) as daemon:
        daemon.wait_for(lambda: daemon.said().count("ended unexpectedly") >= 5, 20, "five crashes")
    pauses = re.findall(
        r"^web ended unexpectedly \(exit code 3\); it starts again in ([\d.]+) s\.$", daemon.said(), re.MULTILINE
    )
    assert pauses[:5] == ["0.1", "0.2", "0.4", "0.4", "0.4"]
    assert daemon.said().count("web was started again.") >= 4
    assert len(pids(daemon.said())) == 1, "the other child went on undisturbed"


def test_says_which_signal_killed_a_child(tmp_path: Path) -> None:
    with supervise(tmp_path, {"name": "worker", "script": POLITE}) as daemon:
        os.kill(child_of(daemon), signal.SIGKILL)
        daemon.wait_for(lambda: len(pids(daemon.said())) == 2, 20, "a second start")
    assert "worker ended unexpectedly (killed by SIGKILL); it starts again in 0.1 s." in daemon.said()


def test_notices_the_end_of_a_child_whose_own_child_holds_the_output_open(tmp_path: Path) -> None:
    with supervise(tmp_path, {"name": "forks", "script": "sleep 3 & echo left; exit 1"}) as daemon:
        daemon.wait_for(lambda: daemon.said().count("| left") >= 2, 2.5, "a restart while the grandchild sleeps")


def test_kills_a_child_that_does_not_stop_within_its_grace(tmp_path: Path) -> None:
    with supervise(tmp_path, {"name": "deaf", "script": DEAF, "grace_seconds": 0.5}) as daemon:
        child = child_of(daemon)
        daemon.process.terminate()
        assert daemon.process.wait(10) == 0
    assert "deaf did not stop in time and was killed." in daemon.said()
    assert is_gone(child)


def test_a_second_signal_ends_the_waiting(tmp_path: Path) -> None:
    with supervise(tmp_path, {"name": "deaf", "script": DEAF, "grace_seconds": 300}) as daemon:
        child = child_of(daemon)
        daemon.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.process.wait(1)
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(10) == 0
    assert is_gone(child)


def test_killing_the_supervisor_leaves_no_child(tmp_path: Path) -> None:
    polite = {"name": "polite", "script": POLITE}
    deaf = {"name": "deaf", "script": DEAF, "death_signal": "KILL"}
    with supervise(tmp_path, polite, deaf) as daemon:
        daemon.wait_for(lambda: len(pids(daemon.said())) == 2, 20, "two children")
        children = pids(daemon.said())
        daemon.kill()
        wait_until(lambda: all(is_gone(child) for child in children), 5, "the children have ended")


def test_carries_every_line_under_its_childs_name_even_an_unfinished_last_one(tmp_path: Path) -> None:
    talk = "i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; printf unfinished; exit 1"
    with supervise(tmp_path, {"name": "talks", "script": talk}, backoff={"first": 60, "limit": 60}) as daemon:
        daemon.wait_for(lambda: "ended unexpectedly" in daemon.said(), 30, "its end")
    lines = [line for line in daemon.said().splitlines() if line.startswith("talks | ")]
    assert lines == [*(f"talks | line {number}" for number in range(20000)), "talks | unfinished"]


def test_shows_control_characters_instead_of_obeying_them(tmp_path: Path) -> None:
    hostile = r"printf 'vm-\033[2J\007\302\233.qcow2\n\377\n'; sleep 60"
    with supervise(tmp_path, {"name": "worker", "script": hostile, "grace_seconds": 1}) as daemon:
        daemon.wait_for(lambda: "xff" in daemon.said(), 20, "the line")
    assert r"worker | vm-\x1b[2J\x07\x9b.qcow2" in daemon.said()


def test_goes_on_when_nobody_reads_its_log_any_more(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = 'i=0; while :; do i=$((i+1)); echo $i; echo $i > "$COUNT"; sleep 0.02; done'
    plan = {"children": [{"name": "counts", "script": script, "environment": {"COUNT": str(count)}}]}
    argv = [sys.executable, "-m", "tests.supervisor.driver", json.dumps(plan | {"backoff": QUICK})]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        wait_until(lambda: count.exists() and int(count.read_text() or 0) > 50, 20, "the child goes on")
        assert process.poll() is None
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_ends_with_a_sentence_when_a_child_is_not_ready_in_time(tmp_path: Path) -> None:
    late = {"name": "redis", "script": POLITE, "ready_file": str(tmp_path / "never"), "ready_seconds": 0.5}
    with supervise(tmp_path, {"name": "before", "script": POLITE}, late, {"name": "after", "script": POLITE}) as daemon:
        assert daemon.process.wait(20) == 1
    assert "The redis was not ready within 0 seconds" in daemon.said() or "within 1 seconds" in daemon.said()
    assert len(pids(daemon.said())) == 2, "what comes after it was never started"
    assert all(is_gone(child) for child in pids(daemon.said()))


def test_watches_until_the_watch_has_seen_enough(tmp_path: Path) -> None:
    with supervise(tmp_path, {"name": "calm", "script": POLITE}) as daemon:
        daemon.wait_for(lambda: daemon.said().count("looked") == 3, 20, "three looks")
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.process.wait(2.5)
        assert daemon.said().count("looked") == 3


def test_survives_the_end_of_a_child_and_of_its_own_child_told_in_one_breath(tmp_path: Path) -> None:
    with supervise(tmp_path, {"name": "worker", "script": 'echo "pid $$"; sleep 0.7'}) as daemon:
        child = child_of(daemon)
        daemon.process.send_signal(signal.SIGSTOP)  # what happens now, it will hear at once
        os.kill(child, signal.SIGKILL)
        time.sleep(1)
        daemon.process.send_signal(signal.SIGCONT)
        daemon.wait_for(lambda: "worker ended unexpectedly (killed by SIGKILL)" in daemon.said(), 20, "the end is told")
        daemon.wait_for(lambda: len(pids(daemon.said())) == 2, 20, "it was started again")
        daemon.process.terminate()
        assert daemon.process.wait(20) == 0
