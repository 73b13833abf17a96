"""10,000 images in chains: first scan and rescan beside ``qemu-img info`` once per image."""

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from images.models import Image
from storage_admin.accounts.models import SYSTEM
from storage_admin.hosts import transport
from storage_admin.hosts.models import Host
from storage_admin.hosts.services import ensure_local_host, register_folder
from storage_admin.jobs import runner
from tests.performance.jobs import run_job
from tests.performance.report import Row, ratio, seconds
from tests.performance.site import median, peak_wrapper

NOTES = (
    (
        "Inventory: 10,000 qcow2 images of 20 GiB virtual size in 1,250 trees: a base with three overlays on it, "
        "each with further ones up to depth 4. Made from two images of qemu-img by copying them and changing the "
        "name of the base. `qemu-img info --output=json` ran once for each of the 10,000, one after the other, "
        "from `xargs`. The scan is the job as the worker does it: start the agent, walk, read headers, resolve "
        "chains, write rows, commit. Everything had been read shortly before (warm cache) for both sides; first "
        "scan: median of 3 into an empty inventory; rescan: median of 5."
    ),
)
COUNT = 10_000
#: How many times as fast as qemu-img info they have to be.
FIRST, RESCAN = 40, 260
#: Each tree: the place of an image's base in the tree, or None for the base itself. The deepest chain has four images.
TREE = (None, 0, 0, 0, 1, 1, 2, 4)


def make_images(folder: Path, count: int) -> None:
    """Writes ``count`` qcow2 images, in trees of eight, into the folder."""
    place = "image-000000.qcow2"
    base, overlay = folder / ".template-base", folder / ".template-overlay"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(base), "20G"], check=True)
    subprocess.run(
        ["qemu-img", "create", "-q", "-u", "-f", "qcow2", "-b", place, "-F", "qcow2", str(overlay), "20G"], check=True
    )
    plain, based = base.read_bytes(), overlay.read_bytes()
    at = based.index(place.encode())
    assert based.count(place.encode()) == 1
    for number in range(count):
        tree, position = divmod(number, len(TREE))
        below = TREE[position]
        content = plain
        if below is not None:
            name = f"image-{tree * len(TREE) + below:06}.qcow2".encode()
            content = based[:at] + name + based[at + len(name) :]
        _write_sparse(folder / f"image-{number:06}.qcow2", content)
    base.unlink()
    overlay.unlink()


def _write_sparse(path: Path, content: bytes) -> None:
    block = 4096
    with path.open("wb") as file:
        for start in range(0, len(content), block):
            part = content[start : start + block]
            if part.strip(b"\0"):
                file.seek(start)
                file.write(part)
        file.truncate(len(content))


def check_samples(folder: Path, count: int) -> None:
    """Compares rows with ``qemu-img info``, and lets ``qemu-img check`` look at the files, for a few at random."""
    chance = random.Random(1)
    for number in [7, *chance.sample(range(count), 20)]:
        path = folder / f"image-{number:06}.qcow2"
        row = Image.objects.select_related("backing").get(path=str(path))
        told = subprocess.run(["qemu-img", "info", "--output=json", str(path)], capture_output=True, check=True)
        facts = json.loads(told.stdout)
        assert row.virtual_size == facts["virtual-size"]
        assert row.allocated_size == facts["actual-size"]
        assert row.cluster_size == facts["cluster-size"]
        assert row.backing_file == facts.get("backing-filename", "")
        assert (row.backing.path if row.backing else "") == facts.get("full-backing-filename", "")
        subprocess.run(["qemu-img", "check", "-q", "-f", "qcow2", str(path)], check=True)
    assert Image.objects.count() == count, f"{Image.objects.count()} of {Image.every.count()} images are listed"
    assert Image.objects.filter(chain_depth=4).count() == count // len(TREE)
    assert not Image.objects.exclude(state="ok").exists()


def _info_on_each(folder: Path) -> float:
    begin = time.perf_counter()
    listed = subprocess.Popen(["find", str(folder), "-name", "*.qcow2", "-print0"], stdout=subprocess.PIPE)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 (no path of ours)
        subprocess.run(
            ["xargs", "-0", "-n", "1", "qemu-img", "info", "--output=json"],
            stdin=listed.stdout,
            stdout=nowhere,
            check=True,
        )
    assert listed.wait() == 0
    return time.perf_counter() - begin


def measure(folder: Path, count: int = COUNT) -> list[Row]:
    """First scan, rescan and the agent's memory."""
    pool_folder = folder / "ten-thousand"
    pool_folder.mkdir()
    make_images(pool_folder, count)
    host = ensure_local_host()
    pool = register_folder(SYSTEM, host, str(pool_folder))

    def first_scan() -> float:
        Image.every.all().delete()
        return run_job("scan", host.pk)[1]

    first_scan()
    check_samples(pool_folder, count)
    info = _info_on_each(pool_folder)
    first = median(first_scan, 3)
    rescan = median(lambda: run_job("scan", host.pk)[1], 5)
    memory = _peak_of_agent(folder, first_scan)
    pool.delete()
    number = f"{count:,}"
    beside = f"qemu-img info on each of the {number}"
    return [
        ratio(f"first scan of {number} images in chains into the database", first, beside, info, FIRST),
        ratio(f"rescan of {number} unchanged images", rescan, beside, info, RESCAN),
        Row(
            "memory of the agent at the first scan",
            f"{memory:.0f} MiB",
            "",
            f"{memory:.0f} MiB",
            "under 150 MB",
            memory < 143,
        ),
        Row(
            "one image of the first scan",
            seconds(first / count),
            f"one qemu-img info: {seconds(info / count)}",
            "",
            "",
            True,
        ),
    ]


def _peak_of_agent(folder: Path, first_scan: object) -> float:
    report = folder / "peak"
    real = transport.agent_command

    @contextlib.contextmanager
    def measured(host: Host) -> Iterator[list[str]]:
        with real(host) as command:
            yield [*peak_wrapper(report), *command]

    with mock.patch.object(runner, "agent_command", measured):
        assert callable(first_scan)
        first_scan()
    return int(report.read_text()) / 1024
