"""The parts that a benchmark's figures rest on: caches, random places, random data, what a host is like."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_admin.agent.bench import caches, environment
from storage_admin.agent.bench.dd import random_data
from storage_admin.agent.bench.layouts import compressible
from storage_admin.agent.bench.qemu_bench import jump
from storage_admin.agent.folders.scratch import Scratch
from storage_admin.agent.host import facts
from tests.agent.benching import DD, FORMATS, MIB, measured
from tests.agent.harness import held_open
from tests.harness.filesystems import loop_filesystem, mounted, new_folder, new_program


@given(blocks=st.integers(1, 3000), most=st.integers(1, 4000))
def test_random_places_are_all_visited_once(blocks: int, most: int) -> None:
    step = jump(blocks, most)
    assert 1 <= step <= most
    assert len({number * step % blocks for number in range(blocks)}) == blocks


def test_random_places_lie_far_apart() -> None:
    for blocks in (4096, 262_144, 1 << 20):
        step = jump(blocks, 1 << 30)
        assert 0.5 * blocks < step < 0.7 * blocks


def test_dropped_files_are_not_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(3 * MIB + 100))
    with (tmp_path / "file").open("rb") as file:
        file.read()
        assert caches.resident_pages(file.fileno()) > 700
        assert caches.drop([file.fileno()], "ext4") is True
        assert caches.resident_pages(file.fileno()) == 0


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A pool in memory, from which nothing can be dropped."""
    with mounted("none", new_folder(tmp_path / "memory"), "-t", "tmpfs", "-o", "size=64m") as folder:
        yield folder


@pytest.mark.qemu
def test_what_cannot_be_dropped_is_read_past_the_cache_or_said_not_to_be(in_memory: Path) -> None:
    io, result = measured(in_memory, "dd", DD[:2])
    (note,) = [told["text"] for told in io.all("note")]
    assert note.startswith("caches could not be dropped")
    read = io.all("command")[1]["argv"]
    assert result["caches"] == ("direct" if "iflag=direct" in read else "not dropped")


@pytest.mark.qemu
def test_without_direct_access_caches_are_dropped_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scratch, "direct_works", lambda _: False)
    io, result = measured(tmp_path, "dd", DD[2:])
    assert result["caches"] == "dropped"
    assert not any("flag=direct" in word for command in io.all("command") for word in command["argv"])
    assert "does not support direct I/O" in io.one("note")["text"]


@pytest.mark.qemu
def test_conversions_without_direct_access_start_from_dropped_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scratch, "direct_works", lambda _: False)
    io, result = measured(tmp_path, "formats", FORMATS[1:2])
    assert result["caches"] == "dropped"
    tools = [command["argv"][:2] for command in io.all("command")]
    assert tools == [["qemu-img", "convert"], *[["qemu-img", "bench"]] * 6]
    assert not any("none" in command["argv"] for command in io.all("command"))


def test_random_data_does_not_end_and_its_pipe_closes() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with random_data() as source:
        read = b"".join(os.read(source, MIB) for _ in range(200))
        assert len(set(read[:4096])) > 200
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_half_of_the_data_can_be_compressed_away() -> None:
    import zlib  # noqa: PLC0415

    data = compressible(MIB + 512)
    assert len(data) == MIB + 512
    assert 0.5 < len(zlib.compress(data)) / len(data) < 0.6
    assert all(any(data[start : start + 512]) for start in range(0, len(data), 512))


def test_a_scan_tells_the_tools_that_storage_is_measured_with() -> None:
    host = facts.host_event()
    assert host["tools"]["fio"] is host["tools"]["bonnie++"] is True
    fio = subprocess.check_output(["fio", "--version"], text=True).strip()
    assert f"fio-{host['tool_versions']['fio']}" == fio
    bonnie = subprocess.run([shutil.which("bonnie++", path="/usr/sbin:/usr/bin") or ""], capture_output=True, text=True)
    assert f"Version: {host['tool_versions']['bonnie++']}\n" in bonnie.stdout + bonnie.stderr
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host["memory_bytes"] == pages


def test_a_tool_that_does_not_say_its_version_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in (("fio", "#!/bin/sh\necho no idea\n"), ("bonnie++", "no program\n")):
        new_program(tmp_path / name, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert facts.tool_versions(["fio", "bonnie++", "nothing"]) == {"fio": None, "bonnie++": None, "nothing": None}


def test_the_device_below_a_folder_is_told(tmp_path: Path) -> None:
    with loop_filesystem(tmp_path, 16, options="noatime,nodiratime") as folder, held_open(folder) as fd:
        told = environment.before(fd)
        disk = Path(told["mount_source"]).name
        queue = Path(f"/sys/block/{disk}/queue")
        assert told["device"]["disk"] == disk
        assert told["device"]["rotational"] is ((queue / "rotational").read_text().strip() == "1")
        assert f"[{told['device']['scheduler']}]" in (queue / "scheduler").read_text()
        assert told["filesystem"] == "ext4"
        assert "noatime" in told["mount_options"].split(",")


def test_a_folder_in_memory_has_no_device(in_memory: Path) -> None:
    with held_open(in_memory) as fd:
        assert environment.before(fd)["device"] is None


def test_the_greeting_costs_no_benchmark_module() -> None:
    """The agent starts for every job; what a benchmark needs is loaded for benchmarks alone."""
    asked = "import sys; import storage_admin.agent.main; print([n for n in sys.modules if '.bench' in n])"
    assert subprocess.check_output([sys.executable, "-c", asked], text=True).strip() == "[]"
