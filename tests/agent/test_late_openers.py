"""Who opens an image by its name in the moment before that goes: what he writes is not lost."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import ROOT, ask, heard, leftovers, overwrite, reclaim_args, undo_args
from tests.agent.test_replace import replace_args
from tests.harness.filesystems import new_file

pytestmark = pytest.mark.qemu

DRIVER = str(ROOT / "tests" / "faults" / "attacked.py")
NEVER = "1000000"

#: Opens the original in the moment when that has lost its name, as who found it there just before; says which file that
#: is, has written to it, and stays for a while.
_OPENER = """
import os, sys, time
folder, inode, stay = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
found, until = None, time.monotonic() + 30
while found is None and time.monotonic() < until:
    for name in (".sa-j1.new", ".sa-j1.orig"):
        try:
            if os.stat(folder + "/" + name).st_ino == inode:
                found = folder + "/" + name
        except FileNotFoundError:
            continue
fd = os.open(found, os.O_RDWR)
os.pwrite(fd, b"PRECIOUS", 1 << 16)
os.fsync(fd)
print(os.fstat(fd).st_ino, flush=True)
time.sleep(stay)
"""


@pytest.fixture
def image(pool: Path) -> Path:
    """Raw, half of it zeros that occupy the disk: what writes to it asks nobody for a lock."""
    return new_file(pool / "vm.raw", (b"x" * 65536 + bytes(65536)) * 32)


@pytest.fixture
def opener(image: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def start(stay: float, opens: str = _OPENER) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", opens, str(image.parent), str(image.stat().st_ino), str(stay)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        time.sleep(0.3)  # it has begun to look
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


#: As QEMU with ``auto-read-only``, which is how libvirt starts guests: for reading first, then by the image's own name.
_READS_FIRST = _OPENER.replace(
    "fd = os.open(found, os.O_RDWR)",
    """read = os.open(found, os.O_RDONLY)
print(os.fstat(read).st_ino, flush=True)
fd = os.open(folder + "/vm.raw", os.O_RDWR)""",
)


def answered(verb: str, args: dict[str, Any], *without: str) -> dict[str, Any]:
    return ask(verb, args, command=[sys.executable, DRIVER, NEVER, "/dev/null", *without])


WITHOUT = [(), ("no-door",), ("no-exchange",), ("no-door", "no-exchange")]


@pytest.mark.parametrize("without", WITHOUT, ids=" ".join)
@pytest.mark.parametrize("stay", [0, 60], ids=["wrote and went", "stays"])
def test_the_original_has_its_name_again(image: Path, opener: Any, without: tuple[str, ...], stay: float) -> None:
    inode = image.stat().st_ino
    process = opener(stay)
    answer = answered("reclaim", reclaim_args(image, format="raw", method="copy", undo_hours=0), *without)
    assert answer.get("code") == "image_in_use", answer
    assert int(process.stdout.readline()) == inode
    assert (image.stat().st_ino, leftovers(image.parent)) == (inode, set())
    assert image.read_bytes()[1 << 16 :][:8] == b"PRECIOUS"


def test_who_opens_for_reading_first_and_then_for_writing_has_one_file(image: Path, opener: Any) -> None:
    inode = image.stat().st_ino
    process = opener(0, _READS_FIRST)
    answer = answered("reclaim", reclaim_args(image, format="raw", method="copy", undo_hours=24))
    assert answer.get("code") == "image_in_use", answer
    assert [int(process.stdout.readline()) for _ in range(2)] == [inode, inode]
    assert (image.stat().st_ino, leftovers(image.parent)) == (inode, set())
    assert image.read_bytes()[1 << 16 :][:8] == b"PRECIOUS"


def test_on_a_node_of_proxmox_nothing_is_swapped_without_a_door(image: Path) -> None:
    """Its hypervisor takes no image locks: nothing else would keep a guest from starting just then."""
    args, before = reclaim_args(image, format="raw", method="copy"), image.stat().st_ino
    command = [sys.executable, DRIVER, NEVER, "/dev/null", "no-door", "proxmox"]
    answer, events = heard("reclaim", args, command=command)
    assert answer["code"] == "guests_unknown"
    assert not [event for event in events if event["event"] in {"command", "ready"}]  # no hours of copying
    assert (image.stat().st_ino, leftovers(image.parent)) == (before, set())
    assert answered("reclaim", args, "proxmox")["swapped"]


@pytest.mark.parametrize("without", WITHOUT, ids=" ".join)
def test_the_same_for_a_conversion_that_takes_the_name(image: Path, opener: Any, without: tuple[str, ...]) -> None:
    process = opener(0)
    answer = answered("convert", replace_args(image, form="qcow2", source="raw", undo_hours=0), *without)
    assert answer.get("code") == "image_in_use", answer
    assert int(process.stdout.readline()) == image.stat().st_ino
    assert image.read_bytes()[1 << 16 :][:8] == b"PRECIOUS"
    assert leftovers(image.parent) == set()
    assert [path.name for path in image.parent.iterdir()] == ["vm.raw"]


def test_an_undo_copy_that_was_written_to_is_not_discarded(image: Path) -> None:
    ask("reclaim", reclaim_args(image, format="raw", method="copy", undo_hours=24))
    copy = image.parent / ".sa-j1.orig"
    overwrite(copy, 0, b"PRECIOUS")
    args = undo_args(image)
    assert ask("discard_undo", args, job="d1")["code"] == "undo_written_to"
    assert copy.read_bytes()[:8] == b"PRECIOUS"
    assert ask("discard_undo", args | {"force": True}, job="d2")["found"] is True
