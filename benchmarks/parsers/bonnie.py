"""bonnie++'s CSV lines, by the format version that each begins with.

Formats 1.96 and 1.97 have 48 columns. 1.98 has 50: how many seeks were asked for, by how many processes, stands before
the figures. bonnie++ 2.00 writes format 1.98, and its own heading (printed for more than one test) leaves those two
out, so that only the version tells. Rates are in KiB (1024 bytes) a second.
Sources: the column names in bonnie++ 2.00a's heading; its result lines as printed and as ``bon_csv2txt`` reads them.
"""

import re
from dataclasses import dataclass

from django.utils.translation import gettext as _

from benchmarks.parsers.readings import TOO_QUICK, Reading, UnreadableError, quoted

_HEAD = ("format_version", "bonnie_version", "name", "concurrency", "seed", "file_size", "io_chunk_size")
_SEEKS = ("asked_seeks", "seek_processes")
_THROUGHPUT = ("putc", "put_block", "rewrite", "getc", "get_block", "seeks")
_FILE_HEAD = ("num_files", "max_size", "min_size", "num_dirs", "file_chunk_size")
_FILES = ("seq_create", "seq_stat", "seq_del", "ran_create", "ran_stat", "ran_del")


def _with_cpu(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(column for name in names for column in (name, f"{name}_cpu"))


_FIGURES = (
    *_with_cpu(_THROUGHPUT), *_FILE_HEAD, *_with_cpu(_FILES), *(f"{name}_latency" for name in (*_THROUGHPUT, *_FILES)),
)  # fmt: skip
_OLD, _NEW = (*_HEAD, *_FIGURES), (*_HEAD, *_SEEKS, *_FIGURES)
COLUMNS = {"1.96": _OLD, "1.97": _OLD, "1.98": _NEW, "2.00": _NEW}

#: What each column is called here, and the unit of its figure; blocks are what guests read and write.
_METRICS = {
    "putc": ("putc", "B/s"), "put_block": ("seq_write", "B/s"), "rewrite": ("rewrite", "B/s"),
    "getc": ("getc", "B/s"), "get_block": ("seq_read", "B/s"), "seeks": ("seeks", "1/s"),
    "seq_create": ("seq_create", "1/s"), "seq_stat": ("seq_stat", "1/s"), "seq_del": ("seq_delete", "1/s"),
    "ran_create": ("rand_create", "1/s"), "ran_stat": ("rand_stat", "1/s"), "ran_del": ("rand_delete", "1/s"),
}  # fmt: skip
_KIB = 1024
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"\d{1,15}(\.\d{1,9})?", re.ASCII)
_LATENCY = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(us|ms|s)", re.ASCII)
_TOO_QUICK = re.compile(r"\++")


@dataclass(frozen=True)
class BonnieRun:
    """One result line.

    Args:
        format_version: of the line; ``version`` is the program's.
        name: what it calls the machine.
        size: of the test's files, as written there (``4G``); empty where none was written.
        files: how many files were made, in units of 1024; empty where none were.
    """

    format_version: str
    version: str
    name: str
    size: str
    files: str
    readings: tuple[Reading, ...]


def parse(text: str) -> list[BonnieRun]:
    """The result lines in a text; headings and empty lines are passed over.

    Raises:
        UnreadableError: a line is no result of a known format, or there is none at all.
    """
    runs = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()  # noqa: PLW2901 (the same line)
        if line and not line.startswith("format_version,"):
            runs.append(_run(line, number))
    if not runs:
        raise UnreadableError(_("The text contains no result line of bonnie++."))
    return runs


def _run(line: str, number: int) -> BonnieRun:
    fields = [field.strip() for field in line.split(",")]
    columns = COLUMNS.get(fields[0])
    if columns is None:
        known = ", ".join(COLUMNS)
        told = _(
            "Line {number} begins with {fields}, which is not a supported format version of bonnie++. "
            "Supported: {known}."
        )
        raise UnreadableError(told.format(number=number, fields=quoted(fields[0], 20), known=known))
    if len(fields) != len(columns):
        told = _("Line {number} has {count} fields, but format {format} has {columns}. The line may have been cut off.")
        counts = {"number": number, "count": len(fields), "format": fields[0], "columns": len(columns)}
        raise UnreadableError(told.format(**counts))
    row = dict(zip(columns, fields, strict=True))
    readings = [reading for name in (*_THROUGHPUT, *_FILES) for reading in _readings(row, name, number)]
    return BonnieRun(
        row["format_version"], row["bonnie_version"], row["name"], row["file_size"], row["num_files"], tuple(readings)
    )


def _readings(row: dict[str, str], column: str, number: int) -> list[Reading]:
    metric, unit = _METRICS[column]
    readings = []
    if row[column]:
        value = _number(row[column], column, number)
        note = TOO_QUICK if value is None else ""
        name = f"{metric}_rate" if unit == "B/s" or column in _FILES else metric
        readings.append(Reading(name, unit, value * _KIB if value is not None and unit == "B/s" else value, note))
    if row[f"{column}_cpu"]:
        share = _number(row[f"{column}_cpu"], f"{column}_cpu", number)
        readings.append(Reading(f"{metric}_cpu", "%", share, TOO_QUICK if share is None else ""))
    if row[f"{column}_latency"]:
        readings.append(_latency(row[f"{column}_latency"], metric, number))
    return readings


def _number(field: str, column: str, number: int) -> float | None:
    """The figure, ``None`` for ``+++++``."""
    if _TOO_QUICK.fullmatch(field):
        return None
    if not _NUMBER.fullmatch(field):
        told = _("Line {number}: {field} is not a valid value for {column}.")
        raise UnreadableError(told.format(number=number, field=quoted(field, 20), column=column))
    return float(field)


def _latency(field: str, metric: str, number: int) -> Reading:
    """The longest time that one operation took."""
    name = f"{metric}_latency_seconds"
    if _TOO_QUICK.fullmatch(field):
        return Reading(name, "s", None, TOO_QUICK)
    found = _LATENCY.fullmatch(field)
    if found is None:
        told = _("Line {number}: {field} is not a valid latency. Latencies end in us, ms or s.")
        raise UnreadableError(told.format(number=number, field=quoted(field, 20)))
    return Reading(name, "s", float(found[1]) * _SECONDS[found[2]])
