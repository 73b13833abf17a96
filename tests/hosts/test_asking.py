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

HANGS = """
import json, os, subprocess, sys, time
subprocess.Popen(["sleep", "40"])  # what outlives it keeps its standard error open, as what cannot be killed does
print(json.dumps({"event": "hello", "protocol": 1, "hash": sys.argv[1], "uid": 0, "python": "3"}), flush=True)
open(sys.argv[2], "w").write(str(os.getpid()))
time.sleep(60)
"""


def test_an_agent_that_gives_no_answer_holds_nobody_for_good(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HANGS, agent_bundle().hash, str(tmp_path / "pid")]
    monkeypatch.setattr(asking, "agent_command", lambda host, word: contextlib.nullcontext(argv))
    monkeypatch.setattr(asking, "ANSWER_TIMEOUT", 1.0)
    began = time.monotonic()
    with pytest.raises(HostError, match="did not answer within 1 s") as caught:
        asking.ask(Host(name="far"), "folder", {"path_b64": ""})
    assert caught.value.code == "host_unreachable"
    assert time.monotonic() - began < 20
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
