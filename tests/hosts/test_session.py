"""Agents that do not read what they are sent: nobody waits for them for ever."""

import sys
import time
from collections.abc import Iterator

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.protocol import HostError, Request
from storage_admin.hosts import session
from storage_admin.hosts.session import AgentSession, UngreetedError

LARGE = Request("scan", "j1", 1, {"known": "x" * (3 << 20)})
HELLO = protocol.encode(protocol.HELLO, protocol=protocol.VERSION, hash="h").decode()
GREETS = f"import sys, time\nprint({HELLO!r}, flush=True)\n"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HELLO_TIMEOUT", "STOP_TIMEOUT", "UNGREETED_END_TIMEOUT", "END_TIMEOUT"):
        monkeypatch.setattr(session, name, 1.0)
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 12


@pytest.mark.parametrize(
    "program", ["import time; time.sleep(30)", f"{GREETS}time.sleep(30)"], ids=["silent", "greets"]
)
def test_one_that_does_not_read_its_request_is_given_up(program: str) -> None:
    with AgentSession([sys.executable, "-c", program], "h") as agent:
        agent.send(LARGE)
        with pytest.raises(HostError) as failed:
            list(agent.events())
    assert isinstance(failed.value, UngreetedError) == ("print" not in program)
    assert failed.value.code == protocol.INTERRUPTED


def test_one_that_reads_slowly_gets_all_of_it() -> None:
    program = f"{GREETS}while sys.stdin.buffer.read1(1 << 18): time.sleep(0.3)"
    with AgentSession([sys.executable, "-c", program], "h") as agent:
        agent.send(LARGE)
        assert next(one for one in agent.events() if one)["event"] == protocol.HELLO
        agent.feed(b"x" * (2 << 20))
        agent.cancel()
        assert not agent._deaf_for


def test_one_that_reads_no_more_is_told_to_stop_at_once_and_given_up() -> None:
    with AgentSession([sys.executable, "-c", f"{GREETS}time.sleep(30)"], "h") as agent:
        agent.feed(b"x" * (2 << 20))
        began = time.monotonic()
        agent.cancel()
        assert time.monotonic() - began < 0.5
        with pytest.raises(HostError) as failed:
            list(agent.events())
    assert failed.value.code == protocol.INTERRUPTED
