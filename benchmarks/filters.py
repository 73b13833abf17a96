"""Filters of the list of benchmarks."""

import django_filters
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _

from benchmarks.models import Benchmark, BenchmarkKind
from storage_admin.given_filters import GivenFilters, Order, YesOrNo, in_order
from storage_admin.hosts.filters import HostFilter, PoolFilter
from storage_admin.jobs.models import Job


class BenchmarkFilters(GivenFilters):
    """Filters and order of the list of runs."""

    kind = django_filters.ChoiceFilter(choices=BenchmarkKind.choices)
    source = django_filters.ChoiceFilter(choices=Benchmark.Source.choices)
    host = HostFilter()
    pool = PoolFilter()
    state = django_filters.ChoiceFilter(
        choices=Job.State.choices,
        method="by_state",
        label=_("State of the job of the run; pasted results count as succeeded."),
    )
    quick = YesOrNo(method="by_variant", label=_("true: the quick variant; false: the thorough variant."))
    dropped = YesOrNo(method="by_drops", label=_("Whether results are worse than in earlier runs."))
    ordering = Order(("id", "finished"))

    def by_state(self, rows: QuerySet[Benchmark], _name: str, value: str) -> QuerySet[Benchmark]:
        found = Q(job__state=value)
        return rows.filter(found | Q(job=None)) if value == Job.State.SUCCEEDED else rows.filter(found)

    def by_variant(self, rows: QuerySet[Benchmark], _name: str, value: str) -> QuerySet[Benchmark]:
        return rows.filter(source=Benchmark.Source.RUN, quick=value == "true")

    def by_drops(self, rows: QuerySet[Benchmark], _name: str, value: str) -> QuerySet[Benchmark]:
        return rows.exclude(regressions=[]) if value == "true" else rows.filter(regressions=[])

    def by_order(self, rows: QuerySet[Benchmark], _name: str, value: str) -> QuerySet[Benchmark]:
        return in_order(rows, {"id": "id", "finished": "finished"}, value)


class WatchFilters(GivenFilters):
    pool = PoolFilter()
