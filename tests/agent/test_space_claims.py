"""Agents of one machine that look for space at the same time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.host import locking, space
from storage_admin.agent.host.space import Others, Reserve, SpaceClaim
from storage_admin.agent.protocol import RefusedError
from tests.agent.harness import Agent, ask, held_open, make_image, reclaim_args
from tests.harness.filesystems import loop_filesystem, new_file

#: Another agent: it claims, says so, and does what it reads.
OTHER = """
import os, sys, time
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.host import space
from storage_admin.agent.host.space import Others, SpaceClaim
folder, place, job, needed, kept, pause = sys.argv[1:]
require = space.require
def slowly(*given):  # as on a machine that is busy between the look and the claim
    require(*given)
    time.sleep(float(pause))
space.require = slowly
with SpaceClaim(job, os.open(place, os.O_RDONLY), folder) as claim:
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            if line == "take\\n":
                claim.take(int(needed), space.Reserve(0.0, int(kept)), Others())
            else:
                claim.left(int(line))
            print("done", flush=True)
        except RefusedError as error:
            print(error.code, flush=True)
"""


Another = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[int]:
    with held_open(tmp_path) as fd:
        yield fd


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "claims")


@pytest.fixture
def another(tmp_path: Path, folder: str) -> Iterator[Another]:
    started: list[subprocess.Popen[str]] = []

    def start(
        job: str, needed: int, place: Path = tmp_path, kept: int = 0, pause: float = 0.0
    ) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", OTHER, folder, str(place), job, str(needed), str(kept), str(pause)]
        other = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(other)
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        return other

    yield start
    for one in started:
        with one:
            one.kill()


def say(other: subprocess.Popen[str], word: object) -> str:
    assert other.stdin is not None
    assert other.stdout is not None
    print(word, file=other.stdin, flush=True)
    return other.stdout.readline().strip()


def all_but(place: int, size: int) -> Reserve:
    """A reserve that leaves ``size`` bytes of what is free, or a little less where somebody else writes meanwhile."""
    return Reserve(0.0, space.space(place).available_bytes - size)


GIB = 1 << 30


def names(folder: Path | str) -> list[str]:
    return [path.name for path in Path(folder).iterdir() if not path.name.startswith(".")]


def test_what_another_agent_has_yet_to_write_is_not_free(place: int, folder: str, another: Another) -> None:
    other = another("a", 3 * GIB)
    assert say(other, "take") == "done"
    with SpaceClaim("b", place, folder) as claim:
        with pytest.raises(RefusedError, match="not_enough_space"):
            claim.take(2 * GIB, all_but(place, 4 * GIB), Others())
        say(other, GIB)
        claim.take(2 * GIB, all_but(place, 4 * GIB), Others())


def test_the_agents_own_word_counts_instead_of_the_controllers(place: int, folder: str, another: Another) -> None:
    other = another("a", 3 * GIB)
    say(other, "take")
    say(other, 0)
    with SpaceClaim("b", place, folder) as claim:
        claim.take(2 * GIB, all_but(place, 4 * GIB), Others(here={"a": 3 * GIB}))
        with pytest.raises(RefusedError, match="not_enough_space"):
            claim.take(2 * GIB, all_but(place, 4 * GIB), Others(elsewhere={"far": 3 * GIB}))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_claim_ends_with_its_agent(place: int, folder: str, another: Another, end: signal.Signals | None) -> None:
    other = another("a", 3 * GIB)
    say(other, "take")
    if end is None:
        assert other.stdin is not None
        other.stdin.close()
    else:
        other.send_signal(end)
    other.wait()
    with SpaceClaim("b", place, folder) as claim:
        claim.take(2 * GIB, all_but(place, 4 * GIB), Others())
        assert names(folder) == [f"b.{os.getpid()}"]
    assert names(folder) == []


def test_another_filesystem_is_another_matter(place: int, folder: str, another: Another) -> None:
    say(another("a", 3 * GIB, place=Path("/proc")), 3 * GIB)
    assert len(names(folder)) == 1
    with SpaceClaim("b", place, folder) as claim:
        claim.take(2 * GIB, all_but(place, 4 * GIB), Others())


def test_of_twenty_that_look_at_once_only_as_many_begin_as_fit(place: int, another: Another) -> None:
    kept = space.space(place).available_bytes - int(5.5 * GIB)
    others = [another(f"job{number}", GIB, kept=kept, pause=0.02) for number in range(20)]
    for other in others:
        assert other.stdin is not None
        print("take", file=other.stdin, flush=True)
    answers = [other.stdout.readline().strip() for other in others if other.stdout is not None]
    assert sorted(answers) == ["done"] * 5 + ["not_enough_space"] * 15


@pytest.mark.parametrize("how", ["a file", "a link", "of somebody else", "open to all", "no such place"])
def test_a_folder_that_others_write_to_is_not_asked(tmp_path: Path, place: int, how: str) -> None:
    folder = tmp_path / "claims"
    folder.mkdir(0o700)
    (folder / "a.1").write_text(f"{space._filesystem(place)} {8 * GIB}".ljust(64))
    held = os.open(folder / "a.1", os.O_RDONLY)
    locking.take_file(held, 0.0)
    given: Any = folder
    if how == "a file":
        given = new_file(tmp_path / "file", "")
    elif how == "a link":
        given = tmp_path / "link"
        given.symlink_to(folder)
    elif how == "of somebody else":
        os.chown(folder, 65534, 65534)
    elif how == "open to all":
        folder.chmod(0o777)
    else:
        given = tmp_path / "none" / "below"
    with SpaceClaim("b", place, str(given)) as claim:
        claim.take(2 * GIB, all_but(place, 4 * GIB), Others())
        with pytest.raises(RefusedError, match="not_enough_space"):
            claim.take(2 * GIB, all_but(place, 4 * GIB), Others(here={"told": 3 * GIB}))
    os.close(held)
    assert names(folder) == ["a.1"]


@pytest.mark.parametrize("text", ["", "x", "1", "1 2 3", "\0" * 64, "9" * 5000])
def test_a_file_that_says_nothing_is_passed_over(tmp_path: Path, place: int, text: str) -> None:
    folder = tmp_path / "claims"
    folder.mkdir(0o700)
    (folder / "a.1").write_text(text)
    (folder / "pipe.1").mkdir()
    os.mkfifo(folder / "fifo.1")
    with held_open(folder / "a.1") as held:
        locking.take_file(held, 0.0)
        with SpaceClaim("b", place, str(folder)) as claim:
            claim.take(2 * GIB, all_but(place, 4 * GIB), Others())


def test_an_agent_that_stands_still_while_it_looks_is_not_waited_for_for_ever(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "PATIENCE", 0.2)
    folder = tmp_path / "claims"
    folder.mkdir(0o700)
    lock = new_file(folder / f".{space._filesystem(place)}.lock")
    with held_open(lock) as stopped:
        assert locking.take_file(stopped, 0.0)
        with SpaceClaim("b", place, str(folder)) as claim:
            claim.take(2 * GIB, all_but(place, 4 * GIB), Others())
            assert len(names(folder)) == 1


@pytest.mark.qemu
def test_a_rewrite_claims_what_it_writes_until_it_is_written(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path, 128) as disk:
        images = [disk / "a.qcow2", disk / "b.qcow2"]
        for image in images:
            make_image(image)
        args = [reclaim_args(image, method="copy", undo_hours=0.0) for image in images]
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        with Agent() as first:
            first.request("reclaim", {**args[0], "bandwidth_bytes_sec": 64 << 10}, "first")
            needed = first.until("space")["needed_bytes"]
            first.until("progress", stage="copying")
            # Room for one and a half of them.
            args[1]["reserve"] = {"percent": 0, "bytes": free - needed * 3 // 2}
            answer = ask("reclaim", args[1], "second")
            written = (disk / ".sa-first.new").stat().st_blocks * 512
            assert answer.get("code") == "not_enough_space", answer
            assert written < needed // 3, "it was not slow enough to say anything"
            first.say("cancel")
            assert first.answer()["code"] == "cancelled"
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        args[1]["reserve"] = {"percent": 0, "bytes": free - needed * 3 // 2}
        assert ask("reclaim", args[1], "second")["swapped"]
    assert not [name for name in names(space.FOLDER) if name.startswith(("first.", "second."))]
