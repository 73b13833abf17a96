"""How tools are run: from one thread, under limits, and never longer than the work lasts."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HostError, RefusedError, StoppedError
from tests.agent.harness import ROOT
from tests.agent.recording import RecordingIO, cancel
from tests.harness.processes import wait_until


class Recorder(RecordingIO):
    """A controller that stops the work after some looks; nothing but commands is told of tools."""

    def __init__(self, looks: int = 1_000_000) -> None:
        super().__init__(lambda: cancel() if self.checks > looks else None)

    def emit(self, kind: str, /, **fields: Any) -> None:
        assert kind == "command", kind
        super().emit(kind, **fields)

    def emit_raw(self, line: bytes) -> None:
        raise AssertionError(line)

    @property
    def commands(self) -> list[tuple[list[str], int | None]]:
        return [(event["argv"], event["exit_code"]) for event in self.events]


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.name() in {"sleep", "sh"}]


def test_tells_exit_code_and_output() -> None:
    io = Recorder()
    done = tools.run(["sh", "-c", "echo out; echo err >&2; exit 3"], io)
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    assert io.commands == [(["sh", "-c", "echo out; echo err >&2; exit 3"], 3)]
    assert done.words() == "exit code 3: err"


def test_a_tool_gets_no_standard_input_and_a_plain_language() -> None:
    done = tools.run(["sh", "-c", "cat; echo $LC_ALL"], Recorder())
    assert done.stdout == b"C\n"


def test_a_stop_ends_the_tool_and_what_it_started() -> None:
    io = Recorder(looks=2)
    began = time.monotonic()
    with pytest.raises(StoppedError):
        tools.run(["sh", "-c", "sleep 60 & sleep 60; wait"], io)
    assert time.monotonic() - began < 3
    assert children() == []
    assert io.commands[0][1] is None
    assert tools.running == set()


def test_what_the_watch_raises_ends_the_tool() -> None:
    def watch() -> None:
        raise RefusedError("image_in_use", "a guest has started")

    with pytest.raises(RefusedError):
        tools.run(["sleep", "60"], Recorder(), limits=None, watch=watch)
    assert children() == []


def test_many_tools_run_a_few_at_a_time_and_answer_in_their_order() -> None:
    io, said, most = Recorder(), [], []
    script = "sleep $((6 - $1))e-1; echo $1; exit $((10 + $1))"
    done = tools.run_all(
        [["sh", "-c", script.replace("$1", str(number))] for number in range(6)],
        io,
        at_once=2,
        on_output=lambda number, chunk: said.append((number, int(chunk))),
        watch=lambda: most.append(len(tools.running)),
    )
    assert [one.exit_code for one in done] == [10, 11, 12, 13, 14, 15]
    assert sorted(said) == [(number, number) for number in range(6)]
    assert max(most) == 2
    assert [code for _, code in io.commands] == [10, 11, 12, 13, 14, 15]
    assert not tools.running


def test_many_tools_may_be_told_as_one_command() -> None:
    io = Recorder()
    tools.run_all([["true"], ["sh", "-c", "exit 3"], ["true"]], io, at_once=2, shown=["all", "three"])
    assert io.commands == [(["all", "three"], 3)]


def test_a_stop_ends_all_tools_at_work_and_starts_no_more() -> None:
    io = Recorder(looks=3)
    with pytest.raises(StoppedError):
        tools.run_all([["sleep", "600"], ["sleep", "601"], ["sleep", "602"]], io, at_once=2)
    assert io.commands == [(["sleep", "600"], None), (["sleep", "601"], None)]
    assert not children()
    assert not tools.running


def test_a_tool_dies_with_its_agent() -> None:
    program = (
        "from tests.agent.test_tools import Recorder; from storage_admin.agent.programs import tools\n"
        "tools.run(['sh', '-c', 'echo $$ >&2; exec sleep 60 2>&1'], Recorder(), limits=None)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as agent:
        below = psutil.Process(agent.pid).children
        wait_until(lambda: "sleep" in [process.name() for process in below()], 20, "it has started")
        started = below()
        os.kill(agent.pid, signal.SIGKILL)
    assert psutil.wait_procs(started, timeout=2)[1] == []


def test_a_query_may_not_last_longer_than_its_limit() -> None:
    with pytest.raises(HostError, match="longer"):
        tools.run(["sleep", "60"], Recorder(), limits=tools.Limits(wall_seconds=0.5))
    assert children() == []


def test_a_query_may_not_say_more_than_its_limit() -> None:
    with pytest.raises(HostError, match="more"):
        tools.run(["sh", "-c", "yes"], Recorder(), limits=tools.Limits(output_bytes=100_000))


def test_a_query_may_not_take_more_memory_than_its_limit() -> None:
    hungry = [sys.executable, "-c", "x = bytearray(1 << 30)"]
    limited = tools.run(hungry, Recorder(), limits=tools.Limits(address_space=512 << 20))
    assert limited.exit_code == 1
    assert b"MemoryError" in limited.stderr


def test_a_query_may_not_take_more_processor_time_than_its_limit() -> None:
    busy = [sys.executable, "-c", "while True: pass"]
    assert tools.run(busy, Recorder(), limits=tools.Limits(cpu_seconds=1)).exit_code < 0


def test_of_a_long_tool_only_the_end_of_what_it_says_is_kept() -> None:
    done = tools.run(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo end"], Recorder(), limits=None)
    assert done.stdout.endswith(b"xend\n")
    assert len(done.stdout) <= 2 * tools.TAIL_BYTES


def test_idle_work_takes_the_disk_when_nobody_else_wants_it() -> None:
    assert tools.run(["ionice"], Recorder(), idle_io=True).stdout == b"idle\n"
    assert tools.run(["nice"], Recorder(), idle_io=True).stdout == b"19\n"
    assert tools.run(["ionice"], Recorder()).stdout != b"idle\n"


def test_a_missing_tool_is_named() -> None:
    with pytest.raises(RefusedError, match="no-such-tool") as error:
        tools.run(["no-such-tool"], Recorder())
    assert error.value.code == "tool_missing"


def test_output_with_escapes_and_bytes_is_shown_as_plain_text() -> None:
    done = tools.run(["sh", "-c", "printf 'bad \\033[31m\\377 name' >&2; exit 1"], Recorder())
    assert done.words() == "exit code 1: bad \\x1b[31m\\xff name"
