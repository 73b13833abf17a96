"""Runs of benchmarks: the list, one run with its charts as they come, runs side by side."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_safe

from benchmarks import advice, charts, environment, published, results, selectors
from benchmarks.charts import Series
from benchmarks.filters import BenchmarkFilters
from benchmarks.models import Benchmark, BenchmarkKind
from benchmarks.published import Published
from benchmarks.results import Result
from storage_admin.accounts.saved_views import list_page
from storage_admin.charts import Chart
from storage_admin.csv_export import Columns, csv_answer
from storage_admin.errors import NotFoundError
from storage_admin.hosts.selectors import pool_names
from storage_admin.web.forms import Wrong
from storage_admin.web.lists import Filtered, as_choices, filtered
from storage_admin.web.page import PageRequest, live, live_body, live_context, page, paginated, wants_fragment
from storage_admin.web.pages.jobs import status_of
from storage_admin.web.templatetags.figures import kind_title

PER_PAGE = 50
PAGE = list_page("benchmarks", gettext_noop("Benchmarks"), BenchmarkFilters.base_filters)
#: In an address: with ``published=0`` charts show only what was measured here.
PUBLISHED = "published"
#: The highest of one's own and of published figures so many times apart, or a published one so many times below the
#: highest, make the axis logarithmic: on a linear one their bars could not be read.
DWARFED, HIDDEN = 8, 50


@require_safe
@page()
def benchmarks(request: PageRequest) -> HttpResponseBase:
    """All runs, the newest first, by pool and kind. The rows refresh while one of them is at work."""
    found = _listed(request)
    asked = found.values
    rows = paginated(request, found.rows, PER_PAGE)
    context = {"rows": rows, "filtered": bool(asked), "ignored": found.ignored, "most": selectors.MOST_COMPARED}
    query = request.GET.copy()
    query.pop("v", None)
    url = f"{reverse('benchmarks')}?{query.urlencode()}"
    every = "3s" if any(run.job and run.job.active for run in rows) else ""
    if wants_fragment(request):
        return live(request, "benchmarks/list.html#rows", context, url=url, every=every)
    body, version = live_body(request, "benchmarks/list.html#rows", context)
    context |= {
        "section": "benchmarks",
        "kinds": as_choices(((kind, kind_title(kind)) for kind in BenchmarkKind.values), asked.get("kind", "")),
        "pools": as_choices(pool_names(request.actor), asked.get("pool", "")),
    } | live_context(body, version, url=url, every=every)
    return render(request, "benchmarks/list.html", context)


def _listed(request: PageRequest) -> Filtered[Benchmark]:
    return filtered(request, BenchmarkFilters, selectors.benchmarks_for(request.actor))


#: A line of the list as CSV; the figures of a run are a file of their own.
CSV_COLUMNS: Columns = {
    "id": "pk",
    "kind": "kind",
    "source": "source",
    "quick": "quick",
    "state": lambda run: run.job.state if run.job else None,
    "host": lambda run: run.host.name if run.host else None,
    "pool": lambda run: run.pool.name if run.pool else None,
    "label": "label",
    "caches": "caches",
    "dropped": lambda run: len(run.regressions) if run.finished else None,
    "job": "job_id",
    "by": "created_by",
    "created": "created",
    "finished": "finished",
}


@require_safe
@page()
def benchmarks_csv(request: PageRequest) -> HttpResponseBase:
    """The whole list as it is filtered."""
    return csv_answer("benchmarks", CSV_COLUMNS, _listed(request).exact())


def run_of(request: PageRequest, run_id: int) -> Benchmark:
    """A run that exists for who asks.

    Raises:
        NotFoundError: there is none.
    """
    run = selectors.benchmarks_for(request.actor).filter(pk=run_id).first()
    if run is None:
        raise NotFoundError(_("There is no run {run}.").format(run=run_id))
    return run


@require_safe
@page()
def benchmark(request: PageRequest, run_id: int) -> HttpResponseBase:
    """One run: its progress, what to choose from it, its charts and figures, what they were measured on."""
    run = run_of(request, run_id)
    context = _run(request, run)
    body, version = live_body(request, "benchmarks/figures.html", context)
    context["figures"] = live_context(body, version, url=_figures_url(request, run), every=_every(run, "3s"))
    if run.job is not None:
        told = status_of(run.job)
        body, version = live_body(request, "jobs/status.html", told)
        url = reverse("benchmark_status", args=[run.pk])
        context["status"] = live_context(body, version, url=url, every=_every(run, "1s"))
    return render(request, "benchmarks/run.html", context | {"section": "benchmarks"})


@require_safe
@page()
def benchmark_status(request: PageRequest, run_id: int) -> HttpResponseBase:
    """The progress of a run, as its job's page shows it."""
    run = run_of(request, run_id)
    if run.job is None:
        raise NotFoundError(_("Run {run} has no job.").format(run=run.pk))
    url = reverse("benchmark_status", args=[run.pk])
    return live(request, "jobs/status.html", status_of(run.job), url=url, every=_every(run, "1s"))


@require_safe
@page()
def benchmark_figures(request: PageRequest, run_id: int) -> HttpResponseBase:
    """Charts and figures of a run as they come; what stands beside them comes along."""
    run = run_of(request, run_id)
    url, every = _figures_url(request, run), _every(run, "3s")
    beside = "benchmarks/run.html#beside"
    return live(request, "benchmarks/figures.html", _run(request, run), url=url, every=every, beside=beside)


@require_safe
@page()
def benchmark_csv(request: PageRequest, run_id: int) -> HttpResponseBase:
    """The figures of a run as CSV."""
    run = run_of(request, run_id)
    answer = HttpResponse(results.table(results.of(run)), content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = f'attachment; filename="benchmark-{run.pk}.csv"'
    return answer


def _every(run: Benchmark, often: str) -> str:
    return often if run.job is not None and run.job.active else ""


def _figures_url(request: PageRequest, run: Benchmark) -> str:
    address = reverse("benchmark_figures", args=[run.pk])
    return address if _with_published(request) else f"{address}?{PUBLISHED}=0"


def _with_published(request: PageRequest) -> bool:
    return request.GET.get(PUBLISHED) != "0"


def _run(request: PageRequest, run: Benchmark) -> dict[str, Any]:
    rows = results.of(run)
    about = _("caches {caches}").format(caches=run.caches) if run.caches else ""
    mine = Series(_("this run"), tuple(rows), about=about)
    references = published.of_kind(run.kind)
    where = run.pool.name if run.pool else run.label or _("this machine")
    return {
        "run": run,
        "active": run.job is not None and run.job.active,
        "results": rows,
        "charts": drawn([mine], references if _with_published(request) else []),
        "references": references,
        "with_published": _with_published(request),
        "boot_facts": published.BOOT_FACTS if run.kind == BenchmarkKind.BOOT else "",
        "advice": advice.of(run.kind, rows, where) if run.finished else [],
        "environment": environment.told(run),
        "before": _before(run),
    }


def drawn(series: list[Series], references: list[Published]) -> list[Chart]:
    """The charts of runs, with published series where there is a figure of a run to stand beside."""
    if not series:
        return []
    made = charts.every([*series, *map(charts.published_series, references)])
    return [_legible(chart) for chart in made if not all(one["published"] for one in chart.config["data"]["datasets"])]


def _legible(chart: Chart) -> Chart:
    """Where bars beside published ones could not be seen, the axis is logarithmic, and the title says so."""
    axis = chart.config["options"]["scales"]["y"]
    told: dict[bool, list[float]] = {True: [], False: []}
    for one in chart.config["data"]["datasets"]:
        told[one["published"]] += [value for value in one["data"] if value]
    if axis.get("type") == "logarithmic" or not told[True] or not told[False]:
        return chart
    tops = [max(values) for values in told.values()]
    if max(tops) <= DWARFED * min(tops) and max(tops) <= HIDDEN * min(told[True]):
        return chart
    config = chart.config | {"options": {"scales": chart.config["options"]["scales"] | {"y": {"type": "logarithmic"}}}}
    return replace(chart, title=_("{title}, logarithmic").format(title=chart.title), config=config)


def _before(run: Benchmark) -> Benchmark | None:
    """The last run of the same steps on the same pool before it."""
    if run.pool_id is None or not run.profile_key:
        return None
    same = Benchmark.objects.filter(pool=run.pool_id, kind=run.kind, profile_key=run.profile_key, pk__lt=run.pk)
    return same.filter(finished__isnull=False).first()


@require_safe
@page()
def benchmark_compare(request: PageRequest) -> HttpResponseBase:
    """Any runs side by side: ``ids=1,2`` or ``ids=1&ids=2``, in that order."""
    asked, problem = _ids(",".join(request.GET.getlist("ids")))
    runs = _asked_for(request, asked)
    kinds = list(dict.fromkeys(run.kind for run in runs))
    references = [one for kind in kinds for one in published.of_kind(kind)]
    series = [charts.series_of(run) for run in runs]
    caches = {run.caches for run in runs if run.caches}
    context = {
        "section": "benchmarks",
        "error": Wrong("", {"ids": problem}) if problem else None,
        "runs": [(run, dict(environment.told(run))) for run in runs],
        "ids": ",".join(map(str, asked)),
        "charts": drawn(series, references if _with_published(request) else []),
        "references": references,
        "with_published": _with_published(request),
        "without": [run for run, one in zip(runs, series, strict=True) if not any(row.median for row in one.rows)],
        "several_kinds": len(kinds) > 1,
        "several_caches": len(caches) > 1,
    }
    return render(request, "benchmarks/compare.html", context, status=400 if problem else 200)


@require_safe
@page()
def benchmark_compare_csv(request: PageRequest) -> HttpResponseBase:
    """The figures of several runs as one CSV, with what was published of their kinds unless that is left out."""
    asked, problem = _ids(",".join(request.GET.getlist("ids")))
    if problem:
        return HttpResponse(problem, content_type="text/plain; charset=utf-8", status=400)
    told: list[tuple[list[str], Sequence[Result]]] = [
        (_words(run), results.of(run)) for run in _asked_for(request, asked)
    ]
    if _with_published(request):
        kinds = dict.fromkeys(words[3] for words, __ in told)
        references = [one for kind in kinds for one in published.of_kind(kind)]
        told += [(["published", one.measured_on, one.title, one.kind, one.year, ""], one.results) for one in references]
    text = results.compared(told, ("run", "host", "pool", "kind", "begun", "caches"))
    answer = HttpResponse(text, content_type="text/csv; charset=utf-8")
    answer["Content-Disposition"] = 'attachment; filename="benchmarks-compared.csv"'
    return answer


def _words(run: Benchmark) -> list[str]:
    where = (run.pool.host.name, run.pool.name) if run.pool else ("", run.label)
    return [str(run.pk), *where, run.kind, run.created.isoformat(timespec="seconds"), run.caches]


def _asked_for(request: PageRequest, asked: list[int]) -> list[Benchmark]:
    """Runs with their figures, in that order.

    Raises:
        NotFoundError: one of them does not exist for who asks.
    """
    rows = selectors.with_samples(selectors.benchmarks_for(request.actor).filter(pk__in=asked))
    found = {run.pk: run for run in rows}
    if missing := [number for number in asked if number not in found]:
        raise NotFoundError(_("There is no run {missing}.").format(missing=missing[0]))
    return [found[number] for number in asked]


def _ids(text: str) -> tuple[list[int], str]:
    """The ids, and what is wrong with them."""
    parts = [part for part in text.split(",") if part]
    if not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        return [], _("Enter run numbers, separated by commas.")
    numbers = list(dict.fromkeys(map(int, parts)))
    if len(numbers) > selectors.MOST_COMPARED:
        return [], _("At most {most} runs fit in one chart; select fewer.").format(most=selectors.MOST_COMPARED)
    return numbers, ""
