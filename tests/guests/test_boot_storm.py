"""Guests that boot at once from copies in a scratch folder: real ones, with TCG, that libvirt starts and ends."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import libvirt
import pytest

from storage_admin.agent.bench import boot
from storage_admin.agent.bench.boot import LAYOUTS, Machine, Storm
from storage_admin.agent.protocol import HostError, RefusedError, StoppedError
from storage_admin.agent.qemu_node import Node
from tests.agent.recording import RecordingIO
from tests.harness import guests

pytestmark = pytest.mark.guest


@pytest.fixture
def scratch(shared_folder: Path) -> Path:
    folder = shared_folder / ".sa-storm.bench"
    folder.mkdir(mode=0o711)
    return folder


@pytest.fixture
def connection(libvirtd: str) -> Iterator[libvirt.virConnect]:
    opened = libvirt.open(libvirtd)
    yield opened
    opened.close()


def machine(folder: Path, **more: object) -> Machine:
    """The tests' own guest, which says that it is up."""
    known = {
        "pattern": b"=up", "seconds": 60.0, "kernel": str(guests._kernel()), "initrd": str(guests.initramfs(folder)),
        "append": guests._command_line(), "disk_bytes": 8 << 20, "memory_bytes": 128 << 20,
    }  # fmt: skip
    return Machine(**(known | more))  # type: ignore[arg-type]


def ours(connection: libvirt.virConnect) -> list[str]:
    return [domain.name() for domain in connection.listAllDomains() if domain.name().startswith("sa-bench-")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_guests_come_up_and_nothing_of_them_stays(
    layout: str, scratch: Path, shared_folder: Path, connection: libvirt.virConnect
) -> None:
    storm = Storm(RecordingIO(), "storm", os.fsencode(scratch), machine(shared_folder))
    took = storm.run(storm.lay_out(layout, 2))
    assert len(took) == 2
    assert all(0.2 < seconds < 60 for seconds in took)
    assert ours(connection) == []


def test_the_disks_are_copies_of_an_image_that_stays_as_it_is(scratch: Path, shared_folder: Path) -> None:
    image = shared_folder / "image.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "4M"], check=True)
    guests.write_pattern(image, "qcow2", (0, 1, 0x41), (2, 1, 0x42))
    before = image.read_bytes(), image.stat()
    fd = os.open(image, os.O_RDONLY)
    try:
        node = Node(fd, "qcow2", os.fsencode(image))
        storm = Storm(RecordingIO(), "storm", os.fsencode(scratch), machine(shared_folder, image=node))
        for layout in LAYOUTS:
            for disk in storm.lay_out(layout, 2):
                compare: list[str | Path] = ["qemu-img", "compare", "-q", image, scratch / disk]
                assert subprocess.run(compare).returncode == 0, (layout, disk)
            for made in scratch.iterdir():
                made.unlink()
    finally:
        os.close(fd)
    assert image.read_bytes() == before[0]
    assert (image.stat().st_mtime_ns, image.stat().st_ctime_ns) == (before[1].st_mtime_ns, before[1].st_ctime_ns)


def test_a_guest_that_never_says_it_is_up_is_ended_and_told_of(
    scratch: Path, shared_folder: Path, connection: libvirt.virConnect
) -> None:
    storm = Storm(RecordingIO(), "storm", os.fsencode(scratch), machine(shared_folder, pattern=b"never", seconds=4.0))
    with pytest.raises(HostError, match=r"1 of 1 guests did not show 'never' .* within 4 s; .*=up"):
        storm.run(storm.lay_out("raw", 1))
    assert ours(connection) == []


def test_a_cancel_ends_the_guests(scratch: Path, shared_folder: Path, connection: libvirt.virConnect) -> None:
    io = RecordingIO()
    storm = Storm(io, "storm", os.fsencode(scratch), machine(shared_folder, pattern=b"never"))
    disks = storm.lay_out("raw", 2)
    begin = time.monotonic()

    def check() -> None:
        if len(ours(connection)) == 2 and time.monotonic() - begin > 1:
            raise StoppedError("cancelled", "Cancelled.")

    io.check = check  # type: ignore[method-assign]
    with pytest.raises(StoppedError):
        storm.run(disks)
    assert ours(connection) == []


#: An agent that boots a guest which never says it is up, until it is killed.
_AGENT = """
import sys, os
from pathlib import Path
from tests.guests.test_boot_storm import machine
from tests.agent.recording import RecordingIO
from storage_admin.agent.bench.boot import Storm
storm = Storm(RecordingIO(), "storm", os.fsencode(sys.argv[1]), machine(Path(sys.argv[2]), pattern=b"never"))
storm.run(storm.lay_out("raw", 1))
"""


def test_where_the_agent_is_killed_libvirt_ends_them(
    scratch: Path, shared_folder: Path, connection: libvirt.virConnect
) -> None:
    guests.initramfs(shared_folder)
    agent = subprocess.Popen([sys.executable, "-c", _AGENT, scratch, shared_folder])
    until = time.monotonic() + 30
    while not ours(connection):
        assert agent.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    agent.kill()
    agent.wait()
    until = time.monotonic() + 30
    while ours(connection):
        assert time.monotonic() < until, "it outlives the agent"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"kernel": "", "image": None}, "name one of them"),
        ({"kernel": "/nothing/there"}, "there is no file /nothing/there"),
        ({"pattern": b" "}, "not empty"),
        ({"image": Node(0, "vmdk", b"a")}, "qcow2 or a raw"),
    ],
)
def test_what_cannot_boot_is_refused_before_anything_is_made(
    wrong: dict[str, object], why: str, scratch: Path, shared_folder: Path
) -> None:
    with pytest.raises(RefusedError, match=why):
        Storm(RecordingIO(), "storm", os.fsencode(scratch), machine(shared_folder, **wrong))
    assert list(scratch.iterdir()) == []


def test_a_path_that_virsh_would_read_otherwise_is_refused(shared_folder: Path) -> None:
    with pytest.raises(RefusedError, match="quotes"):
        Storm(RecordingIO(), "storm", os.fsencode(shared_folder) + b'/a"; undefine x', machine(shared_folder))


def test_consoles_are_looked_at_until_the_words_come_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "console"
    path.write_bytes(b"Booting\n=u")
    consoles = boot._Consoles([str(path)], Machine(b"=up", 10.0, kernel="x"))
    consoles.let_go(1)
    threading.Event().wait(0.2)
    consoles.look()
    with path.open("ab") as file:
        file.write(b"p\n")
    threading.Event().wait(0.2)
    with pytest.raises(boot._AllUpError):
        consoles.look()
    consoles.close()
    assert 0.1 <= consoles.seconds()[0] < 5
