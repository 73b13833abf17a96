"""Figures that articles published, as reference series beside one's own runs. They are marked as published wherever
they are shown: another machine, another year, one measurement each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.parsers import bonnie
from benchmarks.results import Result

_MB = 1_000_000
_KIB = 1024


@dataclass(frozen=True)
class Published:
    """One published series.

    Args:
        key: its name in addresses.
        kind: of which benchmark.
        measured_on: on what, as far as it was said.
        year: when, and what tells so; articles that give no date name other dates.
        note: what has to be known to read it.
    """

    key: str
    title: str
    kind: str
    measured_on: str
    year: str
    results: tuple[Result, ...]
    note: str = ""

    @property
    def origin(self) -> str:
        """Where they stand, and from when they are."""
        return f"an article, {self.year}"


def _once(metric: str, unit: str, setting: dict[str, Any], value: float | None, note: str = "") -> Result:
    return Result(metric, unit, setting, value, value, value, 0 if value is None else 1, note)


def _cluster_sizes() -> Iterator[Result]:
    #: Seconds to create, seconds to write, megabytes a second.
    rows = (
        ("512", 101.889, 2.69157, 49.9), ("1K", 49.697, 2.30576, 58.2), ("64K", 19.085, 1.69912, 79.0),
        ("2M", 1.085, 1.46358, 91.7),
    )  # fmt: skip
    for size, create, write, rate in rows:
        setting = {"cluster_size": size}
        yield _once("create_seconds", "s", setting, create)
        yield _once("write_seconds", "s", setting, write)
        yield _once("write_rate", "B/s", setting, rate * _MB)


def _preallocations() -> Iterator[Result]:
    #: Seconds to create, physical bytes, seconds to write, bytes a second.
    gib = float(1 << 30)
    rows = (
        ("off", 0.312, 196.0 * _KIB, 184.23, 729e3), ("metadata", 0.507, 844.0 * _KIB, 85.87, 1.6e6),
        ("falloc", 0.015, 4 * gib, 100.77, 1.3e6), ("full", 39.402, 4 * gib, 84.31, 1.6e6),
    )  # fmt: skip
    for preallocation, create, physical, write, rate in rows:
        setting = {"preallocation": preallocation}
        yield _once("create_seconds", "s", setting, create)
        yield _once("physical_bytes", "B", setting, physical)
        yield _once("write_seconds", "s", setting, write)
        yield _once("write_rate", "B/s", setting, rate)


#: As they were printed; the fields stand for what they are only together with the format in the first one.
_BONNIE_LINE = (
    "1.96,1.96,TEST,1,1387339401,4G,,,,374271,39,214541,19,,,392015,17,+++++,+++,,,,,,,,,,,,,,,,,,,167ms,89125us,,"
    "52047us,4766us,,,,,,"
)


#: Printed as a table only, ``bonnie++ -d /tmp -r 2048``: here in the columns of its format. Its seed was not printed.
_SECOND_BONNIE_LINE = (
    "1.96,1.96,ubuntu,1,,4G,,786,99,17094,3,15431,3,4662,91,37881,4,548.4,17,16,,,,,142,0,+++++,+++,+++++,+++,+++++,+++,"
    "+++++,+++,+++++,+++,16569us,15704ms,2485ms,51815us,491ms,261ms,291us,400us,710us,382us,42us,787us"
)


def _bonnie(line: str) -> Iterator[Result]:
    for reading in bonnie.parse(line)[0].readings:
        yield _once(reading.metric, reading.unit, {"size": "4G"}, reading.value, reading.note)


def _dd() -> Iterator[Result]:
    copied, seconds = 8_192_000_000, 161.618
    setting = {"mode": "write", "sync": "fdatasync", "block": "4K"}
    yield _once("write_rate", "B/s", setting, copied / seconds)
    yield _once("write_seconds", "s", setting, seconds)


def of_kind(kind: str) -> list[Published]:
    """Those of one kind of benchmark."""
    return [series for series in _EVERY if series.kind == kind]


_EVERY = (
    Published(
        "cluster-size", "Published: cluster size", "cluster_size", "one Samsung SSD", "year unknown",
        tuple(_cluster_sizes()),
        "preallocation=full when the image was created, one file of 134 MB written: rates compare, create times do not "
        "where images are created without preallocation.",
    ),
    Published(
        "preallocation", "Published: preallocation", "preallocation", "one WD Green hard disk of 2 TB",
        "2016 or earlier (it has a comment from March 2016)",
        tuple(_preallocations()), "A 4 GB image with clusters of 64K.",
    ),
    Published(
        "dd", "Published: dd", "dd", "unknown machine", "year unknown",
        tuple(_dd()),
        "dd if=/dev/zero bs=4k count=2000000 and a sync, timed together. It wrote 8,192,000,000 bytes of zeros, "
        "more than the memory. Runs here write random data instead.",
    ),
    Published(
        "bonnie-1.96", "Published: bonnie++", "bonnie", "unknown machine", "December 2013 (the time in its result)",
        tuple(_bonnie(_BONNIE_LINE)), "bonnie++ 1.96 -s 4G -n 0 -f -b; figures in KiB a second there.",
    ),
    Published(
        "bonnie-1.96-2gb", "Published: bonnie++, 2 GB of memory", "bonnie", "a machine with 2 GB of memory",
        "year unknown",
        tuple(_bonnie(_SECOND_BONNIE_LINE)),
        "bonnie++ 1.96 -r 2048: 4 GiB, writes buffered; figures in KiB a second there.",
    ),
)  # fmt: skip

#: What the articles say of guests that boot at once; they give ratios, no times.
BOOT_FACTS = (
    "Published, on an i5-4440 with 8 GB and a hard disk, Ubuntu 14.04 (so 2014 or later), 1 to 15 guests at once: "
    "separate raw images booted fastest; a raw base with qcow2 overlays was 23 % better than a qcow2 base with qcow2 "
    "overlays, separate raw images 37 %. After a flush of the caches, separate raw images and a raw base with overlays "
    "were much alike: part of that is the cache of the host's filesystem."
)
