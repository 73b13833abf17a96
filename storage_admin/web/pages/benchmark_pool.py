"""A pool over time: the runs of one profile as lines, and the profiles that are run there on a schedule."""

from typing import Any

from django.db.models import Count, Max
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST, require_safe

from benchmarks import charts, regression, selectors, services
from benchmarks.models import Benchmark
from benchmarks.steps import WATCHABLE
from storage_admin.accounts.models import Role
from storage_admin.charts import Chart
from storage_admin.errors import NotFoundError
from storage_admin.hosts.models import StoragePool
from storage_admin.web.forms import Form, status_of, typed
from storage_admin.web.page import PageRequest, attempt, page
from storage_admin.web.pages.pools import pool_of

#: What says too little to be followed over time; it stands in each run's table.
_NOT_FOLLOWED = ("_cpu", "_latency_seconds", "physical_bytes")


@require_safe
@page()
def benchmark_history(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """The runs of one profile on a pool (``profile``: its key), and what is watched there."""
    return _shown(request, pool_of(request, pool_id))


def _shown(request: PageRequest, pool: StoragePool) -> HttpResponseBase:
    followed = _profiles(pool)
    chosen = next((row for row in followed if row["profile_key"] == request.GET.get("profile")), None)
    chosen = chosen or (followed[0] if followed else None)
    last = Benchmark.objects.filter(pk=chosen["last"]).first() if chosen else None
    runs = selectors.history(last) if last else []
    few = regression.FEWEST if len(runs) < selectors.LONGEST_HISTORY else 0
    context = {
        "section": "benchmarks",
        "pool": pool,
        "profiles": [row | {"chosen": row is chosen} for row in followed],
        "runs": [(run, number >= few) for number, run in enumerate(runs)][::-1],
        "last": runs[-1] if runs else None,
        "charts": _charts(runs),
        "newest_ids": ",".join(str(run.pk) for run in runs[-2:]),
        "watches": selectors.watches_for(request.actor).filter(pool=pool),
        "watchable": list(WATCHABLE),
        "form": typed(request, reverse("benchmark_watch", args=[pool.pk]), {"kind": "", "every_hours": "24"}),
    }
    return render(request, "benchmarks/history.html", context, status=status_of(request))


def _profiles(pool: StoragePool) -> list[dict[str, Any]]:
    """The profiles that ended well on a pool, the one that ran last first."""
    ended = Benchmark.objects.filter(pool=pool, finished__isnull=False).exclude(profile_key="").order_by()
    rows = ended.values("kind", "quick", "profile_key").annotate(count=Count("id"), last=Max("id"))
    return [dict(row) for row in rows.order_by("-last")]


def _charts(runs: list[Benchmark]) -> list[Chart]:
    metrics = dict.fromkeys(sample.metric for run in runs for sample in run.samples.all())
    lines = [charts.over_time(runs, metric) for metric in metrics if not metric.endswith(_NOT_FOLLOWED)]
    return [chart for chart in lines if chart]


@require_POST
@page(Role.OPERATOR)
def benchmark_watch(request: PageRequest, pool_id: int) -> HttpResponseBase:
    """Has a quick profile run on a pool again and again."""
    pool, form = pool_of(request, pool_id), Form(request)
    hours = form.whole("every_hours", required=True) or 0
    watched = form.save(
        lambda: services.watch(request.actor, pool, form.text("kind"), hours),
        _("Scheduled. The first run starts within ten minutes."),
    )
    return _shown(request, pool) if watched is None else redirect("benchmark_history", pool.pk)


@require_POST
@page(Role.OPERATOR)
def benchmark_unwatch(request: PageRequest, watch_id: int) -> HttpResponseBase:
    """Ends a watch."""
    row = selectors.watches_for(request.actor).filter(pk=watch_id).first()
    if row is None:
        raise NotFoundError(_("There is no schedule {watch}.").format(watch=watch_id))
    attempt(request, lambda: services.unwatch(request.actor, row), _("The schedule is removed. Its runs are kept."))
    return redirect("benchmark_history", row.pool_id)
