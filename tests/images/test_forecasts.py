"""Predictions of convert and flatten beside what qemu-img then makes of real images of many kinds."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from images.kinds import creation
from images.models import Image
from images.rewrite import forecasts
from images.rewrite.neighbours import share
from storage_admin.agent.rewrite import copying
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import services
from storage_admin.jobs.models import Job
from storage_admin.jobs.serializers import PlanSerializer
from tests.agent.formats.test_against_qemu import create, facts_of, qemu_img
from tests.agent.harness import qemu_io
from tests.agent.test_analyze import MIB, allocated, analyzed, image_of, mixed, noise, prose, zeros
from tests.agent.test_estimate_by_method import DENSE, IMAGES, binaries, fill
from tests.agent.test_estimate_by_method import sparse as scattered
from tests.factories import GIB, ImageFactory, JobFactory, StoragePoolFactory
from tests.working import OPERATOR, image_at, run, scan, succeeded, this_machine, work

pytestmark = pytest.mark.qemu

TARGETS: dict[str, tuple[str, dict[str, str]]] = {
    "raw": ("raw", {}),
    "qcow2": ("qcow2", {}),
    "clusters of 4K": ("qcow2", {"cluster_size": "4k"}),
    "clusters of 2M": ("qcow2", {"cluster_size": "2M"}),
    "clusters in hex": ("qcow2", {"cluster_size": "0x20000"}),
    "subclusters": ("qcow2", {"extended_l2": "yes", "cluster_size": "0.125M"}),
    "zstd": ("qcow2", {"compression_type": "zstd"}),
    "metadata": ("qcow2", {"preallocation": "metadata"}),
    "falloc": ("qcow2", {"preallocation": "falloc"}),
    "full raw": ("raw", {"preallocation": "full"}),
    "vmdk": ("vmdk", {}),
    "stream": ("vmdk", {"subformat": "streamOptimized"}),
    "vdi": ("vdi", {}),
    "vhdx": ("vhdx", {}),
    "vhdx fixed": ("vhdx", {"subformat": "fixed"}),
    "vpc": ("vpc", {}),
}


def raw_of(make: Callable[[random.Random, int], bytes], *, holes: bool = False) -> Callable[[Path], None]:
    def build(path: Path) -> None:
        path.write_bytes(make(random.Random(21), 16 * MIB))
        if holes:
            subprocess.run(["fallocate", "--dig-holes", path], check=True)

    return build


RAW = {
    "raw text": raw_of(prose), "raw mixed": raw_of(mixed), "raw zeros": raw_of(zeros), "raw random": raw_of(noise),
    "raw scattered": raw_of(scattered), "raw scattered with holes": raw_of(scattered, holes=True),
    "raw binaries": raw_of(binaries),
}  # fmt: skip


def row_of(path: Path, form: str, mode: str = "sample") -> Image:
    """The image as the database has it once it was scanned and analyzed."""
    facts = facts_of(path) if form == "qcow2" else None
    size = facts.virtual_size if facts else path.stat().st_size
    return Image(
        declared_format=form, format=form, virtual_size=size, cluster_size=facts.cluster_size if facts else None,
        allocated_size=allocated(path), estimate=analyzed(path, form, mode=mode),
        header={"extended_l2": bool(facts and facts.extended_l2)},
    )  # fmt: skip


def inside(told: forecasts.Range, taken: int) -> bool:
    assert told.low is not None
    assert told.high is not None
    assert told.low <= (told.low if told.guess is None else told.guess) <= told.high
    return told.low <= taken <= told.high


def conversions(path: Path, form: str) -> Iterator[tuple[str, str, dict[str, str], int]]:
    """Converts an image to each of the targets: its name, its format and options, and what the new file takes."""
    new = path.with_name("new")
    for target, (made, options) in TARGETS.items():
        words = [f"{key}={value}" for key, value in options.items()] + [DENSE]
        words += ["force_size=on"] if made == "vpc" else []
        packs = ["-c"] if "compression_type" in options or "stream" in target else []
        qemu_img("convert", "-m", "8", "-W", *packs, "-f", form, "-O", made, "-o", ",".join(words), path, new)
        yield target, made, options, allocated(new)
        new.unlink()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*IMAGES, *RAW])
def test_a_conversion_is_as_large_as_was_predicted(tmp_path: Path, name: str) -> None:
    form = "raw" if name in RAW else "qcow2"
    path = tmp_path / "disk"
    (RAW | IMAGES)[name](path.with_suffix(".qcow2"))
    path.with_suffix(".qcow2").rename(path)
    rows = [(mode, row_of(path, form, mode)) for mode in ("sample", "full")]
    below = []
    if rows[0][1].estimate and (base := (tmp_path / "base.qcow2")).exists():
        below = [row_of(base, "qcow2")]
    missed = [
        (target, mode, taken, told)
        for target, made, options, taken in conversions(path, form)
        for mode, row in rows
        if not inside(told := forecasts.converted(row, below, made, options), taken)
    ]
    assert missed == []


#: Bytes of other formats' disks: of less than their units, of what ends within one, in few and in many small pieces.
SMALL: dict[str, Callable[[random.Random], bytes]] = {
    "a sector": lambda chance: noise(chance, 512).ljust(64 << 10, b"\0"),
    "pieces of a small disk": lambda chance: scattered(chance, 64 << 10),
    "few pieces": lambda chance: b"".join(noise(chance, 8192) + bytes(3 * MIB) for _ in range(5)),
    "scattered": lambda chance: scattered(chance, 16 * MIB) + noise(chance, 512),
    "text": lambda chance: prose(chance, 8 * MIB),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("form", ["vdi", "vmdk", "vpc", "raw", "qcow2"])
def test_a_conversion_from_other_formats_is_as_large_as_was_predicted(tmp_path: Path, form: str, name: str) -> None:
    (tmp_path / "content").write_bytes(SMALL[name](random.Random(23)))
    path = tmp_path / "disk"
    words = ["-o", "force_size=on"] if form == "vpc" else []
    qemu_img("convert", "-f", "raw", "-O", form, *words, tmp_path / "content", path)
    rows = [(mode, row_of(path, form, mode)) for mode in ("sample", "full")]
    for _, row in rows:
        row.virtual_size = (tmp_path / "content").stat().st_size
    missed = [
        (target, mode, taken, told)
        for target, made, options, taken in conversions(path, form)
        for mode, row in rows
        if (told := forecasts.converted(row, [], made, options)) != forecasts.UNKNOWN and not inside(told, taken)
    ]
    assert missed == []


SPELLINGS: dict[str, list[tuple[str, ...]]] = {
    "cluster_size": [("64k", "64K", "0x10000", "65536", "65536b", "0.0625M"), ("2M", "2m", "0x200000", "2048K")],
    "extended_l2": [("on", "yes", "true", "y"), ("off", "no", "false", "n")],
}


@pytest.mark.parametrize("clusters", SPELLINGS["cluster_size"])
@pytest.mark.parametrize("extended", SPELLINGS["extended_l2"])
def test_however_an_option_is_spelled_its_prediction_is_what_qemu_img_measures(
    tmp_path: Path, clusters: tuple[str, ...], extended: tuple[str, ...]
) -> None:
    path = tmp_path / "disk.raw"
    with path.open("wb") as file:
        file.truncate(64 * GIB)
    row = row_of(path, "raw")
    told, measured = set(), set()
    for size, switch in zip(clusters, extended * 2, strict=False):
        options = {"cluster_size": size, "extended_l2": switch, "preallocation": "metadata"}
        assert creation.wrong("qcow2", options) == {}
        words = ",".join(f"{name}={value}" for name, value in options.items())
        found = json.loads(qemu_img("measure", "--output=json", "--size", "64G", "-O", "qcow2", "-o", words))
        measured.add(found["required"])
        told.add(forecasts.converted(row, [], "qcow2", options))
    assert (len(measured), len(told)) == (1, 1), (measured, told)
    assert inside(told.pop(), measured.pop())


#: Layers from the lowest one up: where is written, what, and how much of it.
CHAINS: dict[str, list[tuple[int, Callable[[random.Random, int], bytes], int]]] = {
    "a small overlay": [(0, binaries, 8 * MIB), (3 * MIB, prose, MIB)],
    "one that covers all": [(0, mixed, 8 * MIB), (0, noise, 8 * MIB)],
    "zeros over data": [(0, noise, 8 * MIB), (2 * MIB, lambda _chance, size: bytes(size), 4 * MIB)],
    "data over nothing": [(0, prose, 4 * MIB), (8 * MIB, noise, 4 * MIB)],
    "three layers": [(0, binaries, 8 * MIB), (MIB, mixed, 4 * MIB), (12 * MIB, prose, MIB)],
    "a scattered base": [(0, scattered, 12 * MIB), (5 * MIB, noise, 65536)],
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("base_form", ["qcow2", "raw", "clusters of 4K", "clusters of 1M"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_flatten_is_as_large_as_was_predicted(tmp_path: Path, name: str, base_form: str) -> None:
    chance, paths, forms = random.Random(22), list[Path](), list[str]()
    for number, (at, make, size) in enumerate(CHAINS[name]):
        path = tmp_path / f"layer{number}"
        if number:
            create(path, "qcow2", "", "", "-b", str(paths[-1]), "-F", forms[-1])
        else:
            options = f"cluster_size={base_form.rsplit(maxsplit=1)[-1]}" if "clusters" in base_form else ""
            create(path, "raw" if base_form == "raw" else "qcow2", options, str(16 * MIB))
        forms.append("raw" if not number and base_form == "raw" else "qcow2")
        if forms[-1] == "raw":
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), make(chance, size), at)
        else:
            fill(path, make(chance, size), at)
        paths.append(path)
    rows = [row_of(path, form) for path, form in zip(paths, forms, strict=True)][::-1]
    taken = {}
    for method in ("rebase", "convert"):
        new = tmp_path / "new"
        if method == "convert":
            qemu_img("convert", "-m", "8", "-W", "-f", "qcow2", "-O", "qcow2", "-o", DENSE, paths[-1], new)
        else:
            with paths[-1].open("rb") as old, new.open("w+b") as made:
                copying.copy_file(old.fileno(), made.fileno(), None, lambda: None, lambda _done: None)
            qemu_img("rebase", "-f", "qcow2", "-b", "", new)
        taken[method] = allocated(new)
        new.unlink()
    missed = [
        (method, size, told)
        for method, size in taken.items()
        if not inside(told := forecasts.flattened(rows[0], rows[1:], method, alone=True), size)
    ]
    assert missed == []


def test_what_was_not_analyzed_is_not_predicted(tmp_path: Path) -> None:
    path = tmp_path / "disk.qcow2"
    image_of(path, prose(random.Random(1), MIB))
    qemu_io(path, "write -P 1 0 64k")
    known, unknown = row_of(path, "qcow2"), row_of(path, "qcow2")
    unknown.estimate = None
    assert forecasts.converted(unknown, [], "raw", {}) == forecasts.UNKNOWN
    assert forecasts.converted(known, [unknown], "raw", {}) == forecasts.UNKNOWN
    assert forecasts.flattened(known, [unknown], "rebase", alone=True) == forecasts.UNKNOWN
    assert forecasts.converted(known, [], "raw", {}) != forecasts.UNKNOWN


@pytest.mark.django_db
@pytest.mark.usefixtures("quiet", "no_hypervisor", "no_reserve")
def test_plan_job_rest_and_ledger_carry_what_was_predicted(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    pool.mkdir()
    for number in range(4):
        image_of(pool / f"disk{number}.qcow2", mixed(random.Random(number), 4 * MIB))
    create(pool / "top.qcow2", "qcow2", "", "", "-b", "disk0.qcow2", "-F", "qcow2")
    fill(pool / "top.qcow2", prose(random.Random(9), MIB), MIB)
    scan(this_machine(pool))
    run(Job.objects.get(kind="sample", state="queued"))
    for number in range(4):
        plan = services.plan(OPERATOR, "convert", image_at(pool / f"disk{number}.qcow2").pk, {"format": "raw"})
        assert (plan.predicted_seconds_high is None) is (number < 3)
        job = succeeded(work("convert", image_at(pool / f"disk{number}.qcow2").pk, OPERATOR, format="raw"))
        shown = PlanSerializer(job.plan).data
        taken = (pool / f"disk{number}.raw").stat().st_blocks * 512
        assert shown["predicted_low"] <= taken <= shown["predicted_high"]
        assert (job.predicted_bytes, job.freed_bytes) == (-shown["predicted_after_bytes"], -taken)
        assert shown["won_bytes"] is None
    top = image_at(pool / "top.qcow2")
    job = succeeded(work("flatten", top.pk, OPERATOR))
    told = PlanSerializer(job.plan).data
    assert told["predicted_low"] <= (pool / "top.qcow2").stat().st_blocks * 512 <= told["predicted_high"]
    assert job.predicted_bytes == told["before_bytes"] - told["predicted_after_bytes"]


@pytest.mark.django_db
def test_time_is_told_by_the_rates_of_this_pool_before_those_of_the_host() -> None:
    image = ImageFactory.create(allocated_size=4 * GIB)
    other = StoragePoolFactory.create(host=image.host)

    def done(pool: StoragePool, took: float, worked: int = GIB) -> None:
        result = {"seconds": took}
        JobFactory.create(
            target=image, kind="convert", state="succeeded", result=result, space_pool=pool, before_bytes=worked,
            after_bytes=0, freed_bytes=0,
        )  # fmt: skip

    def told(bandwidth: int | None = None) -> forecasts.Range:
        share([image])
        return forecasts.seconds(image, "convert", 8 * GIB, bandwidth)

    assert told() == forecasts.UNKNOWN
    for took in (9, 10, 11):
        done(other, took)
        done(image.pool, 1, worked=MIB)  # too small to tell
    assert told() == (8 * 9 / 1.5, 80, 8 * 11 * 1.5 + 1)
    for took in (1, 2, 3):
        done(image.pool, took)
    assert told() == (int(8 / 1.5), 16, 8 * 3 * 1.5 + 1)
    limited = told(GIB // 100)
    assert limited.low == limited.guess == 800


@pytest.mark.django_db
def test_a_format_that_no_method_reclaims_is_sent_to_convert() -> None:
    image = ImageFactory.create(name="disk.vhdx", format="vhdx", declared_format="vhdx")
    plan = services.plan(OPERATOR, "reclaim", image.pk, {})
    assert [refusal.code for refusal in plan.refusals] == ["unsupported_subformat"]
    assert "Convert the image" in plan.refusals[0].detail
    assert "compressed data" not in plan.refusals[0].detail
