"""A door before a file, and who waits at it."""

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from storage_admin.agent.host import locking, priority
from storage_admin.agent.host.open_gate import Door, shut_alone
from tests.agent.harness import ROOT, held_open
from tests.agent.test_analyze import priorities
from tests.harness.filesystems import new_file
from tests.harness.processes import running

OPENER = "import os, sys; os.open(sys.argv[-2], eval(sys.argv[-1])); print('in', flush=True); sys.stdin.read()"


class Opener:
    """Another process that opens a file and holds it until it is left."""

    def __init__(self, path: Path, flags: str, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OPENER, *words, path, flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait_until_in(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"in\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return new_file(tmp_path / "file", b"content")


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    # As the agent does: who comes while a lease is asked for makes the kernel say so.
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with held_open(path, os.O_RDWR) as descriptor:
        yield descriptor
    signal.signal(signal.SIGIO, before)


@pytest.mark.parametrize(
    "flags", ["os.O_RDONLY", "os.O_RDWR", "os.O_RDONLY | os.O_NONBLOCK", "os.O_WRONLY | os.O_TRUNC"]
)
def test_whoever_opens_the_file_waits_until_the_door_opens(path: Path, fd: int, flags: str) -> None:
    door = shut_alone(fd)
    assert door is not None
    assert not door.knocked()
    with Opener(path, flags) as opener:
        assert door.knocked(20)
        time.sleep(0.2)
        assert path.stat().st_size == 7  # and nothing is cut off while he waits
        door.open()
        opener.wait_until_in()


@pytest.mark.parametrize("flags", ["os.O_RDONLY", "os.O_RDWR"])
def test_it_does_not_shut_before_a_file_that_somebody_has_open(path: Path, fd: int, flags: str) -> None:
    os.link(path, path.with_name("another name"))
    with Opener(path.with_name("another name"), flags) as opener:
        opener.wait_until_in()
        assert shut_alone(fd) is None
    door = shut_alone(fd)
    assert door is not None
    door.open()


def test_a_mapping_counts_as_open(path: Path, fd: int) -> None:
    own = os.open(path, os.O_RDWR)
    with mmap.mmap(own, 0):
        os.close(own)
        assert shut_alone(fd) is None


def test_without_leases_the_tables_of_processes_tell(path: Path, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No local filesystem here is without leases: it is told that this one is."""
    monkeypatch.setattr(locking, "is_leased", lambda fd, kind: None)
    monkeypatch.setattr(locking, "open_for_writing", lambda fd: False)
    with Opener(path, "os.O_RDWR") as opener:
        opener.wait_until_in()
        assert shut_alone(fd) is None
    door = shut_alone(fd)
    assert door is not None
    door.open()


def test_no_lease_is_left(path: Path, fd: int) -> None:
    door = shut_alone(fd)
    assert door is not None
    assert fcntl.fcntl(fd, 1025) == fcntl.F_UNLCK
    door.open()


def test_the_door_of_a_process_that_is_killed_is_open(path: Path) -> None:
    program = (
        "import os, sys, time; from storage_admin.agent.host.open_gate import shut_alone\n"
        "door = shut_alone(os.open(sys.argv[1], os.O_RDWR)); print('shut', flush=True); time.sleep(60)"
    )
    shuts = running([sys.executable, "-c", program, path], b"shut\n", cwd=ROOT)
    with shuts as keeper, Opener(path, "os.O_RDWR") as opener:
        time.sleep(0.2)
        keeper.kill()
        opener.wait_until_in()


def test_other_files_have_no_door(path: Path, fd: int) -> None:
    other = new_file(path.with_name("other"), b"")
    door = Door(fd)
    assert other.read_bytes() == b""
    assert not door.knocked()
    door.open()


@pytest.mark.parametrize(
    ("flags", "words", "stranger"),
    [
        ("os.O_RDONLY", ["/somewhere/agent-0.pyz"], False),
        ("os.O_RDWR", ["/somewhere/agent-0.pyz"], True),
        ("os.O_RDONLY", [], True),
    ],
    ids=["another agent reads", "another agent writes", "a stranger reads"],
)
@pytest.mark.parametrize("let_in", [True, False])
def test_another_agent_that_only_reads_is_no_stranger_and_waits_like_everybody(
    path: Path, fd: int, monkeypatch: pytest.MonkeyPatch, flags: str, words: list[str], stranger: bool, let_in: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/agent-0.pyz"])
    door = shut_alone(fd)
    assert door is not None
    with Opener(path, flags, *words) as opener:
        assert door.knocked(20)
        assert door.stranger_knocked(0.3) is stranger
        assert not door.knocked(), "it was heard"
        if not let_in:
            door.turn_away(0.1)
        door.open()
        assert opener.process.stdout is not None
        assert opener.process.stdout.readline() == (b"in\n" if let_in else b"")


def test_idle_work_is_idle_and_then_as_before() -> None:
    before = priorities()
    with priority.idle(True):
        assert priorities() == (19, 3 << 13)
    assert priorities() == before
    with priority.idle(False):
        assert priorities() == before
