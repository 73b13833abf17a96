"""fio's JSON (``--output-format=json``): rates, operations a second, percentiles of completion latency.

Source: fio's documentation, "JSON output": ``bw_bytes`` in bytes a second, ``clat_ns`` in nanoseconds.
"""

import json
import math
from typing import Any

from django.utils.translation import gettext as _

from benchmarks.parsers.readings import Reading, UnreadableError, quoted

PERCENTILES = (50, 95, 99)
_NANO = 1e-9
NOTHING = "no operation completed in the time"


def parse(text: str, rw: str) -> list[Reading]:
    """Figures of each direction: the rate of sequential work, operations a second of random work, and latencies.

    Several jobs in one output count together: rates are added, of latencies the highest holds.

    Args:
        rw: as fio was asked: ``read``, ``write``, ``randread``, ``randwrite``, ``randrw``. Of the last, both directions
            are told apart by the reading's setting ``direction``.

    Raises:
        UnreadableError: it is no such output, or a job in it failed.
    """
    jobs = _jobs(text)
    random = rw.startswith("rand")
    directions = ("read", "write") if rw.endswith("rw") else (rw.removeprefix("rand"),)
    readings: list[Reading] = []
    for direction in directions:
        setting = {"direction": direction} if len(directions) > 1 else {}
        parts = [_part(job, direction) for job in jobs]
        done = sum(_figure(part, "total_ios") for part in parts)
        metric, unit, key = (
            (f"rand_{direction}_iops", "1/s", "iops") if random else (f"seq_{direction}_rate", "B/s", "bw_bytes")
        )
        if not done:
            readings.append(Reading(metric, unit, None, NOTHING, setting))
            continue
        readings.append(Reading(metric, unit, sum(_figure(part, key) for part in parts), "", setting))
        readings += _latencies(parts, setting)
    return readings


def _jobs(text: str) -> list[dict[str, Any]]:
    # fio may warn before it begins; nothing after the object belongs to it.
    start = text.find("{")
    try:
        told, __ = json.JSONDecoder().raw_decode(text, max(start, 0))
    except (ValueError, RecursionError):
        raise UnreadableError(_("fio did not return JSON: {text}.").format(text=quoted(text))) from None
    jobs = told.get("jobs") if isinstance(told, dict) else None
    if not isinstance(jobs, list) or not jobs or not all(isinstance(job, dict) for job in jobs):
        raise UnreadableError(_("fio reported no jobs."))
    for job in jobs:
        if job.get("error"):
            raise UnreadableError(_("fio failed with error {error}.").format(error=quoted(str(job["error"]), 20)))
    return jobs


def _part(job: dict[str, Any], direction: str) -> dict[str, Any]:
    part = job.get(direction)
    if not isinstance(part, dict):
        raise UnreadableError(_("fio reported no “{direction}” section.").format(direction=direction))
    return part


def _figure(part: dict[str, Any], key: str) -> float:
    value = part.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise UnreadableError(_("fio reported no value for {key}.").format(key=key))
    return float(value)


def _latencies(parts: list[dict[str, Any]], setting: dict[str, str]) -> list[Reading]:
    readings = []
    for percentile in PERCENTILES:
        found = []
        for part in parts:
            clat = part.get("clat_ns")
            table = clat.get("percentile") if isinstance(clat, dict) else None
            if isinstance(table, dict) and f"{percentile}.000000" in table:
                found.append(_figure(table, f"{percentile}.000000"))
        if found:
            readings.append(Reading(f"latency_p{percentile}_seconds", "s", max(found) * _NANO, "", setting))
    return readings
