"""Guests that boot at once from copies in a scratch folder: real ones, with TCG, that libvirt starts and ends."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import libvirt
import pytest

from storage_admin.agent.bench import boot, signals
from storage_admin.agent.bench.boot import LAYOUTS
from storage_admin.agent.bench.step import Bench
from storage_admin.agent.bench.storm import Machine, Storm
from storage_admin.agent.folders import scratch
from storage_admin.agent.host import space
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import HostError, RefusedError, StoppedError, b64
from storage_admin.agent.verbs import benchmark
from tests.agent.benching import marks
from tests.agent.harness import held_open
from tests.agent.recording import RecordingIO, cancel, request
from tests.harness import guests
from tests.harness.filesystems import new_file, new_folder
from tests.harness.processes import wait_until

pytestmark = pytest.mark.guest

MIB = 1 << 20


@pytest.fixture
def pool(shared_folder: Path) -> Path:
    return new_folder(shared_folder / "pool", mode=0o755)


@pytest.fixture
def connection(libvirtd: str, pool: Path) -> Iterator[libvirt.virConnect]:
    """After a test with it neither a guest is left nor anything in the pool."""
    opened = libvirt.open(libvirtd)
    yield opened
    assert (ours(opened), list(pool.iterdir())) == ([], [])
    opened.close()


def step(folder: Path, **more: Any) -> dict[str, Any]:
    """One of the tests' own guests, which says that it is up, with an empty disk."""
    known = {
        "layout": "raw", "guests": 1, "memory_bytes": 128 * MIB, "seconds": 60, "up": "console", "pattern": "=up",
        "kernel": str(guests._kernel()), "initrd": str(guests.initramfs(folder)), "append": guests._command_line(),
        "virtual_bytes": 8 * MIB, "growth_bytes": 8 * MIB,
    }  # fmt: skip
    step = known | more
    return step | {"setting": {"layout": step["layout"], "guests": step["guests"]}}


def link(path: Path, form: str) -> dict[str, Any]:
    """An image as the controller tells of it."""
    status = path.stat()
    return {
        "path_b64": b64(bytes(path)), "pool_path_b64": b64(bytes(path.parent)), "format": form, "dev": status.st_dev,
        "inode": status.st_ino, "file_size": status.st_size, "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }  # fmt: skip


def measure(io: AgentIO, pool: Path, *steps: dict[str, Any]) -> dict[str, Any]:
    args = {"pool_path_b64": b64(bytes(pool)), "kind": "boot", "reserve_bytes": 0, "steps": list(steps)}
    return benchmark.run(request("benchmark", **args), io)


@contextlib.contextmanager
def bench_in(pool: Path, io: AgentIO) -> Iterator[Bench]:
    with held_open(pool) as fd:
        claimed = space.SpaceClaim("storm", fd)
        with scratch.made(fd, bytes(pool), "storm", io) as folder, claimed as claim:
            yield Bench(io, folder, space.Reserve(0.0, 0), space.Others(), "ext4", "storm", claim)


def ours(connection: libvirt.virConnect) -> list[str]:
    return [domain.name() for domain in connection.listAllDomains() if domain.name().startswith("sa-bench-")]


def test_guests_come_up_from_copies_of_a_kernel_that_stays_as_it_is_and_nothing_of_them_is_left(
    pool: Path, shared_folder: Path, connection: libvirt.virConnect
) -> None:
    kernel, io = shared_folder / "vmlinuz", RecordingIO()
    shutil.copy(guests._kernel(), kernel)  # other guests start from that one
    before = kernel.stat()
    result = measure(io, pool, step(shared_folder, layout="qcow2+qcow2", guests=2, kernel=str(kernel)))
    told = [(sample["metric"], sample["value"]) for sample in io.all("sample")]
    assert [metric for metric, _ in told] == ["boot_seconds", "boot_seconds", "boot_all_seconds"]
    assert all(0.2 < seconds <= told[2][1] < 60 for _, seconds in told)
    assert result["caches"] == "dropped"
    assert (kernel.stat().st_uid, kernel.stat().st_ctime_ns) == (before.st_uid, before.st_ctime_ns)


def test_a_guest_is_up_when_its_agent_answers(pool: Path, shared_folder: Path, connection: libvirt.virConnect) -> None:
    io = RecordingIO()
    initrd = str(guests.initramfs(shared_folder, agent=True))
    measure(io, pool, step(shared_folder, guests=2, up="agent", pattern="", initrd=initrd, seconds=150))
    each = [sample["value"] for sample in io.all("sample") if sample["metric"] == "boot_seconds"]
    assert len(each) == 2
    assert all(0.2 < seconds < 150 for seconds in each)


def test_a_guest_without_an_agent_is_told_of(pool: Path, shared_folder: Path, connection: libvirt.virConnect) -> None:
    with pytest.raises(HostError, match=r"1 of 1 guests got no answer from their guest agent .* within 5 s"):
        measure(RecordingIO(), pool, step(shared_folder, up="agent", seconds=5))


@pytest.mark.usefixtures("libvirtd")
def test_the_disks_are_copies_of_a_chain_that_stays_as_it_is(pool: Path, shared_folder: Path) -> None:
    images = new_folder(shared_folder / "images")
    base, image = images / "base.raw", images / "image.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "raw", base, "4M"], check=True)
    guests.write_pattern(base, "raw", (0, 1, 0x41), (2, 1, 0x42))
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base.name, "-F", "raw", image], check=True)
    guests.write_pattern(image, "qcow2", (1, 1, 0x43))
    before = marks(images)
    wanted = step(
        shared_folder, image=link(image, "qcow2"), chain=[link(base, "raw")], image_bytes=4 * MIB,
        virtual_bytes=4 * MIB, guests=2,
    )  # fmt: skip
    (parsed,) = boot.parse([wanted])
    assert isinstance(parsed, boot.BootStep)
    with bench_in(pool, RecordingIO()) as bench:
        boot.make_source(bench, parsed.boots)
        for layout in LAYOUTS:
            disks, _bases = boot.lay_out(bench, layout, 2, 4 * MIB)
            for disk in disks:
                compare: list[str | Path] = ["qemu-img", "compare", "-q", image, pool / ".sa-storm.bench" / disk]
                assert subprocess.run(compare).returncode == 0, (layout, disk)
            bench.scratch.clear("source.raw")
    assert marks(images) == before


def test_an_image_that_a_guest_uses_is_not_read(
    pool: Path, shared_folder: Path, domains: guests.Domains, connection: libvirt.virConnect
) -> None:
    image = shared_folder / "image.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, "4M"], check=True)
    domains.run([guests.Disk(image)])
    booted = step(shared_folder, image=link(image, "qcow2"), image_bytes=4 * MIB, virtual_bytes=4 * MIB)
    with pytest.raises(RefusedError, match="'image_in_use'"):
        measure(RecordingIO(), pool, booted)


def test_an_image_that_unpacks_to_more_than_was_set_aside_is_refused(
    pool: Path, shared_folder: Path, libvirtd: str
) -> None:
    raw, image = shared_folder / "raw", shared_folder / "image.qcow2"
    raw.write_bytes(b"compressible" * MIB)
    subprocess.run(["qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", raw, image], check=True)
    booted = step(shared_folder, image=link(image, "qcow2"), image_bytes=MIB, virtual_bytes=12 * MIB)
    with pytest.raises(RefusedError, match="analyze it") as caught:
        measure(RecordingIO(), pool, booted)
    assert caught.value.code == "not_enough_space", libvirtd
    assert list(pool.iterdir()) == []


def test_a_guest_that_never_says_it_is_up_is_ended_and_told_of(
    pool: Path, shared_folder: Path, connection: libvirt.virConnect
) -> None:
    with pytest.raises(HostError, match=r"1 of 1 guests did not show 'never' .* within 4 s"):
        measure(RecordingIO(), pool, step(shared_folder, pattern="never", seconds=4))


def test_a_cancel_ends_the_guests(pool: Path, shared_folder: Path, connection: libvirt.virConnect) -> None:
    begin = time.monotonic()

    def check() -> None:
        if len(ours(connection)) == 2 and time.monotonic() - begin > 1:
            cancel()

    with pytest.raises(StoppedError):
        measure(RecordingIO(check), pool, step(shared_folder, guests=2, pattern="never"))


#: An agent that boots a guest which never says it is up, until it is killed.
_AGENT = """
import sys
from pathlib import Path
from tests.guests.test_boot_storm import measure, step
from tests.agent.recording import RecordingIO
measure(RecordingIO(), Path(sys.argv[1]), step(Path(sys.argv[2]), pattern="never"))
"""


def test_where_the_agent_is_killed_libvirt_ends_them_and_the_folder_is_removed_later(
    pool: Path, shared_folder: Path, connection: libvirt.virConnect
) -> None:
    guests.initramfs(shared_folder)
    agent = subprocess.Popen([sys.executable, "-c", _AGENT, pool, shared_folder])
    wait_until(lambda: ours(connection) or agent.poll() is not None, 30, "its guest is there")
    assert agent.poll() is None
    agent.kill()
    agent.wait()
    wait_until(lambda: not ours(connection), 30, "it ends with the agent")
    with held_open(pool) as fd:
        (left,) = pool.iterdir()
        assert scratch.is_abandoned(fd, left.name)
        assert scratch.settle(fd, left.name) == scratch.REMOVED


def test_what_libvirt_would_be_led_to_by_name_is_refused_where_others_could_exchange_it(
    pool: Path, libvirtd: str
) -> None:
    machine = Machine(128 * MIB, 10.0, b"=up")
    ways = (0o755, 0, True), (0o1777, 0, True), (0o777, 0, False), (0o775, 0, False), (0o755, 65534, False)
    for mode, owner, good in ways:
        pool.chmod(mode)
        os.chown(pool, owner, -1)
        with bench_in(pool, RecordingIO()) as bench:
            if good:
                assert Storm(bench, machine).folder == f"{pool}/.sa-storm.bench", libvirtd
                continue
            with pytest.raises(RefusedError, match="'unsupported_pool'"):
                Storm(bench, machine)


@pytest.mark.usefixtures("libvirtd")
@pytest.mark.parametrize("name", ['a"; undefine x', "a'b", "a\\b", "a\nb"])
def test_a_path_that_virsh_would_read_otherwise_is_refused(pool: Path, name: str) -> None:
    (pool / name).mkdir()
    with bench_in(pool / name, RecordingIO()) as bench, pytest.raises(RefusedError, match="quotes"):
        Storm(bench, Machine(128 * MIB, 10.0, b"=up"))


def test_consoles_are_looked_at_until_the_words_come_in_pieces(tmp_path: Path) -> None:
    path = new_file(tmp_path / "console", b"Booting\n=u")
    consoles = signals.Consoles([str(path)], 10.0, b"=up")
    consoles.let_go(1)
    threading.Event().wait(0.2)
    consoles.look()
    with path.open("ab") as file:
        file.write(b"p\n")
    threading.Event().wait(0.2)
    with pytest.raises(signals.AllUpError):
        consoles.look()
    consoles.close()
    assert 0.1 <= consoles.seconds()[0] < 5


def test_a_console_that_never_shows_the_words_is_told_of_with_what_it_showed(tmp_path: Path) -> None:
    path = new_file(tmp_path / "console", b"Kernel panic\xff - not syncing\n")
    consoles = signals.Consoles([str(path)], 0.1, b"login:")
    consoles.let_go(1)
    threading.Event().wait(0.3)
    with pytest.raises(
        HostError,
        match=r"did not show 'login:' .*last output of one of them: 'Kernel panic. - not syncing'\) within 0 s",
    ):
        consoles.look()
    consoles.close()
