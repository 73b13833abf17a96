"""A short question to an agent, for which somebody waits in front of a page."""

import contextlib
import sys
import time
from pathlib import Path

import pytest

from storage_admin.agent.protocol import HostError
from storage_admin.hosts import asking
from storage_admin.hosts.models import Host
from storage_admin.hosts.transport import agent_bundle
from tests.working import fails_as

HANGS = """
import json, os, subprocess, sys, time
subprocess.Popen(["sleep", "40"])  # what outlives it keeps its standard error open, as what cannot be killed does
print(json.dumps({"event": "hello", "protocol": 1, "hash": sys.argv[1], "uid": 0, "python": "3"}), flush=True)
open(sys.argv[2], "w").write(str(os.getpid()))
time.sleep(60)
"""


def asked(way: str) -> None:
    host = Host(name="far")
    host.roots = dict  # type: ignore[method-assign]
    if way == "ask":
        asking.ask(host, "folder", {"path_b64": ""})
    else:
        list(asking.told(host, "folder", {"path_b64": ""}))


@pytest.mark.parametrize("way", ["ask", "told"])
def test_an_agent_that_gives_no_answer_holds_nobody_for_good(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    argv = [sys.executable, "-c", HANGS, agent_bundle().hash, str(tmp_path / "pid")]
    monkeypatch.setattr(asking, "agent_command", lambda host, word: contextlib.nullcontext(argv))
    monkeypatch.setattr(asking, "ANSWER_TIMEOUT", 1.0)
    began = time.monotonic()
    with fails_as(HostError, "host_unreachable", "did not answer within 1 s"):
        asked(way)
    assert time.monotonic() - began < 20
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


@pytest.mark.parametrize("way", ["ask", "told"])
def test_an_agent_without_root_rights_is_not_listened_to(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    greets = """import json, sys
print(json.dumps({"event": "hello", "protocol": 1, "hash": sys.argv[1], "uid": 1000, "python": "3"}), flush=True)
sys.stdin.read()"""
    argv = [sys.executable, "-c", greets, agent_bundle().hash]
    monkeypatch.setattr(asking, "agent_command", lambda host, word: contextlib.nullcontext(argv))
    with fails_as(HostError, "host_unreachable", "does not run as root"):
        asked(way)
