"""What a worker keeps in memory for a job does not grow with the image: it passes on what the agent says."""

import tracemalloc
from pathlib import Path

import pytest

from images.models import Image
from tests.agent.harness import qemu_img, write
from tests.working import OPERATOR, image_at, said, scan, scanned_machine, work

pytestmark = [pytest.mark.django_db, pytest.mark.qemu, pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")]

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


def filled(path: Path, size: int) -> Path:
    """An image with data and zeros at its beginning, in its middle and at its end."""
    qemu_img("create", "-q", "-f", "qcow2", path, str(size))
    for place in (0, size // 2, size - 2 * MIB):
        write(path, 0x61, str(place), "1M")
        write(path, 0, str(place + MIB), "1M")
    return path


def peak_of(kind: str, image: Image, **options: str) -> int:
    """Bytes of memory that the worker's own objects take at most while it does a job."""
    tracemalloc.start()
    try:
        job = work(kind, image.pk, OPERATOR, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert job.state == "succeeded", (job.error_code, job.error_detail, said(job))
    return peak


def test_a_job_on_a_tebibyte_takes_as_much_as_one_on_a_gibibyte(pool: Path) -> None:
    small, large = filled(pool / "small.qcow2", GIB), filled(pool / "large.qcow2", TIB)
    host = scanned_machine(pool)
    # Once before it counts: what is loaded and kept for good is loaded by then.
    peak_of("analyze", image_at(small))
    peak_of("reclaim", image_at(small), method="in_place")
    scan(host)
    for kind, options in (("analyze", {"mode": "full"}), ("reclaim", {"method": "compress"})):
        peaks = [peak_of(kind, image_at(path), **options) for path in (small, large)]
        print(f"{kind}: {[peak // 1024 for peak in peaks]} KiB")
        assert peaks[1] < peaks[0] + MIB
        assert peaks[1] < 16 * MIB
