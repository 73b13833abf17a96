"""Figures of a run: median and spread over its repetitions."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.models import Benchmark, Sample
from storage_admin.csv_export import line

#: Of these, less is better; of the sizes and shares below, neither is; of everything else, more is.
_LESS = ("_seconds",)
_NEITHER = ("physical_bytes",)
#: Values and names of settings whose own word is one of a tool's.
_WORDS = {
    "randread": "random read", "randwrite": "random write", "randrw": "random mixed", "extended_l2": "extended L2",
}  # fmt: skip
#: Parts of a setting in the order in which one names them: PostgreSQL keeps none.
_PARTS = (
    "rw", "mode", "layout", "preallocation", "cluster_size", "extended_l2", "sync", "cache", "io", "block", "depth",
    "guests", "direction", "size", "files",
)  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,12})([KMGT]?)")
_HEADS = ("setting", "metric", "unit", "median", "min", "max", "repetitions", "note")
#: Larger than any size.
_BEYOND = 1 << 100


@dataclass(frozen=True)
class Result:
    """One metric of one setting.

    Args:
        unit: of ``median``, ``min`` and ``max``, which are ``None`` where nothing could be measured.
        repetitions: how many figures they are made of.
        note: why there is no figure, or fewer than repetitions.
    """

    metric: str
    unit: str
    setting: dict[str, Any]
    median: float | None
    min: float | None
    max: float | None
    repetitions: int
    note: str = ""

    @property
    def name(self) -> str:
        """The setting as one writes it: ``64K``, ``random read 4K depth 32``."""
        return name_of(self.setting)

    @property
    def key(self) -> str:
        """The same for the same setting."""
        return key_of(self.setting)


def key_of(setting: dict[str, Any]) -> str:
    """The same for the same setting, in whatever order it names its parts."""
    return json.dumps(setting, sort_keys=True)


def name_of(setting: dict[str, Any]) -> str:
    """A setting as one writes it: texts as they are, numbers and switches with what they are of."""
    words = []
    for name in sorted(setting, key=_part):
        value = setting[name]
        of = _WORDS.get(name) or name.replace("_", " ")
        bare = isinstance(value, str) and value != "on"
        words.append(_WORDS.get(value, value) if bare else of + (f" {value}" if value != "on" else ""))
    return " ".join(words)


def in_order(settings: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings as a chart shows them: sizes and numbers by their value, words as they first appear.

    What has layouts compares these: there each block size has all of them, one after the other.
    """
    told = list({key_of(setting): setting for setting in settings}.values())
    names = sorted({name for setting in told for name in setting}, key=_part)
    if "layout" in names and "block" in names:
        names.sort(key=lambda name: name != "block")
    words = {name: list(dict.fromkeys(setting.get(name) for setting in told)) for name in names}

    def place(setting: dict[str, Any]) -> list[float]:
        return [_place(setting.get(name), words[name]) for name in names]

    return sorted(told, key=place)


def _part(name: str) -> tuple[int, str]:
    return (_PARTS.index(name) if name in _PARTS else len(_PARTS), name)


def _place(value: Any, words: list[Any]) -> float:
    """Where a value stands among others: what is not there first, then sizes, then words."""
    if value is None:
        return -1
    if isinstance(value, int):
        return value
    size = _SIZE.fullmatch(str(value))
    return int(size[1]) << 10 * " KMGT".index(size[2] or " ") if size else _BEYOND + words.index(value)


def better(metric: str) -> int:
    """1 where more of a metric is better, -1 where less is, 0 where neither."""
    if metric in _NEITHER or metric.endswith("_cpu"):
        return 0
    return -1 if metric.endswith(_LESS) else 1


def of(benchmark: Benchmark) -> list[Result]:
    """The results of a run, in the order of its steps."""
    return summed(benchmark.samples.all())


def summed(samples: Iterable[Sample]) -> list[Result]:
    """Samples by setting and metric, in the order in which they first appear."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((key_of(sample.setting), sample.metric), []).append(sample)
    return [_result(group) for group in groups.values()]


def _result(group: list[Sample]) -> Result:
    values = [sample.value for sample in group if sample.value is not None]
    notes = dict.fromkeys(sample.note for sample in group if sample.note)
    first = group[0]
    return Result(
        first.metric, first.unit, first.setting,
        median(values) if values else None, min(values, default=None), max(values, default=None),
        len(values), "; ".join(notes),
    )  # fmt: skip


def table(rows: Iterable[Result]) -> str:
    """Results as CSV with a heading, units in a column of their own, figures in full."""
    return _as_csv(_HEADS, map(_cells, rows))


def compared(told: Iterable[tuple[Sequence[str], Iterable[Result]]], heads: Sequence[str]) -> str:
    """Results of several runs as one CSV, a line for each figure: whose it is stands before it.

    Args:
        told: words on a run, as many as ``heads``, and its results.
    """
    return _as_csv([*heads, *_HEADS], ([*words, *_cells(row)] for words, rows in told for row in rows))


def _as_csv(heads: Iterable[str], rows: Iterable[list[Any]]) -> str:
    return ",".join(heads) + "\r\n" + "".join(map(line, rows))


def _cells(row: Result) -> list[Any]:
    return [row.name, row.metric, row.unit, row.median, row.min, row.max, row.repetitions, row.note]
