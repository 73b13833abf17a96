"""The memory of the agent and its tools does not grow with an image: 1 GiB and 1 TiB with the same little data."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.agent.aside import pool_of
from tests.agent.harness import ask, link, location, look_at, qemu_img, reclaim_args, write

pytestmark = pytest.mark.qemu

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
#: qemu-img's rebase reads all that a guest could see, zeros as well: minutes for a TiB.
LARGE = {"flatten by rebase": 8 * GIB}
#: How much more a TiB may take than a GiB.
GROWTH = 64 * MIB

Args = Callable[[Path, str], dict[str, Any]]


@dataclass(frozen=True)
class Peak:
    """Bytes of memory at most, of the agent and of the largest of its tools."""

    agent: int
    tools: int


def make(path: Path, size: int, form: str, *more: str) -> Path:
    """An image with some MiB of data at its beginning, in its middle and at its end, and some zeros among them."""
    qemu_img("create", "-q", "-f", form, *more, path, str(size))
    for number, place in enumerate((0, size // 2, size - 2 * MIB)):
        write(path, 0x61 + number, str(place), "1M", form)
        write(path, 0, str(place + MIB), "1M", form)
    return path


def measured(verb: str, args: dict[str, Any], report: Path) -> Peak:
    """Has a real agent do it, to the end; how much memory that took."""
    command = [sys.executable, "-m", "tests.agent.measured_agent", str(report)]
    answer = ask(verb, args, command=command)
    assert "code" not in answer, answer
    return Peak(*map(int, report.read_text().split()))


def rewrite(**changes: Any) -> Args:
    def args(path: Path, form: str) -> dict[str, Any]:
        asked = reclaim_args(path, format=form, **changes)
        return {name: value for name, value in asked.items() if name != "method" or "method" in changes}

    return args


def analysis(mode: str) -> Args:
    def args(path: Path, form: str) -> dict[str, Any]:
        return {**look_at(path, form), "mode": mode}

    return args


def scan(path: Path, form: str) -> dict[str, Any]:
    return {"pools": [{"id": 1, **pool_of(path.parent)}], "named_b64": [], "probe_b64": []}


def flatten(method: str) -> Args:
    def args(path: Path, form: str) -> dict[str, Any]:
        overlay = path.with_name("overlay.qcow2")
        qemu_img("create", "-q", "-f", "qcow2", "-b", path, "-F", form, overlay)
        write(overlay, 0x71, "1M", "1M")
        return {**reclaim_args(overlay, method=method), "chain": [link(path, form=form)]}

    return args


def conversion(path: Path, form: str) -> dict[str, Any]:
    other = "raw" if form == "qcow2" else "qcow2"
    target = location(path.with_name(f"converted.{other}")) | {"format": other, "options": {}}
    return {**rewrite()(path, form), "target": target}


VERBS: dict[str, tuple[str, Args, tuple[str, ...]]] = {
    "scan": ("scan", scan, ("qcow2", "raw")),
    "analyze a sample": ("analyze", analysis("sample"), ("qcow2", "raw")),
    "analyze fully": ("analyze", analysis("full"), ("qcow2", "raw")),
    "reclaim by compress": ("reclaim", rewrite(method="compress"), ("qcow2",)),
    "reclaim by copy": ("reclaim", rewrite(method="copy"), ("qcow2", "raw")),
    "reclaim in place": ("reclaim", rewrite(method="in_place"), ("qcow2", "raw")),
    "flatten by rebase": ("flatten", flatten("rebase"), ("qcow2",)),
    "flatten by convert": ("flatten", flatten("convert"), ("qcow2", "raw")),
    "convert": ("convert", conversion, ("qcow2", "raw")),
    "check": ("check", rewrite(repair="none"), ("qcow2",)),
    "repair leaks": ("check", rewrite(repair="leaks"), ("qcow2",)),
    "repair all": ("check", rewrite(repair="all"), ("qcow2",)),
}
CASES = [(name, form) for name, (_, _, forms) in VERBS.items() for form in forms]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "form"), CASES, ids=[f"{name}-{form}" for name, form in CASES])
def test_a_tebibyte_takes_no_more_memory_than_a_gibibyte(tmp_path: Path, name: str, form: str) -> None:
    verb, args, _ = VERBS[name]
    peaks = []
    for size in (GIB, LARGE.get(name, TIB)):
        folder = tmp_path / str(size)
        folder.mkdir()
        path = make(folder / f"vm.{form}", size, form)
        peaks.append(measured(verb, args(path, form), folder / "report"))
    print(f"{name}, {form}: {[(peak.agent // MIB, peak.tools // MIB) for peak in peaks]} MiB of agent and tools")
    assert peaks[1].agent < peaks[0].agent + GROWTH
    assert peaks[1].tools < peaks[0].tools + GROWTH
