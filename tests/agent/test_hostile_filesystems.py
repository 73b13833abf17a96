"""Filesystems that a guest's root has made for whoever looks at them: nothing leads out of the appliance."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from storage_admin.agent import protocol
from storage_admin.agent.appliance import appliance
from storage_admin.agent.appliance.appliance import Appliance
from storage_admin.agent.qemu.node import Node
from tests.agent.harness import ask, at_stage, held_open, leftovers, qemu_img
from tests.agent.hostile_filesystems import DEEP, MANY, MIB, NAMES, NO_UTF_8, NOWHERE, OWN, TIB, TO_ITS_OWN, disk
from tests.agent.hostile_filesystems import filesystem as hostile
from tests.agent.recording import RecordingIO
from tests.agent.stranger import CANARY, fingerprints
from tests.agent.test_files import left
from tests.agent.test_sparsify import args_for
from tests.faults.swapper import Watch
from tests.faults.test_kills import tools_of, wait_until_gone
from tests.working import refused_as

pytestmark = [pytest.mark.qemu, pytest.mark.night]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the host that no guest may see."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_bytes(CANARY)
    return folder


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory, outside: Path) -> Iterator[tuple[Appliance, Path]]:
    """One appliance with the disk for all tests, and the image."""
    folder = tmp_path_factory.mktemp("disk")
    image = folder / "vm.qcow2"
    qemu_img("convert", "-O", "qcow2", disk(folder / "disk.raw", outside / "secret"), image)
    with (
        held_open(image) as fd,
        appliance.on(RecordingIO(), Node(fd, "qcow2", bytes(image)), lambda: None) as started,
    ):
        yield started, image
    assert left(image, os.getpid()) == []


@pytest.fixture
def first(inside: tuple[Appliance, Path]) -> Appliance:
    return inside[0]


def refused(inside: Appliance, do: str, device: str, path: str = "/") -> str:
    return refused_as(inside.ask, do, device=device, path=path)


def test_what_is_damaged_or_encrypted_is_told_and_hides_nothing_else(first: Appliance) -> None:
    told = {one["device"]: one for one in first.ask("look")["filesystems"]}
    assert told["/dev/sda1"]["type"] == "ext4"
    assert 0 < told["/dev/sda1"]["free"] < told["/dev/sda1"]["size"] < 96 * MIB
    assert told["/dev/sda2"]["size"] is None
    assert (told["/dev/sda3"]["type"], told["/dev/sda3"]["size"]) == ("crypto_LUKS", None)
    assert told["/dev/sda2"]["why"] != told["/dev/sda3"]["why"] != ""
    for device in ("/dev/sda2", "/dev/sda3", "/dev/sdb", "/dev/mapper/control", "/dev/../etc", "/dev/guest/root"):
        assert refused(first, "list", device) == "unreadable_inside", device


def test_names_come_as_they_are_and_what_is_not_utf_8_is_told(first: Appliance) -> None:
    names = {one["name"] for one in first.ask("list", device="/dev/sda1", path="/")["entries"]}
    assert {*NAMES, NO_UTF_8.decode("utf-8", "backslashreplace")} <= names
    for name in NAMES:
        assert b"".join(first.read("/dev/sda1", f"/{name}")) == b"x", name
    assert refused(first, "read", "/dev/sda1", "/\udcff\udcfe") == "unreadable_inside"


def test_a_link_leads_to_the_guests_own_files_or_nowhere(first: Appliance, outside: Path) -> None:
    before = fingerprints(outside)
    with contextlib.closing(Watch(outside)) as watch:
        for path in TO_ITS_OWN:
            assert b"".join(first.read("/dev/sda1", path)) == OWN, path
        for path in NOWHERE:
            assert refused(first, "read", "/dev/sda1", path) == "unreadable_inside", path
        listed = {one["name"] for one in first.ask("list", device="/dev/sda1", path="/to-root")["entries"]}
        assert {"etc", "to-root", "many"} <= listed
        for path in ("/loop", "/pipe", "/disk", "/to-disk", "/etc/passwd"):
            assert refused(first, "list", "/dev/sda1", path) == "unreadable_inside", path
        assert watch.seen() == []
    assert fingerprints(outside) == before


def test_a_large_folder_is_cut_off_and_a_path_that_is_too_long_is_refused(first: Appliance) -> None:
    told = first.ask("list", device="/dev/sda1", path="/many")
    assert (told["count"], len(told["entries"])) == (MANY, 5000)
    assert first.ask("list", device="/dev/sda1", path="/" + "/".join(DEEP[:38]))["count"] == 1
    assert refused(first, "list", "/dev/sda1", "/" + "/".join(DEEP)) == "unreadable_inside"


def test_a_file_of_a_tebibyte_comes_in_pieces_and_is_kept_nowhere(inside: tuple[Appliance, Path]) -> None:
    began, (first, _) = time.monotonic(), inside
    (folder,) = Path(appliance.PLACE).glob(f"{appliance.MARK}{os.getpid()}-*")
    before, pieces, got = occupied(folder), first.read("/dev/sda1", "/sparse"), 0
    (status,) = [one for one in first.ask("list", device="/dev/sda1", path="/")["entries"] if one["name"] == "sparse"]
    assert status["size"] == TIB
    for piece in pieces:
        assert not piece.strip(b"\0")
        assert len(piece) <= 4 * MIB
        got += len(piece)
        if got >= 256 * MIB:
            break
    assert occupied(folder) < before + 16 * MIB
    print(f"{got // MIB} MiB in {time.monotonic() - began:.0f} s")
    # It goes on for as long as somebody takes it: from here on nothing else is asked of this appliance.


def occupied(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


@pytest.mark.parametrize("how", ["killed", "cancelled"])
def test_work_that_a_file_makes_endless_ends_with_its_agent(pool: Path, tmp_path: Path, how: str) -> None:
    """The checksum of a tebibyte takes hours, and nothing of the disk is read for it."""
    raw, path = hostile(tmp_path / "fs.raw", sparse=True), pool / "vm.qcow2"
    qemu_img("convert", "-O", "qcow2", raw, path)
    before = path.read_bytes()
    with at_stage("reading files", "sparsify", args_for(path, "qcow2")) as agent:
        time.sleep(5)
        tools, began = tools_of(agent), time.monotonic()
        assert {"qemu-storage-daemon"[:15], "python3"} <= {one.name()[:15] for one in tools}
        if how == "killed":
            agent.process.kill()
        else:
            agent.say(protocol.CANCEL)
            assert agent.answer()["code"] == protocol.CANCELLED
            assert time.monotonic() < began + 5
    wait_until_gone(tools)
    assert all(not psutil.pid_exists(one.pid) for one in tools)
    assert (path.read_bytes() == before, leftovers(pool)) == (True, set())


def test_hostile_names_and_devices_are_trimmed_around(pool: Path, tmp_path: Path, outside: Path) -> None:
    raw, path = hostile(tmp_path / "fs.raw", outside / "secret", sparse=False, many=200), pool / "vm.qcow2"
    qemu_img("convert", "-O", "qcow2", raw, path)
    answer = ask("sparsify", args_for(path, "qcow2"))
    assert (answer.get("swapped"), answer.get("files")) == (True, 200 + len([*NAMES, NO_UTF_8, "passwd"])), answer
