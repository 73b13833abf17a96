"""Configurations for Chart.js, made here and drawn by a script that only knows colours and units.

A configuration is Chart.js's own, with these keys beside it, which the script takes:

- ``unit`` of the figures (``B/s``, ``1/s``, ``s``, ``B``, ``%``), by which ticks and tooltips are written;
- of a dataset ``colour``, a CSS variable; ``spread``, a list of ``[min, max]`` (or null) beside ``data``, drawn as a
  whisker on its bar or point; ``published``, true for figures that were not measured here, drawn hatched; ``about``, a
  sentence for the tooltip.

Every chart has its table: what is drawn can also be read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from benchmarks import results
from benchmarks.figures import written
from benchmarks.models import Benchmark
from benchmarks.published import Published, of_kind
from benchmarks.results import Result
from storage_admin.charts import Chart, told_apart
from storage_admin.words import clock

Config = dict[str, Any]

#: Series after these begin again: more than that cannot be told apart anyway.
COLOURS = ("--sa-fill", "--sa-chart-2", "--sa-chart-3", "--sa-chart-4", "--sa-chart-5", "--sa-chart-6")
#: Of published series of one kind.
PUBLISHED_COLOURS = ("--sa-muted", "--sa-chart-5")
#: Bars, with the room for those that are missing, that half the width of a page has room for.
MOST_BARS = 11
_PERCENTILES = ("latency_p50_seconds", "latency_p95_seconds", "latency_p99_seconds")

TITLES = {
    "create_seconds": _("Time to create"), "write_seconds": _("Time to write"), "read_seconds": _("Time to read"),
    "write_rate": _("Write rate"), "read_rate": _("Read rate"), "physical_bytes": _("Physical size when created"),
    "seq_write_rate": _("Sequential write"), "seq_read_rate": _("Sequential read"),
    "rand_write_iops": _("Random writes"), "rand_read_iops": _("Random reads"), "convert_seconds": _("Time to convert"),
    "boot_seconds": _("Time until a guest is up"), "boot_all_seconds": _("Time until all guests are up"),
    "rewrite_rate": _("Rewrite"), "putc_rate": _("Write by character"), "getc_rate": _("Read by character"),
    "seeks": _("Seeks"), "latency_p50_seconds": _("Latency p50"), "latency_p95_seconds": _("Latency p95"),
    "latency_p99_seconds": _("Latency p99"),
}  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One run, or published figures, in a chart.

    Args:
        label: in the legend.
        about: what has to be known of it.
        colour: the one that it has wherever it is drawn; by its place among others unless given.
    """

    label: str
    rows: tuple[Result, ...]
    published: bool = False
    about: str = ""
    colour: str = ""


def series_of(run: Benchmark, label: str = "") -> Series:
    """A run as a series; its samples are read."""
    about = gettext("caches {caches}").format(caches=run.caches) if run.caches else ""
    return Series(label or label_of(run), tuple(results.of(run)), about=about)


def label_of(run: Benchmark) -> str:
    """A run as a legend names it: where, and when it began."""
    where = f"{run.pool.host.name} / {run.pool.name}" if run.pool else f"{run.label or 'pasted'} (pasted)"
    return f"{where}, {clock(run.created)}"


def published_series(told: Published) -> Series:
    """Published figures as a series, marked as such in the legend."""
    label = f"{told.title} ({told.measured_on}; {told.year})"
    colour = PUBLISHED_COLOURS[of_kind(told.kind).index(told) % len(PUBLISHED_COLOURS)]
    return Series(label, told.results, published=True, about=told.note, colour=colour)


def title_of(metric: str) -> str:
    """A metric as a heading."""
    return str(TITLES.get(metric) or metric.replace("_", " ").capitalize())


def every(series: Sequence[Series]) -> list[Chart]:
    """All charts of some series: one of bars per metric, and one of the latencies' percentiles.

    Processor shares and the longest single operations stand in the table only.
    """
    # Two runs of the same pool in the same minute are told apart.
    labels = told_apart(one.label for one in series)
    series = [replace(one, label=label) for one, label in zip(series, labels, strict=True)]
    metrics = dict.fromkeys(row.metric for one in series if not one.published for row in one.rows)
    found = [percentiles(series)] if any(name in metrics for name in _PERCENTILES) else []
    bars_of = [name for name in metrics if name not in _PERCENTILES and not name.endswith(("_cpu", "_latency_seconds"))]
    return [chart for chart in [*(bars(series, metric) for metric in bars_of), *found] if chart]


def bars(series: Sequence[Series], metric: str) -> Chart | None:
    """Settings side by side, each series a colour: medians as bars, spreads as whiskers.

    Returns:
        ``None`` where nobody has a figure.
    """
    having = [one for one in series if any(row.metric == metric and row.median is not None for row in one.rows)]
    names = _names(row for one in having for row in one.rows if row.metric == metric)
    if not names:
        return None
    unit = next(row.unit for one in having for row in one.rows if row.metric == metric)
    found = [{row.name: row for row in one.rows if row.metric == metric} for one in having]
    datasets = [
        # A run keeps its colour in every chart, also where another has no figure.
        _dataset(one, series.index(one), [rows.get(name) for name in names])
        for one, rows in zip(having, found, strict=True)
    ]
    table = [(name, *(_cell(rows.get(name)) for rows in found)) for name in names]
    labels = [one.label for one in having]
    return _of_bars(f"chart-{metric}", title_of(metric), _config(unit, names, datasets), labels, table)


def _of_bars(name: str, title: str, config: Config, labels: list[str], table: list[tuple[str, ...]]) -> Chart:
    data = config["data"]
    broad = len(data["labels"]) * len(data["datasets"]) > MOST_BARS
    return Chart(name, title, config, ("Setting", *labels), tuple(table), broad)


def _names(rows: Iterable[Result]) -> list[str]:
    """The settings of some rows, each once, in the order of what they are called by."""
    ordered = results.in_order([row.setting for row in rows])
    return list(dict.fromkeys(results.name_of(setting) for setting in ordered))


def percentiles(series: Sequence[Series]) -> Chart | None:
    """Latencies: for each setting the median and the slowest 5 and 1 of 100, on a logarithmic axis."""
    having = [one for one in series if any(row.metric in _PERCENTILES and row.median for row in one.rows)]
    names = _names(row for one in having for row in one.rows if row.metric in _PERCENTILES)
    if not names:
        return None
    datasets: list[Config] = []
    columns: list[tuple[str, list[Result | None]]] = []
    for metric in _PERCENTILES:
        for one in having:
            found = {row.name: row for row in one.rows if row.metric == metric}
            short = metric.removeprefix("latency_").removesuffix("_seconds")
            label = short if len(having) == 1 else f"{one.label}: {short}"
            rows = [found.get(name) for name in names]
            datasets.append(_dataset(replace(one, label=label), len(datasets), rows))
            columns.append((label, rows))
    config = _config("s", names, datasets)
    config["options"]["scales"]["y"] = {"type": "logarithmic"}
    table = [(name, *(_cell(rows[number]) for __, rows in columns)) for number, name in enumerate(names)]
    return _of_bars("chart-latency", "Latency", config, [label for label, __ in columns], table)


def over_time(runs: Sequence[Benchmark], metric: str) -> Chart | None:
    """One profile on one pool, run after run: a line for each setting, dropped figures as larger points.

    Args:
        runs: the oldest first, each with its samples.

    Returns:
        ``None`` where fewer than two runs have a figure.
    """
    lines: dict[str, list[tuple[Benchmark, Result]]] = {}
    for run in runs:
        for row in results.of(run):
            if row.metric == metric and row.median is not None:
                lines.setdefault(row.name, []).append((run, row))
    if max(map(len, lines.values()), default=0) < 2:
        return None
    unit = next(iter(lines.values()))[0][1].unit
    datasets = [_line(name, points, number) for number, (name, points) in enumerate(lines.items())]
    config: Config = {
        "type": "line", "unit": unit, "data": {"datasets": datasets},
        "options": {"scales": {"x": {"type": "linear"}, "y": {"beginAtZero": True}}},
    }  # fmt: skip
    table = [
        (clock(run.created), name, _cell(row) + (" (dropped)" if _dropped(run, row) else ""))
        for name, points in lines.items()
        for run, row in points
    ]
    title = gettext("{title} over time").format(title=title_of(metric))
    heads = ("Run", "Setting", title_of(metric))
    return Chart(f"history-{metric}", title, config, heads, tuple(table), broad=True)


def _line(name: str, points: list[tuple[Benchmark, Result]], number: int) -> Config:
    return {
        "label": name,
        "data": [{"x": round(run.created.timestamp()), "y": row.median} for run, row in points],
        "spread": [[row.min, row.max] for __, row in points],
        "dropped": [_dropped(run, row) for run, row in points],
        "pointRadius": [7 if _dropped(run, row) else 3 for run, row in points],
        "pointStyle": ["triangle" if _dropped(run, row) else "circle" for run, row in points],
        "colour": COLOURS[number % len(COLOURS)],
    }


def _dropped(run: Benchmark, row: Result) -> bool:
    drops = {(drop["metric"], results.key_of(drop["setting"])) for drop in run.regressions}
    return (row.metric, row.key) in drops


def _dataset(one: Series, number: int, rows: Iterable[Result | None]) -> Config:
    told = list(rows)
    dataset: Config = {
        "label": one.label,
        "data": [row.median if row else None for row in told],
        "spread": [[row.min, row.max] if row and row.repetitions > 1 else None for row in told],
        "colour": one.colour or COLOURS[number % len(COLOURS)],
        "published": one.published,
    }
    return dataset | ({"about": one.about} if one.about else {})


def _config(unit: str, labels: list[str], datasets: list[Config]) -> Config:
    return {
        "type": "bar", "unit": unit, "data": {"labels": labels, "datasets": datasets},
        "options": {"scales": {"x": {"type": "category"}, "y": {"beginAtZero": True}}},
    }  # fmt: skip


def _cell(row: Result | None) -> str:
    if row is None:
        return ""
    if row.median is None or row.min is None or row.max is None:
        return row.note or gettext("not measured")
    told = written(row.median, row.unit)
    if row.repetitions <= 1:
        return told
    low, high = written(row.min, row.unit), written(row.max, row.unit)
    return gettext("{told} ({low} to {high})").format(told=told, low=low, high=high)
