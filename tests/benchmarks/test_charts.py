"""What Chart.js is given: the figures themselves, their spread, and which were published."""

import json
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from benchmarks import charts, published, results
from benchmarks.charts import Series
from benchmarks.results import Result
from storage_admin.charts import Chart
from storage_admin.hosts.models import StoragePool
from tests.benchmarks.conftest import Measured
from tests.benchmarks.factories import SampleFactory

pytestmark = [pytest.mark.django_db, pytest.mark.sql]
MIB = 1 << 20


def datasets(chart: Chart | None) -> list[dict[str, Any]]:
    assert chart is not None
    found: list[dict[str, Any]] = json.loads(json.dumps(chart.config))["data"]["datasets"]
    return found


def test_a_matrix_is_bars_of_medians_with_their_spread(pool: StoragePool, measured: Measured) -> None:
    run = measured(pool, {"64K": [30 * MIB, 10 * MIB, 20 * MIB], "4K": [5 * MIB], "512": [None]})
    (chart,) = charts.every([charts.series_of(run, "this run")])
    assert (chart.id, chart.title, chart.config["type"], chart.config["unit"]) == (
        "chart-write_rate", "Write rate", "bar", "B/s",
    )  # fmt: skip
    assert chart.config["data"]["labels"] == ["512", "4K", "64K"]
    (bars,) = datasets(chart)
    assert bars["data"] == [None, 5 * MIB, 20 * MIB]
    assert bars["spread"] == [None, None, [10 * MIB, 30 * MIB]]
    assert (bars["label"], bars["published"]) == ("this run", False)
    assert chart.heads == ("Setting", "this run")
    assert chart.table[2][1].startswith("20")
    assert chart.table[2][1].endswith("(10 MiB/s to 30 MiB/s)") or "10.0 MiB/s to 30.0 MiB/s" in chart.table[2][1]
    assert chart.table[0] == ("512", "not measured")


def test_two_published_series_of_one_kind_are_told_apart_and_name_their_years() -> None:
    first, second = map(charts.published_series, published.of_kind("bonnie"))
    assert first.colour != second.colour
    assert "2013" in first.label
    assert first.label != second.label


def test_published_figures_stand_beside_and_are_marked(pool: StoragePool, measured: Measured) -> None:
    run = measured(pool, {"64K": [30 * MIB], "4K": [5 * MIB]})
    told = charts.published_series(published.of_kind("cluster_size")[0])
    (chart,) = charts.every([charts.series_of(run), told])  # create times are only published: no chart of theirs
    ours, theirs = datasets(chart)
    assert chart.config["data"]["labels"] == ["512", "1K", "4K", "64K", "2M"]
    assert ours["data"] == [None, None, 5 * MIB, 30 * MIB, None]
    assert theirs["data"] == [49.9e6, 58.2e6, None, 79e6, 91.7e6]
    assert (ours["published"], theirs["published"]) == (False, True)
    assert theirs["colour"] == charts.PUBLISHED_COLOURS[0] != ours["colour"]
    assert theirs["label"] == "Published: cluster size (one Samsung SSD; year unknown)"
    assert "134 MB" in theirs["about"]
    assert theirs["spread"] == [None] * 5


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (
            [{"cluster_size": "2M"}, {"cluster_size": "128K", "extended_l2": "on"}, {"cluster_size": "128K"},
             {"cluster_size": "512"}, {"cluster_size": "1K"}],
            ["512", "1K", "128K", "128K extended L2", "2M"],
        ),
        ([{"preallocation": word} for word in ("off", "metadata", "full", "off")], ["off", "metadata", "full"]),
        (
            [{"rw": "randread", "depth": depth} for depth in (1, 32, 4, 16)] + [{"rw": "read", "depth": 8}],
            ["random read depth 1", "random read depth 4", "random read depth 16", "random read depth 32",
             "read depth 8"],
        ),
        (
            [{"layout": layout, "block": block} for block in ("64K", "4K") for layout in ("raw", "qcow2")]
            + [{"layout": "chain", "depth": depth, "block": "4K"} for depth in (10, 3)],
            ["raw 4K", "qcow2 4K", "chain 4K depth 3", "chain 4K depth 10", "raw 64K", "qcow2 64K"],
        ),
        ([{"size": "4G"}, {"size": "300M"}, {"size": "odd"}, {}], ["", "300M", "4G", "odd"]),
    ],
)  # fmt: skip
def test_sizes_and_depths_stand_in_the_order_of_their_values(settings: list[dict[str, Any]], names: list[str]) -> None:
    assert [results.name_of(setting) for setting in results.in_order(settings)] == names


def test_runs_side_by_side_are_told_apart(pool: StoragePool, measured: Measured) -> None:
    now = timezone.now()
    runs = [measured(pool, {"64K": [value * MIB]}, created=now) for value in (1, 2)]
    (chart,) = charts.every([charts.series_of(run) for run in runs])
    first, second = datasets(chart)
    assert (first["data"], second["data"]) == ([MIB], [2 * MIB])
    assert first["label"] != second["label"]
    assert first["label"].startswith("Host mine / fast, ")
    assert first["colour"] != second["colour"]


def latency(setting: dict[str, Any], *values: float) -> tuple[Result, ...]:
    return tuple(
        Result(f"latency_p{percent}_seconds", "s", setting, value, value, value, 1)
        for percent, value in zip((50, 95, 99), values, strict=True)
    )


def test_latencies_are_percentiles_on_a_logarithmic_axis() -> None:
    rows = latency({"rw": "randread", "depth": 1}, 0.0001, 0.0005, 0.002) + latency({"rw": "read"}, 0.01, 0.02, 0.03)
    (chart,) = charts.every([Series("run", rows)])
    assert chart.id == "chart-latency"
    assert chart.config["options"]["scales"]["y"]["type"] == "logarithmic"
    assert chart.config["data"]["labels"] == ["random read depth 1", "read"]
    assert [(one["label"], one["data"]) for one in datasets(chart)] == [
        ("p50", [0.0001, 0.01]), ("p95", [0.0005, 0.02]), ("p99", [0.002, 0.03]),
    ]  # fmt: skip
    assert chart.table[0] == ("random read depth 1", "100 µs", "500 µs", "2 ms")


def test_latencies_of_two_runs_name_both() -> None:
    chart = charts.percentiles([Series(name, latency({"rw": "read"}, 1, 2, 3)) for name in ("a", "b")])
    assert [one["label"] for one in datasets(chart)] == ["a: p50", "b: p50", "a: p95", "b: p95", "a: p99", "b: p99"]


def test_processor_shares_and_longest_operations_have_no_bars() -> None:
    rows = (
        Result("seq_write_cpu", "%", {"size": "4G"}, 39.0, 39.0, 39.0, 1),
        Result("seq_write_latency_seconds", "s", {"size": "4G"}, 0.1, 0.1, 0.1, 1),
        Result("seq_write_rate", "B/s", {"size": "4G"}, 5.0, 5.0, 5.0, 1),
    )
    assert [chart.id for chart in charts.every([Series("run", rows)])] == ["chart-seq_write_rate"]


def test_over_time_there_is_a_line_for_each_setting_and_drops_stand_out(pool: StoragePool, measured: Measured) -> None:
    now = timezone.now()
    drop = {"metric": "write_rate", "setting": {"cluster_size": "64K"}}
    runs = [
        measured(pool, {"64K": [value * MIB, value * MIB + 2], "4K": [MIB]}, created=now + timedelta(days=day))
        for day, value in enumerate((10, 11, 5))
    ]
    runs[2].regressions = [drop]
    chart = charts.over_time(runs, "write_rate")
    large, small = datasets(chart)
    assert (large["label"], small["label"]) == ("64K", "4K")
    assert [point["y"] for point in large["data"]] == [10 * MIB + 1, 11 * MIB + 1, 5 * MIB + 1]
    assert [point["x"] for point in large["data"]] == [round(run.created.timestamp()) for run in runs]
    assert large["spread"][0] == [10 * MIB, 10 * MIB + 2]
    assert (large["dropped"], small["dropped"]) == ([False, False, True], [False, False, False])
    assert large["pointStyle"] == ["circle", "circle", "triangle"]
    assert chart is not None
    assert [row for row in chart.table if row[2].endswith("(dropped)")] == [chart.table[2]]


def test_one_run_is_no_history(pool: StoragePool, measured: Measured) -> None:
    assert charts.over_time([measured(pool, {"64K": [MIB]})], "write_rate") is None
    assert charts.over_time([], "write_rate") is None


def test_without_figures_there_is_no_chart(pool: StoragePool, measured: Measured) -> None:
    assert charts.every([]) == []
    assert charts.every([charts.series_of(measured(pool, {"64K": [None]}))]) == []


def test_a_pasted_run_is_named_by_its_label(db: None) -> None:
    sample = SampleFactory.create(
        benchmark__pool=None, benchmark__kind="bonnie", benchmark__source="pasted", benchmark__label="TEST",
    )  # fmt: skip
    assert charts.series_of(sample.benchmark).label.startswith("TEST (pasted), ")
