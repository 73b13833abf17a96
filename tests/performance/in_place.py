"""``reclaim`` by ``in_place`` beside a bare ``qemu-img convert``, on several filesystems and in several states."""

import contextlib
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from images.models import Image
from images.rewrite import space
from storage_admin.accounts.models import SYSTEM
from storage_admin.agent.protocol import RESULT, Request
from storage_admin.hosts import transport
from storage_admin.hosts.services import ensure_local_host, register_folder
from storage_admin.hosts.session import AgentSession
from tests.agent.harness import held_open, reclaim_args
from tests.harness.filesystems import loop_filesystem, new_folder
from tests.performance.images import filled, warm
from tests.performance.jobs import run_job
from tests.performance.report import Row, ratio, seconds
from tests.performance.site import timed

NOTES = (
    (
        "In place: an image as for the reclaim, in which all free space was filled with zeros: 64 % of its file is a "
        "few long runs of them. Measured is the verb, from the start of the agent to its end: who uses the image, "
        "`qemu-img check`, reading, holes, fsync, attributes; idle priority off. `as a job` is all that the worker "
        "does, with the rows of the database, as for the reclaim. Bare is `qemu-img convert -O qcow2` into the same "
        "filesystem, which syncs nothing, compares nothing and gives no space back before the original is removed. "
        "Both had the image read once before (warm cache) or taken out of the page cache (cold). The best of some "
        "rounds in turn, as other programs can only make it slower. The first row and the job are on ext4 with its "
        "usual options (a loop device), as installers set it up; the others say how it is elsewhere. On a filesystem "
        "that is mounted with `discard` and has no journal, the disk is informed of each hole while the work waits for "
        "it: then the disk's speed decides. `many small runs`: 512 MiB of data and zeros in turn, each 64 KiB long."
    ),
)
ROUNDS = 5
FEWER = 2
#: How many times as fast as bare it has to be: the verb, all that the worker does, and where disks are told of holes.
VERB, JOB, DISCARD = 1.8, 1.4, 1.0


@dataclass(frozen=True)
class Side:
    """How long something took at best, in seconds of the clock and of processor."""

    wall: float
    processor: float


def measure(folder: Path) -> list[Row]:
    """The judged row, and those that say how it is in other places and states."""
    source, small = filled(folder, "zeros.qcow2"), _small_runs(folder)
    rows: list[Row] = []
    with _filesystem(folder, "ext4") as place:
        bare, dug = _best(source, place, warm, ROUNDS)
        beside = "bare qemu-img convert -O qcow2"
        rows.append(ratio("reclaim in place, no scratch space", dug.wall, beside, bare.wall, VERB))
        rows.append(_row("the same, processor time", dug.processor, bare.processor))
        pool = register_folder(SYSTEM, ensure_local_host(), str(place))
        rows.append(_pair("the same, as a job", *_best(source, place, warm, FEWER, _job), JOB))
        rows.append(_pair("the same, many small runs of zeros", *_best(small, place, warm, FEWER)))
        rows.append(_estimate(source, place))
        pool.delete()
    with _filesystem(folder, "xfs") as place:
        rows.append(_pair("the same, on xfs", *_best(source, place, warm, FEWER)))
    here = new_folder(folder / "in_place")
    kind = _mounted(here)
    rows += _warm_and_cold(kind, source, here)
    if not _discards(kind):
        with _filesystem(folder, "ext4", "discard") as place:
            rows += _warm_and_cold(_mounted(place), source, place)
    for path in (source, small):
        path.unlink()
    shutil.rmtree(here)
    return rows


def _warm_and_cold(kind: str, source: Path, place: Path) -> list[Row]:
    """Judged where the disk is informed of each hole."""
    at_least = DISCARD if _discards(kind) else None
    return [
        _pair(f"the same, on {kind}", *_best(source, place, warm, FEWER), at_least),
        _pair(f"the same, on {kind}, cold cache", *_best(source, place, _cool, FEWER), at_least),
    ]


def _pair(work: str, bare: Side, dug: Side, at_least: float | None = None) -> Row:
    return ratio(work, dug.wall, "bare", bare.wall, at_least) if at_least else _row(work, dug.wall, bare.wall)


def _row(work: str, dug: float, bare: float) -> Row:
    return Row(work, seconds(dug), f"bare: {seconds(bare)}", f"{bare / dug:.1f} times as fast", "", True)


def _estimate(source: Path, place: Path) -> Row:
    """What the sample says that digging wins, beside what it wins."""
    image = place / "image.qcow2"
    _copy(source, image)
    run_job("scan", ensure_local_host().pk)
    row = Image.objects.get(path=str(image))
    run_job("analyze", row.pk)
    row.refresh_from_db()
    predicted = space.predicted(row, "in_place").after
    result = run_job("reclaim", row.pk, {"method": "in_place"})[0].result
    assert predicted is not None
    assert result is not None
    won = result["before_bytes"] - result["after_bytes"]
    error = abs(result["after_bytes"] - predicted) / won
    image.unlink()
    return Row(
        "estimate of what is won in place", "sample of an image", "bytes really won",
        f"{error:.1%} off", "within 5 %", error <= 0.05,
    )  # fmt: skip


def _best(
    source: Path,
    place: Path,
    prepare: Callable[[Path], None],
    rounds: int,
    reclaim: Callable[[Path], Callable[[], float]] | None = None,
) -> tuple[Side, Side]:
    """Of some rounds in turn: bare, and in place."""
    original, image, out = place / "original.qcow2", place / "image.qcow2", place / "bare.qcow2"
    _copy(source, original)
    bare, dug = [], []
    for _ in range(rounds):
        prepare(original)
        bare.append(_timed(partial(timed, "qemu-img", "convert", "-O", "qcow2", str(original), str(out))))
        out.unlink()
        _copy(source, image)
        work = (reclaim or _verb)(image)
        prepare(image)
        dug.append(_timed(work))
        assert image.stat().st_blocks < original.stat().st_blocks * 0.9
        subprocess.run(["qemu-img", "compare", str(original), str(image)], check=True, stdout=subprocess.DEVNULL)
        image.unlink()
    original.unlink()
    return (
        Side(min(side.wall for side in bare), min(side.processor for side in bare)),
        Side(min(side.wall for side in dug), min(side.processor for side in dug)),
    )


def _verb(image: Path) -> Callable[[], float]:
    """The agent, started and asked as the worker does it; for the seconds that it takes."""
    command, expected = transport.local_command(), transport.agent_bundle().hash
    request = Request("reclaim", "bench", 1, reclaim_args(image, method="in_place"))

    def work() -> float:
        begin = time.perf_counter()
        with AgentSession(command, expected) as session:
            session.send(request)
            last = [event for event in session.events() if event is not None][-1]
        assert last["event"] == RESULT, last
        return time.perf_counter() - begin

    return work


def _job(image: Path) -> Callable[[], float]:
    """The job, and everything that the worker does for it."""
    run_job("scan", ensure_local_host().pk)
    row = Image.objects.get(path=str(image))
    return lambda: run_job("reclaim", row.pk, {"method": "in_place", "idle_io": False})[1]


def _timed(work: Callable[[], float]) -> Side:
    before = _processor()
    took = work()
    return Side(took, _processor() - before)


def _processor() -> float:
    """Seconds that this process and those it waited for were at work."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--sparse=never", str(source), str(target)], check=True)
    os.sync()
    # What was just written is on its way to the disk for a while.
    time.sleep(0.3)


def _cool(path: Path) -> None:
    with held_open(path) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _small_runs(folder: Path) -> Path:
    """An image of data and zeros in turn."""
    chance = random.Random(5)
    raw, image = folder / "small.raw", folder / "small.qcow2"
    with raw.open("wb") as file:
        for _ in range(512):
            file.write(b"".join(chance.randbytes(64 * 1024) + bytes(64 * 1024) for _ in range(8)))
    subprocess.run(["qemu-img", "convert", "-S", "0", "-f", "raw", "-O", "qcow2", str(raw), str(image)], check=True)
    raw.unlink()
    return image


@contextlib.contextmanager
def _filesystem(folder: Path, form: str, options: str = "") -> Iterator[Path]:
    place = new_folder(folder / form)
    with loop_filesystem(place, 8192, form=form, options=options) as mounted:
        pool = new_folder(mounted / "pool")
        yield pool
    shutil.rmtree(place)


def _mounted(folder: Path) -> str:
    """The filesystem and the options that matter here, as a word or two."""
    said = subprocess.run(
        ["findmnt", "--noheadings", "--output", "FSTYPE,OPTIONS", "--target", str(folder)],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return said[0] + (" mounted with discard" if "discard" in said[-1].split(",") else "")


def _discards(kind: str) -> bool:
    return kind.endswith("discard")
