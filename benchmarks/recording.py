"""What an agent tells while it measures, as rows."""

import math
from typing import Any

from django.db.models import Q
from django.utils import timezone

from benchmarks import regression, results
from benchmarks.models import Benchmark, Sample
from benchmarks.parsers.reading import read
from benchmarks.parsers.readings import Reading, UnreadableError
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import plain

#: Of what a host says, so much is kept.
MOST_NOTES = 100
LONGEST_NOTE = 500
#: Jobs that are named as those that were at work meanwhile, and kinds that read next to nothing.
MOST_NAMED = 5
LIGHT = ("scan", "recover")
UNITS = frozenset({"s", "B/s", "1/s", "B", "%"})


def start(benchmark: Benchmark) -> None:
    """A run begins: whatever an attempt before it left goes."""
    benchmark.samples.all().delete()


def take(benchmark: Benchmark, event: dict[str, Any]) -> bool:
    """One event of the agent.

    Returns:
        ``False`` when it is none of a benchmark's.
    """
    match event["event"]:
        case "environment":
            Benchmark.objects.filter(pk=benchmark.pk).update(environment=_object(event.get("data")))
        case "environment_after":
            Benchmark.objects.filter(pk=benchmark.pk).update(environment_after=_object(event.get("data")))
        case "note":
            note(benchmark, str(event.get("text", "")))
        case "sample":
            _take_sample(benchmark, event)
        case "output":
            _take_output(benchmark, event)
        case _:
            return False
    return True


def note(benchmark: Benchmark, text: str) -> None:
    """Adds a sentence to what is to be known of a run, once."""
    kept = Benchmark.objects.values_list("notes", flat=True).get(pk=benchmark.pk)
    told = plain(text)[:LONGEST_NOTE]
    if told and told not in kept and len(kept) < MOST_NOTES:
        Benchmark.objects.filter(pk=benchmark.pk).update(notes=[*kept, told])


def _object(told: Any) -> dict[str, Any]:
    """An object as every database takes it; what a device calls itself may hold anything."""
    return {plain(str(name)): _value(value) for name, value in told.items()} if isinstance(told, dict) else {}


def _value(told: Any) -> Any:
    match told:
        case str():
            return plain(told)
        case dict():
            return _object(told)
        case list():
            return [_value(one) for one in told]
        case float() if not math.isfinite(told):
            return None
        case _:
            return told


def _take_sample(benchmark: Benchmark, event: dict[str, Any]) -> None:
    value, unit = event.get("value"), str(event.get("unit", ""))
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if unit not in UNITS or not (number or value is None):
        note(benchmark, f"The agent reported an invalid result: {event.get('metric')!s} {value!r} {unit}.")
        return
    reading = Reading(str(event.get("metric", "")), unit, value, str(event.get("note", "")))
    _row(benchmark, event, event.get("setting"), reading)


def _take_output(benchmark: Benchmark, event: dict[str, Any]) -> None:
    setting = event.get("setting")
    setting = setting if isinstance(setting, dict) else {}
    tool = str(event.get("tool", ""))
    try:
        readings = read(tool, str(event.get("text", "")), setting)
    except UnreadableError as error:
        note(benchmark, f"{tool} at {results.name_of(setting)}: {error.detail}")
        return
    for one in readings:
        _row(benchmark, event, setting | dict(one.setting), one)


def _row(benchmark: Benchmark, event: dict[str, Any], setting: Any, one: Reading) -> None:
    asked = event.get("setting")
    places = [number for number, step in enumerate(benchmark.steps) if step.get("setting") == asked]
    repetition = event.get("repetition", 1)
    Sample.objects.create(
        benchmark=benchmark, step=places[0] if places else None, setting=_object(setting),
        metric=plain(one.metric)[:40], unit=one.unit, value=one.value, note=plain(one.note)[:200],
        repetition=max(repetition, 1) if isinstance(repetition, int) else 1,
    )  # fmt: skip


def finish(benchmark: Benchmark, result: dict[str, Any]) -> dict[str, Any]:
    """A run has ended well. Call it within the transaction that ends the job.

    Args:
        result: the agent's: ``steps``, ``scratch_bytes_at_most``, ``bytes_written``, ``caches``.

    Returns:
        What the job's result says beside it.
    """
    note(benchmark, _company(benchmark))
    caches = str(result.get("caches", ""))
    benchmark.caches = caches if caches in Benchmark.Caches.values else ""
    benchmark.finished = timezone.now()
    benchmark.regressions = regression.found_in(benchmark)
    benchmark.save(update_fields=["caches", "finished", "regressions"])
    regression.tell_regressions(benchmark)
    return {"benchmark": benchmark.pk, "regressions": len(benchmark.regressions)}


def _company(benchmark: Benchmark) -> str:
    """A sentence about other jobs that were at work on the host meanwhile; empty where there were none."""
    job = benchmark.job
    if job is None or job.started is None:
        return ""
    meanwhile = Q(state=Job.State.RUNNING) | Q(finished__gt=job.started)
    others = Job.objects.filter(meanwhile, host=job.host_id, started__isnull=False).exclude(pk=job.pk)
    named = [
        f"{kind} {number}" for number, kind in others.exclude(kind__in=LIGHT).order_by("pk").values_list("pk", "kind")
    ]
    if not named:
        return ""
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return (
        "Other jobs were running on the host at the same time and affected the results: "
        f"{', '.join(named[:MOST_NAMED])}{more}."
    )
