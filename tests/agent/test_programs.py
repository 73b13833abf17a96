"""Programs are asked for their versions once, and again when they are others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from storage_admin.agent.host import facts
from storage_admin.agent.host.facts import Programs
from storage_admin.agent.protocol import HostError
from tests.harness.filesystems import new_program
from tests.working import code_of

pytestmark = pytest.mark.qemu


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that were started."""
    started: list[str] = []
    real = subprocess.Popen

    def popen(argv: list[str], **options: object) -> subprocess.Popen[bytes]:
        started.append(argv[0])
        return real(argv, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return Path(shutil.copy2(str(shutil.which("qemu-img")), tmp_path / "qemu-img"))


def told(program: Path) -> dict[str, list[str]]:
    """What a first look tells, as it comes back with the next request."""
    programs = Programs([str(program)])
    assert programs.qemu_img(str(program))
    found: dict[str, list[str]] = json.loads(json.dumps(programs.told))
    return found


def test_one_that_is_as_it_was_is_not_asked_again(program: Path, starts: list[str]) -> None:
    before = told(program)
    assert starts == [str(program)]
    again = Programs([str(program), None], before)
    assert again.qemu_img(str(program)) == before[str(program)][1]
    assert again.qemu_img(None) is None
    assert again.told == before
    assert starts == [str(program)]


def test_another_file_of_that_name_is_asked(program: Path, starts: list[str]) -> None:
    before = told(program)
    other = program.with_name("other")
    shutil.copy2(program, other)
    other.replace(program)
    assert Programs([str(program)], before).qemu_img(str(program)) == before[str(program)][1]
    assert starts == [str(program)] * 2


def test_one_that_was_written_to_is_asked(program: Path, starts: list[str]) -> None:
    before, status = told(program), program.stat()
    with program.open("r+b") as file:
        file.write(b"\x7fELF")
    os.utime(program, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert Programs([str(program)], before).qemu_img(str(program))
    assert starts == [str(program)] * 2


def test_a_script_is_asked_each_time_as_it_may_start_anything(tmp_path: Path, starts: list[str]) -> None:
    script = new_program(tmp_path / "qemu-img", "#!/bin/sh\necho qemu-img version 6.2.0\n")
    programs = Programs([str(script)])
    assert (programs.qemu_img(str(script)), programs.told) == ("6.2.0", {})
    assert Programs([str(script)], programs.told).qemu_img(str(script)) == "6.2.0"
    assert len(starts) == 2


def test_one_whose_child_keeps_its_output_open_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "ANSWER_LIMIT", 0.5)
    script = new_program(tmp_path / "qemu-img", "#!/bin/sh\nsleep 20 &\nsleep 20\n")
    began = time.monotonic()
    with pytest.raises(HostError):
        Programs([str(script)]).qemu_img(str(script))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("known", [None, [], {"": 1}, {"qemu-img": None}, {"qemu-img": ["x"]}, {"qemu-img": [1, 2]}])
def test_what_is_no_earlier_answer_counts_for_nothing(program: Path, known: object, starts: list[str]) -> None:
    if isinstance(known, dict):
        known = {str(program): value for value in known.values()}
    assert Programs([str(program)], known).qemu_img(str(program))
    assert starts == [str(program)]


@pytest.mark.parametrize("words", ["echo no idea", "echo version 7.2.0; exit 3", "echo version 7.2.0 >&2"])
def test_a_qemu_img_that_does_not_say_its_version_is_an_error(tmp_path: Path, words: str) -> None:
    script = new_program(tmp_path / "qemu-img", f"#!/bin/sh\n{words}\n")
    assert code_of(HostError, Programs([str(script)]).qemu_img, str(script)) == "tool_failed"


@pytest.mark.parametrize(("exits", "answer"), [(0, True), (1, False)])
def test_whether_it_compresses_with_zstd_is_tried_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: int, answer: bool
) -> None:
    script = new_program(tmp_path / "qemu-img", f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit {exits}\n')
    monkeypatch.setattr(facts, "_stamp", lambda path: "the same file")
    first = Programs([])
    assert first.zstd(str(script)) is answer
    assert Programs([], first.told).zstd(str(script)) is answer
    assert len((tmp_path / "asked").read_text().splitlines()) == 1
    assert Programs([]).zstd(None) is None


def test_the_qemu_img_of_this_machine_compresses_with_zstd(program: Path) -> None:
    assert Programs([]).zstd(str(program))
