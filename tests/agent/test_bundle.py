"""The agent as one file."""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

from storage_admin.agent import bundle
from tests.agent.harness import Agent


def test_two_builds_have_the_same_bytes(tmp_path: Path) -> None:
    first, second = bundle.build(tmp_path / "a"), bundle.build(tmp_path / "b")
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.hash == second.hash == hashlib.sha256(first.path.read_bytes()).hexdigest()[:32]
    assert first.path.name == f"agent-{first.hash}.pyz"


def test_a_damaged_file_of_that_name_is_replaced(tmp_path: Path) -> None:
    built = bundle.build(tmp_path)
    whole = built.path.read_bytes()
    built.path.write_bytes(whole[:100])
    assert bundle.build(tmp_path).path.read_bytes() == whole


def test_only_its_owner_may_write_to_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        built = bundle.build(tmp_path / "new")
    finally:
        os.umask(old)
    assert built.path.stat().st_mode & 0o777 == 0o755
    assert built.path.parent.stat().st_mode & 0o077 == 0


def test_it_holds_the_agent_and_nothing_of_the_dashboard(tmp_path: Path) -> None:
    names = zipfile.ZipFile(bundle.build(tmp_path).path).namelist()
    assert {"__main__.py", "storage_admin/__init__.py", "storage_admin/agent/swap/swap.py"} <= set(names)
    assert all(name.startswith("storage_admin/agent/") for name in names if name.count("/") > 1)


def test_it_runs_alone_and_greets_with_its_hash(tmp_path: Path) -> None:
    built = bundle.build(tmp_path)
    with Agent([sys.executable, "-I", str(built.path)], env={"PYTHONPATH": ""}) as agent:
        hello = agent.until("hello")
        assert hello["hash"] == built.hash
        agent.request("recover", {"pools": []})
        assert agent.answer() == {"recovered": [], "images": [], "unread": [], "silent": [], "away": []}
