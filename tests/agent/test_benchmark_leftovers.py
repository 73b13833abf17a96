"""A benchmark's folder goes whatever happens; a killed one's is found, and is removed by whoever comes next."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent import protocol
from storage_admin.agent.folders.scratch import Scratch
from storage_admin.agent.programs import tools
from tests.agent.benching import BONNIE, DD, FIO, FORMATS, MIB, PREALLOCATION, args, furnish, marks, measured
from tests.agent.harness import Agent, ask, recover_args
from tests.agent.test_scan import scanned
from tests.harness.filesystems import loop_filesystem, new_folder, new_program
from tests.harness.processes import wait_until
from tests.working import refused_as

pytestmark = pytest.mark.qemu

#: A step that goes on for longer than any test.
LONG: dict[str, Any] = {**FIO[1], "seconds": 60}


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return furnish(tmp_path / "pool")


def working_in(folder: Path) -> list[str]:
    """The programs that have something open below a folder, or have it as their own."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                places = [str(link.readlink()) for link in [*(entry / "fd").iterdir(), entry / "cwd"]]
                if any(place.startswith(str(folder)) for place in places):
                    found.append((entry / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or is the container's own
    return found


def recovered(pool: Path, **more: Any) -> list[dict[str, Any]]:
    """What a recovery says, but for the undo copy that the pool is furnished with."""
    rows = ask("recover", {**recover_args(pool), **more})["recovered"]
    return [row for row in rows if row["job"] != "other"]


def at_work(pool: Path, kind: str = "fio", step: dict[str, Any] = LONG, job: str = "j1", **more: Any) -> Agent:
    """An agent in the midst of a step, its tool at work."""
    agent = Agent()
    agent.request("benchmark", args(pool, kind, [step], **more), job)
    tool = {"bonnie": "bonnie++", "formats": "qemu-img", "preallocation": "qemu-img"}.get(kind, kind)
    wait_until(lambda: tool in working_in(pool / f".sa-{job}.bench"), 20, f"{tool} starts")
    return agent


def test_a_cancelled_benchmark_is_gone_within_seconds_with_its_tools(pool: Path) -> None:
    before = marks(pool)
    with at_work(pool) as agent:
        started = time.monotonic()
        agent.say(protocol.CANCEL)
        assert agent.answer()["code"] == "cancelled"
        assert time.monotonic() - started < 5
    assert marks(pool) == before
    assert not (pool / ".sa-j1.bench").exists()
    assert working_in(pool / ".sa-j1.bench") == []


def test_a_controller_that_goes_away_ends_it(pool: Path) -> None:
    agent = at_work(pool)
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.answer()["code"] == "interrupted"
    agent.process.wait(20)
    agent.close()
    assert not (pool / ".sa-j1.bench").exists()


_LARGE_BONNIE = {**BONNIE[0], "size_bytes": 512 * MIB, "memory_bytes": 256 * MIB, "fast": False}
_LARGE_IMAGE = {**PREALLOCATION[3], "virtual_bytes": 1024 * MIB}
_LARGE_DD = {**DD[0], "count": 1024}


@pytest.mark.parametrize(
    ("kind", "step"),
    [("fio", LONG), ("bonnie", _LARGE_BONNIE), ("preallocation", _LARGE_IMAGE), ("dd", _LARGE_DD)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_killed_agents_tools_end_with_it_and_its_folder_is_recovered(
    pool: Path, kind: str, step: dict[str, Any]
) -> None:
    before, folder = marks(pool), pool / ".sa-j1.bench"
    with at_work(pool, kind, step) as agent:
        agent.process.kill()
    wait_until(lambda: working_in(folder) == [], 10, "the tools end with their agent")
    assert folder.is_dir()
    (row,) = recovered(pool)
    assert (row["job"], row["outcome"], row["undo_bytes"], row["path_b64"]) == ("j1", "reverted", 0, None)
    assert "was removed" in row["detail"]
    assert not folder.exists()
    assert marks(pool) == before
    assert recovered(pool) == []


@pytest.fixture
def killed(pool: Path) -> Path:
    """What a killed benchmark left."""
    with at_work(pool) as agent:
        agent.process.kill()
    return pool / ".sa-j1.bench"


@pytest.mark.parametrize("kind", ["dir", "libvirt", "proxmox"])
def test_a_scan_counts_what_was_left_and_lists_nothing_of_it(pool: Path, kind: str) -> None:
    without = scanned(pool, kind)
    with at_work(pool) as agent:
        during = scanned(pool, kind)
        agent.process.kill()
    (pool / ".sa-j1.bench" / "base.qcow2").write_bytes((pool / "vm.qcow2").read_bytes())
    after = scanned(pool, kind)
    assert [io.one("pool")["leftovers"] for io in (without, during, after)] == [0, 0, 1]
    assert list(without.images()) == list(during.images()) == list(after.images())
    assert after.one("pool")["state"] == "ok"


def test_the_next_benchmark_removes_what_was_left(pool: Path, killed: Path) -> None:
    assert killed.is_dir()
    io, _ = measured(pool, "dd", DD[:1])
    assert not killed.exists()
    assert any(f"{killed} was left by an earlier benchmark" in told["text"] for told in io.all("log"))


def test_a_benchmark_at_work_is_left_alone_by_recovery_and_by_the_next_one(pool: Path) -> None:
    with at_work(pool) as agent:
        (row,) = recovered(pool)
        assert (row["job"], row["outcome"]) == ("j1", "busy")
        measured(pool, "dd", DD[:1])
        assert ask("benchmark", args(pool, "dd", DD[:1]), job="j1")["code"] == "busy"
        assert "fio" in working_in(pool / ".sa-j1.bench")
        agent.say(protocol.CANCEL)
        assert agent.answer()["code"] == "cancelled"


def test_recovery_leaves_alone_what_belongs_to_a_job_that_is_active(pool: Path, killed: Path) -> None:
    (row,) = recovered(pool, jobs_active=["j1"])
    assert row["outcome"] == "busy"
    assert killed.is_dir()


def test_what_only_has_such_a_name_is_left_alone(pool: Path, tmp_path: Path) -> None:
    outside = new_folder(tmp_path / "outside")
    (outside / "disk").write_bytes(b"somebody's")
    (pool / ".sa-link.bench").symlink_to(outside)
    (pool / ".sa-file.bench").write_bytes(b"somebody's")
    for name, mode, owner in ((".sa-open.bench", 0o777, 0), (".sa-others.bench", 0o700, 65534)):
        (pool / name).mkdir()
        (pool / name / "disk").write_bytes(b"somebody's")
        (pool / name).chmod(mode)
        os.chown(pool / name, owner, owner)
    before = {**marks(pool), **marks(outside)}
    assert recovered(pool) == []
    measured(pool, "dd", DD[:1])
    assert {**marks(pool), **marks(outside)} == before
    assert (pool / ".sa-link.bench").is_symlink()
    assert scanned(pool).one("pool")["leftovers"] == 0


def test_a_folder_of_roots_that_somebody_has_given_such_a_name_keeps_what_it_holds(pool: Path) -> None:
    """Who may write to the pool's folder can rename whatever is in it."""
    kept = new_folder(pool / ".sa-j9.bench", mode=0o700)
    (kept / "backup").write_bytes(b"root's")
    assert recovered(pool) == []
    measured(pool, "dd", DD[:1])
    assert [path.name for path in kept.iterdir()] == ["backup"]
    assert (kept / "backup").read_bytes() == b"root's"
    assert scanned(pool).one("pool")["leftovers"] == 0


def test_links_in_what_was_left_are_not_followed(pool: Path, tmp_path: Path, killed: Path) -> None:
    outside = new_folder(tmp_path / "outside")
    (outside / "disk").write_bytes(b"somebody's")
    (killed / "file").symlink_to(outside / "disk")
    (killed / "folder").symlink_to(outside)
    (killed / "deep" / "deeper").mkdir(parents=True)
    (killed / "deep" / "deeper" / "link").symlink_to(outside)
    assert len(recovered(pool)) == 1
    assert not killed.exists()
    assert (outside / "disk").read_bytes() == b"somebody's"


def test_a_folder_without_its_lock_is_removed(pool: Path) -> None:
    """An agent may be killed in the moment after it made the folder, or while it removes it."""
    (pool / ".sa-j9.bench").mkdir(mode=0o700)
    assert scanned(pool).one("pool")["leftovers"] == 1
    assert [row["job"] for row in recovered(pool)] == ["j9"]
    assert not (pool / ".sa-j9.bench").exists()


def test_an_agent_whose_new_folder_was_taken_for_left_behind_gives_up(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def removed_meanwhile(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make(name, mode, dir_fd=dir_fd)
        (pool / name / "lock").touch()

    monkeypatch.setattr(os, "mkdir", removed_meanwhile)
    with pytest.raises(protocol.RefusedError, match="another agent is working"):
        measured(pool, "dd", DD[:1])


def test_a_tool_that_fails_is_said_and_leaves_nothing(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    new_program(tmp_path / "bin" / "fio", '#!/bin/sh\n[ "$1" = --enghelp ] && exit\necho "fio: it broke" >&2\nexit 3\n')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    before = marks(pool)
    with pytest.raises(protocol.HostError, match="fio failed, exit code 3: fio: it broke"):
        measured(pool, "fio", FIO)
    assert marks(pool) == before
    assert not list(pool.glob(".sa-*.bench"))


@pytest.mark.parametrize(("kind", "package"), [("fio", "fio"), ("bonnie", "bonnie++"), ("formats", "qemu-utils")])
def test_a_missing_tool_is_named_with_its_package(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tools, "_SEARCH_PATH", "")
    with pytest.raises(protocol.RefusedError) as refusal:
        measured(pool, kind, {"fio": FIO, "bonnie": BONNIE, "formats": FORMATS}[kind])
    assert refusal.value.code == "tool_missing"
    assert refusal.value.detail.endswith(f"install the package {package}")
    assert not list(pool.glob(".sa-*.bench"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A pool on a filesystem of 96 MiB."""
    with loop_filesystem(tmp_path, 96, make=("-m", "0")) as folder:
        yield folder


def test_what_does_not_fit_is_refused_before_it_is_begun(small: Path) -> None:
    reserve = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize - 20 * MIB
    assert refused_as(measured, small, "dd", DD, reserve_bytes=reserve) == "not_enough_space"
    measured(small, "dd", [{**DD[0], "count": 16}], reserve_bytes=reserve)
    more = {"reserve_bytes": reserve, "others_bytes": {"elsewhere": {"other": 10 * MIB}}}
    assert refused_as(measured, small, "dd", [{**DD[0], "count": 16}], **more) == "not_enough_space"
    assert {path.name for path in small.iterdir()} == {"lost+found"}


def test_guests_that_need_the_room_meanwhile_get_it(small: Path) -> None:
    with at_work(small, reserve_bytes=16 * MIB) as agent:
        taken = os.statvfs(small).f_bavail * os.statvfs(small).f_frsize - 8 * MIB
        with (small / "guest.raw").open("wb") as guest:
            os.posix_fallocate(guest.fileno(), 0, taken)
        answer = agent.answer()
    assert (answer["event"], answer["code"]) == ("error", "not_enough_space")
    assert {path.name for path in small.iterdir()} == {"lost+found", "guest.raw"}


def test_a_disk_that_is_full_in_the_end_is_said(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_admin.agent.host.space.require", lambda *_: None)
    monkeypatch.setattr("storage_admin.agent.host.space.watch", lambda *_: None)
    assert refused_as(measured, small, "dd", [{**DD[0], "count": 128}]) == "not_enough_space"
    assert {path.name for path in small.iterdir()} == {"lost+found"}


def test_a_folder_that_cannot_be_removed_is_told(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scratch.remove

    def with_a_mount(own: Scratch, *rest: Any) -> None:
        (pool / ".sa-job1.bench" / "mount").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", pool / ".sa-job1.bench" / "mount"], check=True)
        original(own, *rest)

    monkeypatch.setattr(Scratch, "remove", with_a_mount)
    try:
        io, _ = measured(pool, "dd", DD[:1])
    finally:
        subprocess.run(["umount", pool / ".sa-job1.bench" / "mount"], check=True)
    assert any("could not be removed:" in told["text"] for told in io.all("log") if told["level"] == "warning")
    assert len(recovered(pool)) == 1
    assert not (pool / ".sa-job1.bench").exists()
