"""``reclaim`` by ``compress`` beside a bare ``qemu-img convert -c``; and its estimates."""

import os
import shutil
import statistics
import subprocess
from pathlib import Path

from images.models import Image
from images.rewrite import space
from storage_admin.accounts.models import SYSTEM
from storage_admin.hosts.services import ensure_local_host, register_folder
from tests.performance.images import MIB, filled, warm
from tests.performance.jobs import run_job
from tests.performance.report import Row, ratio
from tests.performance.site import timed

NOTES = (
    (
        "Reclaim: a qcow2 image of 2 GiB with an ext4 on it that holds the files of /usr/share; the rest are "
        "allocated zeros, as after zero-filling in the guest. The image was read once before each measurement "
        "(warm cache). Bare: `qemu-img convert -O qcow2 -c`. Reclaim: the job as the worker does it, from its "
        "submission to its end: checks, copy, `qemu-img check` and `compare`, attributes, fsync, swap, undo copy "
        "kept, row written; the disk's throughput limit not set, idle I/O priority off. Three rounds, each bare, zstd, "
        "zlib in turn; medians."
    ),
    (
        "Size with zlib: clusters that are compressed in parallel are written in the order in which they are done "
        "(`-W`), so that more of them leave the end of a cluster of the file unused than in bare's order: some "
        "hundredths of a percent. In bare's order they would be compressed one after the other."
    ),
    ("Estimate: the sample that the dashboard takes before a job, beside what the job really freed."),
)
ROUNDS = 3


def measure(folder: Path, rounds: int = ROUNDS) -> list[Row]:
    """Times and sizes for zstd and zlib, and the estimate."""
    source = filled(folder, "source.qcow2")
    pool_folder = folder / "compress"
    pool_folder.mkdir()
    pool = register_folder(SYSTEM, ensure_local_host(), str(pool_folder))
    times: dict[str, list[float]] = {"bare": [], "zstd": [], "zlib": []}
    sizes: dict[str, int] = {}
    error = 0.0
    for _ in range(rounds):
        bare = folder / "bare.qcow2"
        warm(source)
        times["bare"].append(timed("qemu-img", "convert", "-O", "qcow2", "-c", str(source), str(bare)))
        sizes["bare"] = _physical(bare)
        bare.unlink()
        for way in ("zstd", "zlib"):
            took, error_now = _reclaim(source, pool_folder, way, sizes)
            times[way].append(took)
            error = max(error, error_now)
    pool.delete()
    shutil.rmtree(pool_folder)
    source.unlink()
    bare_time = statistics.median(times["bare"])
    beside = "bare qemu-img convert -O qcow2 -c"
    work = "reclaim by compress, {}, verified and swapped"
    return [
        ratio(work.format("zstd"), statistics.median(times["zstd"]), beside, bare_time, 3.0),
        ratio(work.format("zlib"), statistics.median(times["zlib"]), beside, bare_time, 1.2),
        *(_size_row(compression, sizes) for compression in ("zstd", "zlib")),
        Row(
            "estimate of reclaimable bytes before the job", "sample of an image", "bytes really won",
            f"{error:.1%} off", "within 5 %", error <= 0.05,
        ),
    ]  # fmt: skip


def _size_row(compression: str, sizes: dict[str, int]) -> Row:
    after, bare = sizes[compression], sizes["bare"]
    # zlib in parallel writes clusters as they are done, and packs them a little worse: see the notes.
    most = 1.001 if compression == "zlib" else 1.0
    return Row(
        f"result of the reclaim with {compression}", f"{after / MIB:.2f} MiB", f"bare: {bare / MIB:.2f} MiB",
        f"{after / bare:.4f} of it", "no larger" if most == 1 else "no larger than 1.001 of it", after <= bare * most,
    )  # fmt: skip


def _reclaim(source: Path, folder: Path, way: str, sizes: dict[str, int]) -> tuple[float, float]:
    """Seconds of one reclaim of a fresh copy by that compression, and how far off the estimate was."""
    path = folder / f"{way}.qcow2"
    subprocess.run(["cp", "--sparse=never", str(source), str(path)], check=True)
    os.sync()
    run_job("scan", ensure_local_host().pk)
    image = Image.objects.get(path=str(path))
    run_job("analyze", image.pk)
    image.refresh_from_db()
    predicted = space.predicted(image, "compress", way).after
    assert predicted is not None
    warm(path)
    job, took = run_job("reclaim", image.pk, {"method": "compress", "compression": way, "idle_io": False})
    sizes[way] = _physical(path)
    assert job.result is not None
    before, after = job.result["before_bytes"], job.result["after_bytes"]
    assert after == sizes[way]
    if job.undo_available:
        run_job("discard_undo", job.pk)
    path.unlink()
    return took, abs((before - predicted) - (before - after)) / (before - after)


def _physical(path: Path) -> int:
    return path.stat().st_blocks * 512
