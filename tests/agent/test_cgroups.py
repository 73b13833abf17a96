"""A job's control group: on this machine's real ones, and for version 2 on a tree of files that imitates one.

No kernel has the disk controller in both versions at once: where it is in version 1, what version 2 would do can only
be imitated.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage_admin.agent.host import cgroups
from storage_admin.agent.host.mounts import parse
from storage_admin.agent.programs import tools
from tests.agent.harness import ROOT, held_open
from tests.agent.recording import RecordingIO
from tests.harness.filesystems import loop_device, loop_filesystem, mounted, new_file, new_folder, sparse_file
from tests.harness.processes import running

MIB = 1 << 20


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with held_open(tmp_path / "file", os.O_RDWR | os.O_CREAT) as descriptor:
        yield descriptor


def groups() -> list[str]:
    """What stands at the top of the real hierarchy that is used."""
    found = cgroups.find()
    return [] if found is None else [path.name for path in Path(found.root).glob("storage-admin-*")]


def own_groups() -> bytes:
    return Path("/proc/self/cgroup").read_bytes()


# On this machine as it is


def test_the_tools_of_a_job_are_in_its_group_and_afterwards_nothing_is_left(fd: int) -> None:
    io, before = RecordingIO(), own_groups()
    with cgroups.limited(io, fd, idle=True, bandwidth=50 * MIB):
        told = io.one("log")["text"]
        tool = tools.run(["cat", "/proc/self/cgroup"], io).stdout
        inside = [line for line in tool.splitlines() if line.endswith(b"/storage-admin-%d" % os.getpid())]
        mine = groups()
    # A machine without such groups says so, and works all the same.
    expected = 0 if "no control group" in told else 1
    assert len(inside) == expected
    assert (f"storage-admin-{os.getpid()}" in mine) is bool(expected)
    if expected:
        assert "weight" in told
    assert own_groups() == before
    assert f"storage-admin-{os.getpid()}" not in groups()


def test_work_that_need_not_give_way_has_no_group(fd: int) -> None:
    io, before = RecordingIO(), own_groups()
    with cgroups.limited(io, fd, idle=False, bandwidth=None):
        assert own_groups() == before
    assert io.events == []


def test_an_error_in_the_work_goes_on_and_the_group_is_taken_away(fd: int) -> None:
    before = own_groups()
    with pytest.raises(ZeroDivisionError), cgroups.limited(RecordingIO(), fd, idle=True, bandwidth=None):
        raise ZeroDivisionError
    assert own_groups() == before
    assert f"storage-admin-{os.getpid()}" not in groups()


def test_what_a_killed_agent_left_is_taken_away_by_the_next(fd: int) -> None:
    program = (
        "import os, sys, time; from storage_admin.agent.host import cgroups\n"
        "from tests.agent.recording import RecordingIO\n"
        "with cgroups.limited(RecordingIO(), 0, idle=True, bandwidth=None): print('in', flush=True); time.sleep(60)"
    )
    with running([sys.executable, "-c", program], b"in\n", stdin=fd, cwd=ROOT) as agent:
        left = groups()
        agent.send_signal(signal.SIGKILL)
    with cgroups.limited(RecordingIO(), fd, idle=True, bandwidth=None):
        still_there = set(groups())
    assert f"storage-admin-{agent.pid}" not in still_there
    assert groups() == [] or f"storage-admin-{agent.pid}" in left


def test_what_is_read_from_the_disk_keeps_to_the_limit(tmp_path: Path) -> None:
    """Where the disk of a loop device can be limited here; else the log says that nothing is."""
    with loop_filesystem(tmp_path, 64) as place:
        path = new_file(place / "file", os.urandom(8 * MIB))
        os.sync()
        io, took = RecordingIO(), 0.0
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with cgroups.limited(io, file.fileno(), idle=False, bandwidth=8 * MIB):
                began = time.monotonic()
                while file.read(MIB):
                    pass
                took = time.monotonic() - began
        told = io.one("log")["text"]
        assert "no control group" in told or took > 0.7, (told, took)


def test_the_disk_is_the_whole_one_and_not_a_partition(tmp_path: Path) -> None:
    with loop_device(sparse_file(tmp_path / "disk", 64 * MIB)) as loop, contextlib.ExitStack() as stack:
        subprocess.run(["addpart", loop, "1", "2048", "100000"], check=True)
        stack.callback(subprocess.run, ["delpart", str(loop), "1"], check=True)
        number, whole = (
            Path(f"/sys/class/block/{name}/dev").read_text().strip() for name in (f"{loop.name}p1", loop.name)
        )
        assert number != whole
        device = stack.enter_context(node(tmp_path / "node", number))
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        place = stack.enter_context(mounted(device, new_folder(tmp_path / "mounted"), "-t", "ext4"))
        with held_open(place) as folder:
            assert os.fstat(folder).st_dev == os.makedev(*map(int, number.split(":")))
            assert cgroups.disk(folder) == whole


def test_what_lies_in_memory_has_no_disk() -> None:
    with held_open("/dev/shm") as folder:
        assert cgroups.disk(folder) is None


@contextlib.contextmanager
def node(path: Path, number: str) -> Iterator[Path]:
    """A device node; nobody makes them by himself everywhere."""
    os.mknod(path, 0o600 | 0o060000, os.makedev(*map(int, number.split(":"))))
    yield path
    path.unlink()


# Version 2, imitated: folders get the kernel's files when they are made, and lose them when they go


class Imitation:
    """A tree like that of a hypervisor with systemd, which keeps what is written into it."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, controllers: str, enabled: str) -> None:
        self.root, self.removed = place, list[tuple[str, dict[str, str]]]()
        place.mkdir()
        self.fill(place, {"cgroup.controllers": controllers, "cgroup.subtree_control": enabled})
        self.own = place / "system.slice" / "storage-admin.service"
        self.own.mkdir(parents=True)
        self.fill(self.own, {})
        mounts, own = place.parent / "mountinfo", place.parent / "own"
        mounts.write_text(f"31 24 0:26 / {place} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n")
        own.write_text("0::/system.slice/storage-admin.service\n")
        monkeypatch.setattr(cgroups, "mounted", lambda: parse(mounts.read_bytes()))
        monkeypatch.setattr(cgroups, "OWN_GROUPS", str(own))
        monkeypatch.setattr(cgroups, "_make", self.make)
        monkeypatch.setattr(cgroups, "_remove", self.remove)

    @staticmethod
    def fill(folder: Path, files: dict[str, str]) -> None:
        for name, content in ({"cgroup.procs": ""} | files).items():
            (folder / name).write_text(content)

    def make(self, path: str) -> None:
        Path(path).mkdir()
        self.fill(Path(path), dict.fromkeys(("io.weight", "io.max", "cpu.weight"), ""))

    def remove(self, path: str) -> None:
        kept = {file.name: file.read_text() for file in Path(path).iterdir()}
        self.removed.append((Path(path).name, kept))
        shutil.rmtree(path)


@pytest.fixture
def imitation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Imitation:
    return Imitation(tmp_path / "cgroup", monkeypatch, "cpuset cpu io memory pids", "cpu memory pids")


def test_version_2_gets_weights_and_a_limit_for_the_images_disk(imitation: Imitation, fd: int) -> None:
    io, pid, device = RecordingIO(), str(os.getpid()), cgroups.disk(fd)
    imitation.root.joinpath(f"{cgroups._PREFIX}4194305").mkdir()  # of a process that no kernel numbers so
    with cgroups.limited(io, fd, idle=True, bandwidth=10 * MIB):
        assert (imitation.root / "cgroup.subtree_control").read_text().startswith("+io")
        assert (imitation.root / f"storage-admin-{pid}" / "cgroup.procs").read_text() == pid
    stale, (name, kept) = imitation.removed
    assert stale[0] == "storage-admin-4194305"
    assert name == f"storage-admin-{pid}"
    assert kept["io.weight"] == "default 10"
    assert kept["cpu.weight"] == "10"
    assert kept["io.max"] == f"{device} rbps={10 * MIB} wbps={10 * MIB}"
    assert (imitation.own / "cgroup.procs").read_text() == pid  # it went back
    assert f"(cgroup v2): io.weight default 10, cpu.weight 10, io.max {device}" in io.one("log")["text"]


def test_version_2_without_a_bandwidth_has_no_limit(imitation: Imitation, fd: int) -> None:
    with cgroups.limited(RecordingIO(), fd, idle=True, bandwidth=None):
        pass
    assert imitation.removed[0][1]["io.max"] == ""


def test_a_limit_alone_leaves_the_weights_alone(imitation: Imitation, fd: int) -> None:
    with cgroups.limited(RecordingIO(), fd, idle=False, bandwidth=MIB):
        pass
    assert imitation.removed[0][1]["io.weight"] == imitation.removed[0][1]["cpu.weight"] == ""
    assert imitation.removed[0][1]["io.max"] != ""


def test_version_2_without_the_controller_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    Imitation(tmp_path / "cgroup", monkeypatch, "cpu memory", "")
    io = RecordingIO()
    with cgroups.limited(io, fd, idle=True, bandwidth=MIB):
        pass
    assert io.one("log")["text"].startswith("no control group for this job (this host has none")


def test_a_tree_that_may_only_be_read_fails_no_job(
    imitation: Imitation, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(cgroups, "_make", refuse)
    io = RecordingIO()
    with cgroups.limited(io, fd, idle=True, bandwidth=MIB):
        worked = True
    assert worked
    assert "(Permission denied): only its I/O priority" in io.one("log")["text"]
