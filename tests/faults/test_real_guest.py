"""A real virtual machine, under TCG, has the image: as its disk, or as the base of its disk."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent.harness import ask, at_stage, leftovers, make_image, reclaim_args, undo_args
from tests.faults.test_guest_starts import PATTERN, holds_the_pattern
from tests.harness.processes import Daemon
from tests.working import create

pytestmark = [pytest.mark.faults, pytest.mark.guest, pytest.mark.qemu]


class Machine:
    """What can be asked of a running machine, over its monitor."""

    def __init__(self, daemon: Daemon, monitor: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20)
        daemon.wait_for(lambda: self._socket.connect_ex(str(monitor)) == 0, 20, "its monitor listens")
        self._file = self._socket.makefile("rwb")
        self._file.readline()
        self.ask("qmp_capabilities")

    def ask(self, command: str, **arguments: Any) -> Any:
        self._file.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        self._file.flush()
        while True:
            answer = json.loads(self._file.readline())
            if "return" in answer or "error" in answer:
                assert "error" not in answer, answer
                return answer["return"]

    def write(self, offset: str, length: str) -> None:
        """A write of the machine's own disk device, flushed."""
        for line in (f"write -P {PATTERN} {offset} {length}", "flush"):
            said = self.ask("human-monitor-command", **{"command-line": f'qemu-io disk "{line}"'})
            assert "failed" not in said, said

    def close(self) -> None:
        self.ask("quit")
        self._file.close()
        self._socket.close()


@contextmanager
def machine(folder: Path, image: Path) -> Iterator[Machine]:
    """A machine with the image as its disk; no firmware boots anything from it."""
    monitor = folder / "monitor"
    command = ["qemu-system-x86_64", "-accel", "tcg", "-m", "32", "-nodefaults", "-display", "none"]
    command += ["-qmp", f"unix:{monitor},server=on,wait=off"]
    command += ["-drive", f"file={image},format=qcow2,if=none,id=disk,cache=none", "-device", "virtio-blk,drive=disk"]
    with Daemon(command, folder / "machine.log") as daemon:
        running = Machine(daemon, monitor)
        yield running
        running.close()
        assert daemon.process.wait(20) == 0
    monitor.unlink(missing_ok=True)


@pytest.fixture
def image(pool: Path) -> Path:
    return make_image(pool / "vm.qcow2", "16M")


def test_the_disk_of_a_running_machine_is_refused(image: Path, tmp_path: Path) -> None:
    with machine(tmp_path, image) as guest:
        guest.write("10M", "1M")
        answer = ask("reclaim", reclaim_args(image))
        assert answer.get("code") == "image_in_use", answer
        guest.write("12M", "1M")
    assert leftovers(image.parent) == set()
    assert holds_the_pattern(image, "10M", "1M")
    assert holds_the_pattern(image, "12M", "1M")


def test_the_base_of_a_running_machine_is_refused(image: Path, tmp_path: Path) -> None:
    overlay = create(image.parent / "overlay.qcow2", base=image)
    with machine(tmp_path, overlay):
        assert ask("reclaim", reclaim_args(image)).get("code") == "image_in_use"
    assert leftovers(image.parent) == set()


def test_a_machine_that_starts_writes_and_stops_while_the_copy_is_made_loses_nothing(
    image: Path, tmp_path: Path
) -> None:
    with at_stage("copying", "reclaim", reclaim_args(image, bandwidth_bytes_sec=256 << 10)) as agent:
        with machine(tmp_path, image) as guest:
            guest.write("10M", "1M")
        answer = agent.answer()
    assert answer.get("code") in {"image_in_use", "stale_plan"}, answer
    assert leftovers(image.parent) == set()
    assert holds_the_pattern(image, "10M", "1M")


def test_a_machine_works_on_the_reclaimed_image_and_its_writes_are_not_undone(image: Path, tmp_path: Path) -> None:
    assert ask("reclaim", reclaim_args(image))["swapped"]
    with machine(tmp_path, image) as guest:
        guest.write("10M", "1M")
        assert ask("undo", undo_args(image), job="u1").get("code") in {"image_in_use", "undo_written_to"}
    assert ask("undo", undo_args(image), job="u2").get("code") == "undo_written_to"
    assert holds_the_pattern(image, "10M", "1M")
