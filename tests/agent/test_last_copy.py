"""When the agent removes an undo copy that nobody asked it to remove."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.measure.likeness import likeness
from storage_admin.agent.protocol import Moment
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.swap import moment
from storage_admin.agent.verbs import undo
from tests.agent.harness import (
    age,
    ask,
    make_image,
    qemu_img,
    reclaim_args,
    undo_args,
    write,
    written_with_its_times_set_back,
)
from tests.agent.recording import GoIO, RecordingIO, request
from tests.agent.test_replace import replace_args
from tests.harness.filesystems import new_file
from tests.working import refused_as

pytestmark = pytest.mark.qemu

DAY = 24 * 3600.0
NOW = [[3600, 0]]


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image that was reclaimed by job j1, which keeps the original for a day."""
    path = make_image(tmp_path / "vm.qcow2")
    assert ask("reclaim", reclaim_args(path))["swapped"]
    return path


def removal(image: Path, **changes: Any) -> str:
    """What came of a removal by itself: a code, or nothing where the copy is gone."""
    answer = ask("discard_undo", undo_args(image, **{"by_itself": True, "used": NOW, **changes}), job="d1")
    assert (image.parent / ".sa-j1.orig").exists() == ("code" in answer), answer
    return str(answer.get("code", ""))


def passes(image: Path, *, boottime: float, wall: float) -> None:
    age(image.parent / ".sa-j1.journal", boottime=boottime, wall=wall)


def boots(image: Path) -> None:
    """The host was booted since the job."""
    journal = image.parent / ".sa-j1.journal"
    journal.write_text(journal.read_text().replace(Moment.now().boot_id, "an-earlier-boot"))


def test_a_window_that_has_not_passed_on_the_host_has_not_ended_whatever_a_clock_says(image: Path) -> None:
    assert removal(image) == "clock_unsure"
    passes(image, boottime=DAY - 3600, wall=DAY + 25 * 3600)
    assert removal(image) == "clock_unsure"
    assert removal(image, force=True) == "clock_unsure"
    passes(image, boottime=3600, wall=0)
    assert removal(image) == ""


def test_who_asks_for_it_needs_no_window(image: Path) -> None:
    assert removal(image, by_itself=False) == ""


def test_a_host_that_was_booted_since_goes_by_what_the_controller_has_counted(image: Path) -> None:
    boots(image)
    assert removal(image) == ""


@pytest.mark.parametrize("hours", [25, -25])
def test_nobody_can_tell_when_an_image_was_changed_while_the_hosts_clock_is_wrong(image: Path, hours: int) -> None:
    write(image, 0x44, "1M", "64k")
    passes(image, boottime=DAY, wall=DAY + hours * 3600)
    assert removal(image) == "clock_unsure"
    passes(image, boottime=0, wall=-hours * 3600)
    assert removal(image) == ""


def test_what_nobody_changed_needs_no_clock(image: Path) -> None:
    passes(image, boottime=DAY, wall=DAY + 25 * 3600)
    assert removal(image, used=None) == ""


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """A raw image that job j1 made of another one a day ago."""
    assert ask("convert", replace_args(make_image(tmp_path / "vm.qcow2"), form="raw"))["swapped"]
    passes(tmp_path / "vm.raw", boottime=DAY, wall=DAY)
    return tmp_path / "vm.raw"


def test_what_a_conversion_made_and_nobody_changed_needs_no_guests_times_either(converted: Path) -> None:
    assert removal(converted, used=None) == ""


def test_the_copy_of_a_conversion_is_compared_with_the_other_format(converted: Path) -> None:
    write(converted, 0x21, "0", "2M", "raw")
    assert removal(converted) == "undo_kept"
    write(converted, 0x61, "0", "1500k", "raw")
    assert removal(converted) == ""


def test_a_later_jobs_copy_is_what_the_earlier_job_made(image: Path) -> None:
    write(image, 0x55, "4M", "1M")
    assert ask("reclaim", reclaim_args(image), job="j2")["swapped"]
    passes(image, boottime=DAY, wall=DAY)
    assert removal(image) == ""
    assert (image.parent / ".sa-j2.orig").exists()


def test_a_later_jobs_copy_that_somebody_wrote_to_does_not_speak_for_the_image(image: Path) -> None:
    write(image, 0x55, "4M", "1M")
    assert ask("reclaim", reclaim_args(image), job="j2")["swapped"]
    passes(image, boottime=DAY, wall=DAY)
    os.utime(image.parent / ".sa-j2.orig")
    assert removal(image) == "undo_kept"


def test_a_copy_that_was_written_to_with_its_times_set_back_stays(image: Path) -> None:
    passes(image, boottime=DAY, wall=DAY)
    written_with_its_times_set_back(image.parent / ".sa-j1.orig")
    assert removal(image) == "undo_written_to"
    assert removal(image, by_itself=False) == ""


def test_a_copy_that_only_an_undo_moved_which_was_taken_back_goes(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = image.parent / ".sa-j1.orig"
    before = copy.stat()
    monkeypatch.setattr(moment, "late", lambda *_: "somebody")
    assert refused_as(undo.run, request("undo", **undo_args(image)), GoIO()) == "image_in_use"
    after = copy.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert after.st_ctime_ns > before.st_ctime_ns
    passes(image, boottime=DAY, wall=DAY)
    assert removal(image) == ""


@pytest.mark.parametrize(("used", "seen"), [([[1]], []), ([["a", "b"]], []), (NOW, [[1, 2]]), ("x", []), (NOW, 1)])
def test_times_that_are_none_are_refused(image: Path, used: Any, seen: Any) -> None:
    assert removal(image, used=used, seen=seen) == "invalid"


@pytest.mark.parametrize("line", ['{"step":"made"}', '{"step":"made","inode":1,"was":"qcow2","format":"qcow2"}'])
def test_a_journal_that_says_nonsense_of_what_was_made_keeps_the_copy(image: Path, line: str) -> None:
    passes(image, boottime=DAY, wall=DAY)
    with (image.parent / ".sa-j1.journal").open("a") as journal:
        journal.write(line + "\n")
    assert removal(image) == "undo_kept"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["qcow2", "raw", "vmdk", "vdi", "vpc", "vhdx", "qed"])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_blocks_of_every_format_are_compared_as_a_guest_reads_them(tmp_path: Path, form: str, share: float) -> None:
    draw, size = random.Random(form), 8 << 20
    content = bytearray(draw.randbytes(size // 2) + bytes(size // 2))
    paths = []
    for name in ("copy", "image"):
        raw = new_file(tmp_path / name, content)
        paths.append(tmp_path / f"{name}.{form}")
        qemu_img("convert", "-f", "raw", "-O", form, *(["-c"] if form == "qcow2" else []), raw, paths[-1])
        changed = int(size // 2 * share)
        content[:changed] = draw.randbytes(changed)
    with paths[0].open("rb") as copy, paths[1].open("rb") as image:
        nodes = [Node(file.fileno(), form, b"x") for file in (copy, image)]
        found = likeness(RecordingIO(), nodes[0], nodes[1], draw)
    assert found.looked_at == 64
    assert abs(found.equal / 64 - (1 - share)) <= (0.2 if 0 < share < 1 else 0)
    assert found.half == (share < 0.5)


def test_of_a_copy_without_data_nothing_can_be_lost(tmp_path: Path) -> None:
    qemu_img("create", "-q", "-f", "qcow2", tmp_path / "a", "8M")
    with (tmp_path / "a").open("rb") as file:
        node = Node(file.fileno(), "qcow2", b"a")
        found = likeness(RecordingIO(), node, node)
    assert (found.looked_at, found.half) == (0, True)
