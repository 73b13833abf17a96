"""Median and spread, and what is said to be better than what: only what can be told apart."""

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import advice, results
from benchmarks.models import Benchmark, Sample
from benchmarks.results import Result
from storage_admin.hosts.models import StoragePool

MB = 1_000_000.0
Measured = Callable[..., Benchmark]


def row(setting: dict[str, Any], *values: float, metric: str = "write_rate", unit: str = "B/s") -> Result:
    samples = [Sample(setting=setting, metric=metric, unit=unit, value=value) for value in values]
    return results.summed(samples)[0]


def sized(size: str, *values: float, **more: str) -> Result:
    return row({"cluster_size": size}, *(value * MB for value in values), **more)


def sentence(kind: str, rows: list[Result]) -> str:
    return " ".join(one.sentence for one in advice.of(kind, rows, "fast"))


@pytest.mark.django_db
def test_results_are_median_and_spread_in_the_order_of_the_steps(pool: StoragePool, measured: Measured) -> None:
    run = measured(pool, {"64K": [30, 10, 20], "4K": [5, None, 7], "512": [None, None, None]})
    found = results.of(run)
    assert [(one.name, one.median, one.min, one.max, one.repetitions) for one in found] == [
        ("64K", 20, 10, 30, 3),
        ("4K", 6, 5, 7, 2),
        ("512", None, None, None, 0),
    ]


def test_a_setting_is_the_same_in_whatever_order_it_names_its_parts() -> None:
    samples = [
        Sample(setting=setting, metric="m", unit="s", value=1.0)
        for setting in ({"rw": "read", "depth": 4}, {"depth": 4, "rw": "read"})
    ]
    (found,) = results.summed(samples)
    assert (found.repetitions, found.name) == (2, "read depth 4")


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"cluster_size": "64K"}, "64K"),
        ({"cluster_size": "128K", "extended_l2": "on"}, "128K extended l2"),
        ({"layout": "chain", "depth": 5}, "chain depth 5"),
    ],
)
def test_a_setting_reads_as_one_would_write_it(setting: dict[str, Any], name: str) -> None:
    assert results.name_of(setting) == name


def test_the_table_has_every_figure_in_full_and_no_formula() -> None:
    rows = [row({"size": "=1+1"}, 1 / 3), Result("seeks", "1/s", {"size": "4G"}, None, None, None, 0, "too quick")]
    told = list(csv.reader(io.StringIO(results.table(rows))))
    assert told[0] == ["setting", "metric", "unit", "median", "min", "max", "repetitions", "note"]
    assert told[1][0] == "'=1+1"
    assert float(told[1][3]) == 1 / 3
    assert told[2] == ["4G", "seeks", "1/s", "", "", "", "0", "too quick"]


def test_what_is_faster_is_said_with_its_numbers() -> None:
    told = sentence(
        "cluster_size", [sized("4K", 100, 101, 99), sized("64K", 200, 210, 205), sized("2M", 290, 300, 310)]
    )
    assert told.startswith("On fast, 2M writes 1.5 times faster than 64K (286 MiB/s against 196 MiB/s)")
    assert "4K is slowest (95.4 MiB/s)" in told


def test_the_usual_one_is_advised_where_it_is_as_good_as_the_best() -> None:
    told = sentence(
        "cluster_size", [sized("4K", 100, 101, 99), sized("64K", 140, 139, 141), sized("2M", 138, 150, 139)]
    )
    assert told.startswith("On fast, 64K writes 1.4 times faster than 4K")
    assert "between it and 2M there is no difference that can be measured" in told


def test_spreads_that_overlap_are_no_difference() -> None:
    told = advice.of("cluster_size", [sized("4K", 100, 140, 120), sized("64K", 110, 150, 130)], "fast")
    assert [(one.measurable, "no difference that can be measured" in one.sentence) for one in told] == [(False, True)]
    assert "between 4K and 64K: medians of 114 MiB/s to 124 MiB/s, and their spreads overlap." in told[0].sentence


def test_one_repetition_shows_nothing() -> None:
    (told,) = advice.of("cluster_size", [sized("4K", 1), sized("64K", 500)], "fast")
    assert not told.measurable
    assert "run it with more of them" in told.sentence


def test_what_the_faster_one_costs_is_said_or_that_it_costs_nothing() -> None:
    rates = [sized("64K", 100, 101), sized("2M", 200, 201)]
    created = {"metric": "create_seconds", "unit": "s"}
    slow = [row({"cluster_size": "64K"}, 0.1, 0.11, **created), row({"cluster_size": "2M"}, 0.5, 0.6, **created)]
    assert "it is created in 550 ms instead of 105 ms" in sentence("cluster_size", rates + slow)
    assert "creat" not in sentence("cluster_size", rates + slow[:1])
    sizes = {"metric": "physical_bytes", "unit": "B"}
    small, large = (row({"cluster_size": "64K"}, 1 << 20, **sizes), row({"cluster_size": "2M"}, 1 << 30, **sizes))
    told = sentence("cluster_size", [*rates, small, large])
    assert "takes 1 GiB when it is new instead of 1 MiB" in told.replace("1.00", "1")
    quick = [row({"cluster_size": size}, 0.1, 0.11, **created) for size in ("64K", "2M")]
    even = [row({"cluster_size": size}, 200 << 10, **sizes) for size in ("64K", "2M")]
    assert sentence("cluster_size", rates + quick + even).endswith("; creating it costs no more time or space.")


def test_formats_have_a_sentence_for_layouts_chains_and_compression() -> None:
    def reads(layout: str, *values: float, metric: str = "rand_read_iops", **more: int) -> Result:
        return row({"layout": layout} | more, *values, metric=metric, unit="1/s")

    rows = [
        reads("raw", 2000, 2001), reads("qcow2", 1000, 1001), reads("raw+qcow2", 1000, 999.5),
        reads("chain", 500, 501, depth=5),
        *(reads(name, value, value + 1, metric="seq_read_rate") for name, value in (("qcow2", 900), ("zlib", 300))),
    ]  # fmt: skip
    told = {one.topic: one.sentence for one in advice.of("formats", rows, "fast")}
    assert told["Layout, random reads"].startswith("On fast, raw reads at random 2.0 times faster than qcow2 (2,000 a")
    assert "2.0 times faster than chain depth 5" in told["Chain depth"]
    assert "qcow2 reads 3.0 times faster than zlib" in told["Compression at read time"]


def test_each_block_size_has_its_own_sentence() -> None:
    rows = [
        row({"layout": layout, "block": block}, value, value + 1, metric="rand_read_iops", unit="1/s")
        for block, factor in (("4K", 10), ("64K", 1))
        for layout, value in (("raw", 200 * factor), ("qcow2", 100 * factor))
    ]
    told = [one.topic for one in advice.of("formats", rows, "fast") if "reads" in one.topic]
    assert told == ["Layout, random reads, 4K", "Layout, random reads, 64K"]


def test_nothing_is_said_without_figures() -> None:
    assert advice.of("cluster_size", [], "fast") == []
    assert advice.of("bonnie", [row({"size": "4G"}, 1, 2, metric="seq_write_rate")], "fast") == []


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0000854, "s", "85.4 µs"), (0.0123, "s", "12.3 ms"), (1.46358, "s", "1.46 s"), (184.23, "s", "184 s"),
        (8123.4, "1/s", "8,123 a second"), (0.5, "1/s", "0.5 a second"), (1.5 * 2**30, "B", "1.5 GiB"),
        (39, "%", "39 %"),
    ],
)  # fmt: skip
def test_figures_are_written_with_their_units(value: float, unit: str, text: str) -> None:
    assert advice.written(value, unit).replace("1.50", "1.5") == text
