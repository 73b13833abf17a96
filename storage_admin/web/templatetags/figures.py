"""Figures of benchmarks in templates, with the same digits and units as in the sentences about them."""

from django import template
from django.utils.translation import gettext as _

from benchmarks import charts, figures, results
from benchmarks.models import Benchmark, BenchmarkKind
from benchmarks.steps import MADE
from storage_admin.jobs.models import Job

register = template.Library()


@register.filter
def written(value: float | None, unit: str) -> str:
    """A figure with its unit: ``412 MiB/s``, ``8,120 a second``; ``not measured`` for ``None``."""
    return _("not measured") if value is None else figures.written(value, unit)


@register.filter
def metric_title(metric: str) -> str:
    """A metric as a heading; what stands in tables only by what it belongs to."""
    for suffix, word in (("_cpu", _("processor")), ("_latency_seconds", _("longest single operation"))):
        if metric.endswith(suffix):
            base = metric.removesuffix(suffix)
            named = f"{base}_rate" if f"{base}_rate" in charts.TITLES else base
            return f"{charts.title_of(named)}, {word}"
    return charts.title_of(metric)


@register.filter
def kind_title(kind: str) -> str:
    """A kind of benchmark as a heading, the same as on the button that starts it."""
    if kind in MADE:
        return _(MADE[kind].title)
    return BenchmarkKind(kind).label.capitalize() if kind in BenchmarkKind.values else kind


@register.filter
def setting_name(setting: dict[str, str | int]) -> str:
    """A setting as one writes it: ``64K``, ``random read 4K depth 32``."""
    return results.name_of(setting)


@register.filter
def state_of(run: Benchmark) -> str:
    """The state of a run's job; of one whose job is gone, what its row still tells."""
    if run.job is not None:
        return str(run.job.state)
    return str(Job.State.SUCCEEDED) if run.finished else "unknown"


@register.filter
def parts(text: str) -> list[str]:
    """What stands between the commas."""
    return text.split(",")
