"""The agent's line to its controller, with the real agent at the other end."""

import os
import signal
import threading
import time

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.lifeline import Lifeline
from storage_admin.agent.protocol import StoppedError
from tests.agent.harness import Agent, ask, heard
from tests.working import code_of


class Line:
    """Both ends of a lifeline within one process."""

    def __init__(self, **limits: float) -> None:
        self.theirs_in, ours_out = os.pipe()
        ours_in, self.theirs_out = os.pipe()
        self._fds = [self.theirs_in, ours_out, ours_in, self.theirs_out]
        self.lifeline = Lifeline(ours_in, ours_out, **limits)

    def say(self, kind: str, **fields: object) -> None:
        os.write(self.theirs_out, protocol.encode(kind, **fields))

    def hear(self) -> list[dict[str, object]]:
        os.set_blocking(self.theirs_in, False)
        try:
            return [protocol.decode(line) for line in os.read(self.theirs_in, 1 << 20).splitlines()]
        except BlockingIOError:
            return []


def stopped(lifeline: Lifeline, within: float = 5.0) -> StoppedError:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            lifeline.check()
        except StoppedError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("it goes on")


def test_greets_before_it_is_asked() -> None:
    with Agent() as agent:
        hello = agent.next()
        assert hello is not None
        assert hello["event"] == "hello"
        assert hello["protocol"] == protocol.VERSION
        assert hello["uid"] == os.geteuid()
        agent.say(protocol.CANCEL)


@pytest.mark.parametrize(
    ("verb", "job"), [("format_everything", "j1"), ("recover", "../etc"), ("recover", ""), ("recover", "a" * 41)]
)
def test_refuses_an_unknown_verb_and_an_id_that_is_no_name(verb: str, job: str) -> None:
    assert ask(verb, {"pools": []}, job)["code"] == "invalid"


def test_answers_a_line_that_is_no_request() -> None:
    with Agent() as agent:
        assert agent.process.stdin is not None
        agent.process.stdin.write(b"GET / HTTP/1.0\n")
        agent.process.stdin.flush()
        assert agent.answer()["code"] == "invalid"
        assert agent.close() == 0


def test_the_end_of_the_line_before_a_request_ends_the_agent() -> None:
    agent = Agent()
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.answer()["code"] == "interrupted"
    assert agent.process.wait(5) == 0


def test_a_signal_is_an_interruption() -> None:
    with Agent() as agent:
        agent.until("hello")
        agent.process.send_signal(signal.SIGTERM)
        assert agent.answer()["code"] == "interrupted"


def test_a_bug_is_called_one_and_shows_its_traceback() -> None:
    program = (
        "import sys; from storage_admin.agent import main\n"
        "main.load = lambda verb: lambda request, io: {}['nothing']\nsys.exit(main.main())"
    )
    answer, events = heard("scan", {}, command=[*Agent.python(), "-c", program])
    assert answer["code"] == "bug"
    assert any("KeyError" in event.get("text", "") for event in events)


def test_cancel_stops_the_work() -> None:
    line = Line()
    line.say("request", verb="x", job="j", generation=1, args={})
    line.lifeline.read_request()
    line.lifeline.check()
    line.say("cancel")
    assert stopped(line.lifeline).code == "cancelled"


def test_the_end_of_the_line_stops_the_work() -> None:
    line = Line()
    os.close(line.theirs_out)
    assert stopped(line.lifeline).code == "interrupted"


def test_silence_stops_the_work_and_a_ping_does_not_let_it_come_to_that() -> None:
    line = Line(silence_limit=0.5)
    line.say("request", verb="x", job="j", generation=1, args={})
    for _ in range(8):
        time.sleep(0.1)
        line.say("ping")
        line.lifeline.check()
    assert stopped(line.lifeline).code == "interrupted"


def test_a_ping_while_the_request_is_gathered_is_not_taken_for_one() -> None:
    line = Line(silence_limit=0.5)
    for _ in range(8):
        time.sleep(0.1)
        line.say("ping")
    line.say("request", verb="x", job="j", generation=1, args={})
    assert line.lifeline.read_request().verb == "x"


def test_go_is_taken_only_after_ready_and_only_for_this_generation() -> None:
    line = Line(go_limit=1.0)
    line.say("request", verb="x", job="j", generation=3, args={})
    line.lifeline.read_request()
    line.say("go", generation=3)
    time.sleep(0.2)
    assert code_of(StoppedError, line.lifeline.wait_for_go, 3) == "no_go"

    threading.Timer(0.2, line.say, ["go"], {"generation": 2}).start()
    assert code_of(StoppedError, line.lifeline.wait_for_go, 3) == "no_go"

    threading.Timer(0.2, line.say, ["go"], {"generation": 3}).start()
    line.lifeline.wait_for_go(3)


def test_a_cancel_instead_of_go_is_a_cancel() -> None:
    line = Line()
    line.say("request", verb="x", job="j", generation=1, args={})
    threading.Timer(0.2, line.say, ["cancel"]).start()
    assert code_of(StoppedError, line.lifeline.wait_for_go, 1) == "cancelled"


def test_a_controller_that_does_not_listen_does_not_hold_the_agent_for_ever() -> None:
    line = Line(silence_limit=0.5)
    assert code_of(StoppedError, line.lifeline.emit, "log", text="x" * 1_000_000) == "interrupted"


def test_a_broken_line_out_stops_the_work() -> None:
    line = Line()
    os.close(line.theirs_in)
    with pytest.raises(StoppedError):
        line.lifeline.log("is anybody there")
    assert stopped(line.lifeline).code == "interrupted"


def test_progress_is_throttled_and_its_end_is_always_told() -> None:
    line = Line()
    for done in range(1001):
        line.lifeline.progress("copying", done, 1000)
    told = [event["done"] for event in line.hear()]
    assert told[0] == 0
    assert told[-1] == 1000
    assert len(told) < 10


def test_many_raw_events_are_written_together_and_none_is_lost() -> None:
    line = Line()
    for number in range(500):
        line.lifeline.emit_raw(protocol.encode("image", number=number))
    line.lifeline.emit("log", text="end")
    assert [event.get("number") for event in line.hear()] == [*range(500), None]
