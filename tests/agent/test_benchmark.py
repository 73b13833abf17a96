"""Every kind of benchmark with the real tools, and what it leaves as it was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from storage_admin.agent import bundle, protocol
from storage_admin.agent.bench import step as bench_step
from storage_admin.agent.bench.qemu_bench import Guest
from storage_admin.agent.folders.scratch import Scratch
from storage_admin.agent.host import space
from tests.agent.benching import (
    BONNIE,
    CLUSTER_SIZE,
    DD,
    FIO,
    FORMATS,
    KIB,
    KINDS,
    MIB,
    MODES,
    PREALLOCATION,
    args,
    furnish,
    marks,
    measured,
    samples,
)
from tests.agent.harness import ask, heard
from tests.working import refused_as

pytestmark = pytest.mark.qemu


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return furnish(tmp_path / "pool")


def test_dd_says_what_it_wrote_and_read_back(pool: Path) -> None:
    io, result = measured(pool, "dd", DD, repetitions=2)
    outputs = io.all("output")
    told = [(one["tool"], one["setting"]["mode"], one["setting"]["sync"], one["repetition"]) for one in outputs]
    once = [("write", "fdatasync"), ("read", "fdatasync"), ("write", "direct"), ("read", "direct")]
    assert told == [("dd", *step, repetition) for repetition in (1, 2) for step in once]
    for one in outputs:
        assert re.search(rf"^{24 * MIB} bytes .* copied, [0-9.]+ s, ", one["text"], re.MULTILINE), one["text"]
    assert result["steps"] == 8
    assert result["caches"] == "dropped"
    assert 24 * MIB <= result["scratch_bytes_at_most"] < 25 * MIB
    assert 4 * 24 * MIB <= result["bytes_written"] < 5 * 24 * MIB
    flags = [[word for word in command["argv"] if "flag=" in word or "conv=" in word] for command in io.all("command")]
    assert flags[:4] == [["iflag=fullblock", "conv=fdatasync"], [], ["oflag=direct"], ["iflag=direct"]]


def test_dd_writes_random_data_unless_asked_for_zeros(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def keep(scratch: Scratch, *_: object) -> None:
        with os.fdopen(scratch.open("dd.data"), "rb") as file:
            seen.append(file.read())
        original(scratch, *_)  # type: ignore[arg-type]

    original = Scratch.remove
    monkeypatch.setattr(Scratch, "remove", keep)
    write = {**DD[0], "count": 40}
    measured(pool, "dd", [write])
    measured(pool, "dd", [{**write, "data": "zero"}])
    assert [len(content) for content in seen] == [40 * MIB] * 2
    assert all(any(seen[0][start : start + 4096]) for start in range(0, 40 * MIB, 4096))
    assert len({seen[0][start : start + 4096] for start in range(0, 32 * MIB, 4096)}) == 32 * MIB // 4096
    assert not any(seen[1])


def test_bonnie_gives_its_line(pool: Path) -> None:
    io, result = measured(pool, "bonnie", BONNIE)
    output = io.one("output")
    (line,) = output["text"].splitlines()
    fields = line.split(",")
    assert (output["tool"], fields[2], fields[5]) == ("bonnie++", "job1", "16M")
    assert fields[0] in {"1.96", "1.97", "1.98", "2.00"}
    assert len(fields) > 40
    assert result["caches"] == "not dropped"
    assert "its file has 16 MiB, and it was run for 8 MiB of memory (-r)" in io.one("note")["text"]


def test_fio_gives_its_json(pool: Path) -> None:
    io, result = measured(pool, "fio", FIO)
    for output, step in zip(io.all("output"), FIO, strict=True):
        assert output["setting"] == step["setting"]
        (job,) = json.loads(output["text"])["jobs"]
        side = job["read" if step["rw"] == "randread" else "write"]
        assert side["io_bytes"] > 0
        assert side["iops"] > 0
        assert side["clat_ns"]["percentile"]["99.000000"] > 0
    assert result["caches"] == "direct"
    assert sum(command["argv"] == ["fio", "--enghelp"] for command in io.all("command")) == 1
    assert 8 * MIB <= result["scratch_bytes_at_most"] < 9 * MIB


def test_preallocation_shows_what_each_takes_of_the_disk(pool: Path) -> None:
    io, result = measured(pool, "preallocation", PREALLOCATION)
    physical = list(samples(io, "physical_bytes").values())
    off, metadata, falloc, full = physical
    assert off < MIB
    assert off < metadata < MIB
    assert falloc >= 64 * MIB
    assert full >= 64 * MIB
    for metric, unit in (("create_seconds", "s"), ("write_seconds", "s"), ("write_rate", "B/s")):
        told = [one for one in io.all("sample") if one["metric"] == metric]
        assert [one["setting"] for one in told] == [step["setting"] for step in PREALLOCATION]
        assert all(one["unit"] == unit and one["repetition"] == 1 for one in told)
    for step, seconds in samples(io, "write_seconds").items():
        rate = samples(io, "write_rate")[step]
        assert rate is None or abs(rate * seconds - 8 * MIB) < 0.01 * 8 * MIB
    assert result["scratch_bytes_at_most"] >= 64 * MIB


def test_small_clusters_are_slower_to_write_than_large_ones(pool: Path) -> None:
    io, _ = measured(pool, "cluster_size", CLUSTER_SIZE)
    seconds = list(samples(io, "write_seconds").values())
    assert len(seconds) == 3
    assert seconds[0] > seconds[2]
    created = [command["argv"] for command in io.all("command") if command["argv"][1] == "create"]
    options = [argv[argv.index("-o") + 1] for argv in created]
    assert options == [
        "preallocation=off,cluster_size=512",
        "preallocation=off,cluster_size=65536,extended_l2=on",
        "preallocation=off,cluster_size=2097152",
    ]


def test_what_is_too_quick_to_be_measured_has_no_figure(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_step, "_QUICKEST", 60.0)  # a disk that others use may take its time for a sector
    io, _ = measured(pool, "preallocation", [{**PREALLOCATION[1], "write_bytes": 512, "block_bytes": 512}])
    told = {one["metric"]: (one["value"], one.get("note")) for one in io.all("sample")}
    assert told["write_seconds"] == told["write_rate"] == (None, "too quick to measure")
    assert told["create_seconds"][0] > 0


def test_formats_measure_the_same_data_in_each_layout(pool: Path) -> None:
    io, result = measured(pool, "formats", FORMATS)
    for metric in ("seq_read_rate", "rand_read_iops", "rand_write_iops", "seq_write_rate", "physical_bytes"):
        assert list(samples(io, metric)) == [json.dumps(step["setting"]) for step in FORMATS], metric
    physical = {json.loads(setting)["layout"]: size for setting, size in samples(io, "physical_bytes").items()}
    assert 16 * MIB <= physical["raw"] < 17 * MIB
    assert 16 * MIB <= physical["qcow2"] < 17 * MIB
    for compressed in ("zlib", "zstd"):  # half of the data is random
        assert 8 * MIB < physical[compressed] < 10 * MIB
    chain = [command["argv"] for command in io.all("command") if "-b" in command["argv"]]
    assert [argv[argv.index("-b") + 1] for argv in chain[-3:]] == ["base.qcow2", "overlay1.qcow2", "overlay2.qcow2"]
    assert result["caches"] == "dropped"  # the chain was read through the cache


def test_formats_that_are_read_past_the_cache_say_so(pool: Path) -> None:
    _, result = measured(pool, "formats", FORMATS[1:2])
    assert result["caches"] == "direct"


def test_modes_are_those_that_qemu_is_asked_for_and_all_work_on_one_file(pool: Path) -> None:
    io, result = measured(pool, "modes", MODES)
    for metric in ("rand_read_iops", "rand_write_iops", "seq_read_rate", "seq_write_rate"):
        assert list(samples(io, metric)) == [json.dumps(step["setting"]) for step in MODES], metric
    asked = [command["argv"] for command in io.all("command") if "bench" in command["argv"]]
    pairs = [(argv[argv.index("-t") + 1], argv[argv.index("-i") + 1]) for argv in asked]
    assert list(dict.fromkeys(pairs)) == [(step["cache"], step["io"]) for step in MODES]
    assert result["caches"] == "dropped"
    assert result["scratch_bytes_at_most"] < 17 * MIB


def test_cached_modes_go_through_the_cache_also_where_it_cannot_be_dropped(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage_admin.agent.bench.caches.drop", lambda *_: False)
    io, result = measured(pool, "modes", MODES[2:3])
    assert result["caches"] == "not dropped"
    assert all("direct I/O" not in note["text"] for note in io.all("note"))
    assert "writeback" in next(command["argv"] for command in io.all("command") if "bench" in command["argv"])


def test_a_way_that_the_host_cannot_go_is_left_out_with_a_note(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Guest.probe

    def probe(guest: Guest) -> None:
        if guest.io == "io_uring":
            raise protocol.HostError("Could not open: Function not implemented")
        run(guest)

    monkeypatch.setattr(Guest, "probe", probe)
    io, _ = measured(pool, "modes", MODES[:2])
    assert list(samples(io, "rand_read_iops")) == [json.dumps(MODES[0]["setting"])]
    assert "io_uring" in io.all("note")[0]["text"]


@pytest.mark.parametrize("name", [b"json:{},a=b:c %s", "-o \n ü{}".encode() + b"\xff"])
def test_a_pool_may_have_any_name(tmp_path: Path, name: bytes) -> None:
    pool = furnish(tmp_path / os.fsdecode(name))
    before = marks(pool)
    for kind, steps in KINDS.items():
        io, _ = measured(pool, kind, steps[-1:] if kind == "formats" else steps[:1])
        assert io.all("sample") or io.all("output")
    assert marks(pool) == before


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_of_the_pool_is_changed(pool: Path, kind: str) -> None:
    before = marks(pool)
    measured(pool, kind, KINDS[kind])
    assert marks(pool) == before
    assert not list(pool.glob(".sa-*.bench"))


_OPENED = re.compile(r"(?:openat|open|creat)\(.*(?:O_WRONLY|O_RDWR|O_CREAT).*\) = \d+<([^>]*)>")
#: Calls that change a name, with the folder that their names are in.
_NAMED = re.compile(r"(?:unlinkat|mkdirat|renameat2?|linkat|symlinkat)\((?:AT_FDCWD<[^>]*>|\d+<([^>]*)>), \"([^\"]*)\"")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outside_of_its_own_folder_is_opened_for_writing(pool: Path, tmp_path: Path, kind: str) -> None:
    trace, own = tmp_path / "trace", f"{pool}/.sa-j1.bench"
    calls = "open,openat,creat,unlink,unlinkat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,truncate"
    strace = ["strace", "-f", "-y", "-q", "-o", str(trace), "-e", f"trace={calls}"]
    command = [*strace, sys.executable, "-B", "-m", "storage_admin.agent"]
    assert ask("benchmark", args(pool, kind, KINDS[kind][:2]), command=command)["steps"] == len(KINDS[kind][:2])
    written = set()
    for line in trace.read_text(errors="replace").splitlines():
        if opened := _OPENED.search(line):
            written.add(opened[1])
        elif named := _NAMED.search(line):
            written.add(os.path.normpath(os.path.join(named[1] or "", named[2])))  # noqa: PTH118
    assert any(path.startswith(own + "/") for path in written)
    # A C library may keep named semaphores and thread stacks in shared memory, which is no disk.
    # The last is where it tells other agents what it has yet to write.
    harmless = (own, "/dev/null", "/dev/shm/", "/proc/sys/vm/drop_caches", "/memfd:", "/sys/fs/cgroup/")
    assert {path for path in written if not path.startswith((*harmless, space.FOLDER))} == set()


def test_the_agent_tells_its_surroundings_before_and_after(pool: Path) -> None:
    result, events = heard("benchmark", args(pool, "cluster_size", CLUSTER_SIZE[2:], repetitions=2))
    kinds = [event["event"] for event in events]
    assert kinds.index("environment") < kinds.index("sample")
    assert kinds[-2:] == ["environment_after", "result"]
    told = next(event["data"] for event in events if event["event"] == "environment")
    assert told["kernel"] == os.uname().release
    assert told["tools"]["fio"] == subprocess.check_output(["fio", "--version"], text=True).strip()[4:]
    assert told["tools"]["qemu-img"] in subprocess.check_output(["qemu-img", "--version"], text=True)
    where = subprocess.check_output(["findmnt", "-no", "FSTYPE,SOURCE", "-T", pool], text=True).split()
    assert [told["filesystem"], told["mount_source"]] == where
    assert told["drop_caches"] is (os.geteuid() == 0)
    assert len(told["load"]) == 3
    assert result["steps"] == 2
    repetitions = [event["repetition"] for event in events if event["event"] == "sample"]
    assert repetitions == [1] * 4 + [2] * 4
    stages = [event for event in events if event["event"] == protocol.PROGRESS]
    assert (stages[-1]["stage"], stages[-1]["done"], stages[-1]["total"]) == ("cluster_size", 2, 2)


def test_a_tools_words_are_those_of_the_tool_by_hand(pool: Path) -> None:
    """The command that the log shows, run by hand in the same minute, on a file of the same size."""
    io, _ = measured(pool, "dd", [{**DD[2], "count": 64}], repetitions=3)
    shown = io.all("command")[0]["argv"]
    assert shown[0] == "dd"
    assert f"of={pool}/.sa-job1.bench/dd.data" in shown
    by_hand = [word.replace(".sa-job1.bench/dd.data", "by-hand") for word in shown]
    said = [subprocess.run(by_hand, capture_output=True, text=True, check=True).stderr for _ in range(3)]

    def rates(texts: list[str]) -> list[float]:
        return sorted(64 * MIB / float(re.findall(r"copied, ([0-9.e-]+) s", text)[0]) for text in texts)

    ours, theirs = rates([one["text"] for one in io.all("output")]), rates(said)
    # The machine has other work: the ranges meet, when each is made twice as wide.
    assert ours[0] / 2 < theirs[-1] * 2
    assert theirs[0] / 2 < ours[-1] * 2


def _step(kind: str, **changes: Any) -> dict[str, Any]:
    return {**KINDS[kind][0], **changes}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("dd", {"argv": ["of=/dev/sda"]}),
        ("dd", {"block_bytes": 1000}),
        ("dd", {"mode": "read"}),
        ("dd", {"count": 0}),
        ("dd", {"count": True}),
        ("dd", {"sync": "fdatasync of=/etc/passwd"}),
        ("dd", {"setting": {"name": "x" * 101}}),
        ("dd", {"setting": {"A B": 1}}),
        ("dd", {"setting": {"nested": {}}}),
        ("bonnie", {"size_bytes": 1}),
        ("bonnie", {"files": 4096}),
        ("fio", {"rw": "trim"}),
        ("fio", {"rw": "read --filename=/dev/sda"}),
        ("fio", {"jobs": 0}),
        ("fio", {"size_bytes": 512}),
        ("preallocation", {"preallocation": "off,encryption=on"}),
        ("preallocation", {"write_bytes": 128 * MIB}),
        ("cluster_size", {"cluster_bytes": 3 * KIB}),
        ("cluster_size", {"extended_l2": True}),
        ("formats", {"layout": "vmdk"}),
        ("formats", {"depth": 65}),
        ("formats", {"data_bytes": 64 * MIB}),
        ("modes", {"cache": "unsafe"}),
        ("modes", {"io": "native -f"}),
        ("modes", {"cache": "writeback"}),
        ("modes", {"data_bytes": 64 * KIB}),
    ],
)
def test_a_step_that_is_not_as_it_should_be_is_refused_before_anything_is_made(
    pool: Path, kind: str, change: dict[str, Any]
) -> None:
    assert refused_as(measured, pool, kind, [_step(kind, **change)]) == "invalid"
    assert not list(pool.glob(".sa-*.bench"))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "nbd"},
        {"kind": "step"},
        {"steps": []},
        {"steps": [DD[0]] * 401},
        {"steps": ["dd"]},
        {"repetitions": 21},
        {"reserve_bytes": -1},
        {"reserve_bytes": None},
        {"target_b64": "L2Rldi9zZGE="},
    ],
)
def test_a_request_that_is_not_as_it_should_be_is_refused(pool: Path, change: dict[str, Any]) -> None:
    assert refused_as(measured, pool, **{"kind": "dd", "steps": DD, **change}) == "invalid"


def test_the_agent_runs_benchmarks_from_its_bundle(pool: Path, tmp_path: Path) -> None:
    built = bundle.build(tmp_path / "data" / "agent")
    command = [sys.executable, str(built.path)]
    assert ask("benchmark", args(pool, "dd", DD[:2]), command=command, env={"PYTHONPATH": ""})["steps"] == 2
