"""Who opens an image by its name in the moment before that goes: what he writes is not lost."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent.protocol import b64
from tests.agent.harness import Agent, ask, leftovers, reclaim_args, undo_args

pytestmark = pytest.mark.qemu

#: Opens the image once its undo copy's name is there, says so, and writes when it is told to, or stays.
_OPENER = """
import glob, os, sys, time
path, folder, stay = sys.argv[1], sys.argv[2], float(sys.argv[3])
while not glob.glob(folder + "/.sa-*.orig"):
    time.sleep(0.0002)
fd = os.open(path, os.O_RDWR)
found = os.fstat(fd).st_ino
os.pwrite(fd, b"PRECIOUS", 1 << 16)
os.fsync(fd)
print(found, flush=True)
time.sleep(stay)
"""


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    (tmp_path / "pool").mkdir()
    return tmp_path / "pool"


@pytest.fixture
def image(pool: Path) -> Path:
    """Raw, half of it zeros that occupy the disk: what writes to it asks nobody for a lock."""
    path = pool / "vm.raw"
    path.write_bytes((b"x" * 65536 + bytes(65536)) * 32)
    return path


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The moment between both names lasts long enough to be hit each time, as on a disk that takes its time."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os, time\n"
        "link = os.link\n"
        "def slow(*args, **more):\n"
        "    link(*args, **more)\n"
        "    time.sleep(0.5)\n"
        "os.link = slow\n"
    )
    return {"PYTHONPATH": f"{Path(__file__).resolve().parents[2]}:{hook}"}


@pytest.fixture
def opener(image: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def start(stay: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _OPENER, str(image), str(image.parent), str(stay)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        time.sleep(0.3)  # it has begun to look
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def answered(verb: str, args: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    with_agent = Agent(env=env)
    with_agent.request(verb, args)
    try:
        return with_agent.answer()
    finally:
        with_agent.process.wait(20)


@pytest.mark.parametrize("stay", [0, 60], ids=["wrote and went", "stays"])
@pytest.mark.parametrize("hours", [0, 24])
def test_the_original_has_its_name_again(
    image: Path, slow_disk: dict[str, str], opener: Any, hours: int, stay: float
) -> None:
    inode = image.stat().st_ino
    process = opener(stay)
    answer = answered("reclaim", reclaim_args(image, format="raw", method="copy", undo_hours=hours), slow_disk)
    assert int(process.stdout.readline()) == inode
    assert answer["code"] == "image_in_use", answer
    assert (image.stat().st_ino, leftovers(image.parent)) == (inode, set())
    assert image.read_bytes()[1 << 16 :][:8] == b"PRECIOUS"


def test_the_same_for_a_conversion_that_takes_the_name(image: Path, slow_disk: dict[str, str], opener: Any) -> None:
    opener(0)
    args = reclaim_args(image, format="raw", undo_hours=0)
    del args["method"]
    new = {"pool_path_b64": b64(bytes(image.parent)), "path_b64": b64(bytes(image.with_suffix(".qcow2")))}
    target = {**new, "format": "qcow2", "options": {}, "replaces": True}
    answer = answered("convert", args | {"target": target}, slow_disk)
    assert answer["event"] == "error", answer
    assert image.read_bytes()[1 << 16 :][:8] == b"PRECIOUS"
    assert leftovers(image.parent) == set()
    assert [path.name for path in image.parent.iterdir()] == ["vm.raw"]


def test_an_undo_copy_that_was_written_to_is_not_discarded(image: Path) -> None:
    ask("reclaim", reclaim_args(image, format="raw", method="copy", undo_hours=24))
    copy = image.parent / ".sa-j1.orig"
    with copy.open("r+b") as file:
        file.write(b"PRECIOUS")
    args = undo_args(image)
    assert ask("discard_undo", args, job="d1")["code"] == "undo_written_to"
    assert copy.read_bytes()[:8] == b"PRECIOUS"
    assert ask("discard_undo", args | {"force": True}, job="d2")["found"] is True
