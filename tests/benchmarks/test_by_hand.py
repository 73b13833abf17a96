"""A run's figures are those of the tool run by hand in the same minute: the same work, typed as an admin would."""

import contextlib
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.parsers import reading
from tests.agent.benching import measured

pytestmark = pytest.mark.qemu

MIB = 1 << 20
#: Both are done in turns, so many times before they are looked at, and again where they do not agree: others work here.
ROUNDS, MOST = 3, 12
#: What they may differ by beside their spreads.
BESIDE = 0.25
Figures = dict[str, float]


def said(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def ours(pool: Path, kind: str, steps: list[dict[str, Any]]) -> Figures:
    """One repetition by the agent, its outputs read as the dashboard does."""
    io, _ = measured(pool, kind, [{"setting": {"of": str(number)}} | step for number, step in enumerate(steps)])
    found: Figures = {one["metric"]: one["value"] for one in io.all("sample") if one["value"] is not None}
    for output in io.all("output"):
        step = steps[int(output["setting"]["of"])]
        for one in reading.read(output["tool"], output["text"], step):
            if one.value is not None:
                found[one.metric] = one.value
    return found


def by_dd(folder: Path, source: Path) -> Figures:
    file = folder / "file"
    took = re.compile(r"copied, ([0-9.e-]+) s")
    (wrote,) = took.findall(said(["dd", f"if={source}", f"of={file}", "bs=1M", "oflag=direct"]))
    (read,) = took.findall(said(["dd", f"if={file}", "of=/dev/null", "bs=1M", "iflag=direct"]))
    size = file.stat().st_size
    file.unlink()
    return {"write_rate": size / float(wrote), "read_rate": size / float(read)}


def by_fio(folder: Path, _source: Path) -> Figures:
    common = ["fio", "--name=mine", f"--directory={folder}", "--size=32M", "--direct=1", "--ioengine=libaio"]
    common += ["--output-format=terse", "--terse-version=3", "--thread"]
    read = said([*common, "--rw=randread", "--bs=4k", "--iodepth=8", "--runtime=1", "--time_based"])
    # HOWTO of fio, "Terse output": the eighth field is how many were read a second.
    told = {"rand_read_iops": float(read.split(";")[7])}
    for file in folder.iterdir():
        file.unlink()
    return told


def by_bonnie(folder: Path, size: int) -> Figures:
    """A file of so many MiB."""
    as_root = ["-u", "root"] if os.geteuid() == 0 else []
    line = said(["bonnie++", "-d", str(folder), "-s", str(size), "-n", "0", "-r", str(size // 2), "-f", "-q", *as_root])
    line = next(row for row in line.splitlines() if row.startswith(("1.9", "2.")))
    return {one.metric: one.value for one in reading.read("bonnie++", line, {}) if one.value is not None}


def by_qemu_img(folder: Path, _source: Path) -> Figures:
    image = folder / "image.qcow2"
    began = time.monotonic()
    said(["qemu-img", "create", "-q", "-f", "qcow2", "-o", "preallocation=full", str(image), "64M"])
    said(["sync", str(image)])
    created = time.monotonic() - began
    told = said(["qemu-img", "bench", "-w", "-t", "none", "-c", "512", "-d", "8", "-s", "64k", "--flush-interval=512",
                 "-f", "qcow2", str(image)])  # fmt: skip
    (took,) = re.findall(r"Run completed in ([0-9.]+) seconds", told)
    image.unlink()
    return {"create_seconds": created, "write_seconds": float(took), "write_rate": 32 * MIB / float(took)}


DD = [
    {"mode": mode, "block_bytes": MIB, "count": 64, "sync": "direct"} | ({"data": "random"} if mode == "write" else {})
    for mode in ("write", "read")
]
FIO = [{"rw": "randread", "block_bytes": 4096, "size_bytes": 32 * MIB, "seconds": 1, "iodepth": 8, "jobs": 1,
        "direct": True}]  # fmt: skip
CREATED = [{"preallocation": "full", "cluster_bytes": 65536, "virtual_bytes": 64 * MIB, "write_bytes": 32 * MIB,
            "block_bytes": 65536}]  # fmt: skip


#: The one that it can always tell.
BONNIES = {"seq_write_rate"}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder, on a disk, that ours and theirs lie beside each other in."""
    for name in ("pool", "hand"):
        (tmp_path / name).mkdir()
    yield tmp_path
    assert not list((tmp_path / "pool").iterdir())


@pytest.mark.parametrize(
    ("kind", "steps", "by_hand", "metrics"),
    [
        ("dd", DD, by_dd, {"write_rate", "read_rate"}),
        ("fio", FIO, by_fio, {"rand_read_iops"}),
        ("preallocation", CREATED, by_qemu_img, {"create_seconds", "write_seconds", "write_rate"}),
    ],
)
def test_a_figure_is_what_the_tool_says_by_hand(
    place: Path, kind: str, steps: list[dict[str, Any]], by_hand: Callable[[Path, Path], Figures], metrics: set[str]
) -> None:
    source = place / "random"
    source.write_bytes(os.urandom(64 * MIB))
    source.read_bytes()  # into memory: what is measured is the writing
    agree(lambda: ours(place / "pool", kind, steps), lambda: by_hand(place / "hand", source), metrics)


@pytest.mark.night
def test_bonnies_rate_is_what_bonnie_says_by_hand(place: Path) -> None:
    for size in (256, 512, 1024, 2048, 4096):
        step = {
            "size_bytes": size * MIB, "memory_bytes": size // 2 * MIB, "files": 0, "fast": True, "unbuffered": False,
        }  # fmt: skip
        with contextlib.suppress(KeyError):  # it was too quick to measure: +++++
            agree(partial(ours, place / "pool", "bonnie", [step]), partial(by_bonnie, place / "hand", size), BONNIES, 2)
            return
    raise AssertionError("the disk is too quick for bonnie++")


def agree(run: Callable[[], Figures], by_hand: Callable[[], Figures], metrics: set[str], rounds: int = ROUNDS) -> None:
    mine: list[Figures] = []
    theirs: list[Figures] = []
    apart = {"": 0.0}
    while apart and len(mine) < MOST:
        for _ in range(rounds):
            told, by = run(), by_hand()
            mine.append({name: told[name] for name in metrics})
            theirs.append({name: by[name] for name in metrics})
        apart = {name: ratio for name in metrics if (ratio := beyond([one[name] for one in mine],
                                                                     [one[name] for one in theirs]))}  # fmt: skip
    assert not apart, (apart, mine, theirs)


def beyond(mine: list[float], theirs: list[float]) -> float:
    """The ratio of the medians, where that lies outside of what both spread; else 0."""
    ratio = median(mine) / median(theirs)
    spread = math.log(max(mine) / min(mine)) + math.log(max(theirs) / min(theirs))
    return ratio if abs(math.log(ratio)) > spread + BESIDE else 0
