"""Filters of the list of benchmarks."""

import django_filters
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _

from benchmarks.models import Benchmark, BenchmarkKind
from storage_admin.given_filters import GivenFilters
from storage_admin.hosts.filters import HostFilter, PoolFilter
from storage_admin.jobs.models import Job

_YES_OR_NO = (("true", "true"), ("false", "false"))
_ORDERS = ("id", "-id", "finished", "-finished")


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
    quick = django_filters.ChoiceFilter(
        choices=_YES_OR_NO, method="by_variant", label=_("true: the quick variant; false: the thorough variant.")
    )
    dropped = django_filters.ChoiceFilter(
        choices=_YES_OR_NO, method="by_drops", label=_("Whether results are worse than in earlier runs.")
    )
    ordering = django_filters.ChoiceFilter(choices=[(name, name) for name in _ORDERS], method="by_order")

    def by_state(self, rows: QuerySet[Benchmark], _name: str, value: str) -> QuerySet[Benchmark]:
        found = Q(job__state=value)
        return rows.filter(found | Q(job=None)) if value == Job.State.SUCCEEDED else rows.filter(found)

    def by_variant(self, rows: QuerySet[Benchmark], _name: str, value: str) -> QuerySet[Benchmark]:
        return rows.filter(source=Benchmark.Source.RUN, quick=value == "true")

    def by_drops(self, rows: QuerySet[Benchmark], _name: str, value: str) -> QuerySet[Benchmark]:
        return rows.exclude(regressions=[]) if value == "true" else rows.filter(regressions=[])

    def by_order(self, rows: QuerySet[Benchmark], _name: str, value: str) -> QuerySet[Benchmark]:
        tie = "-id" if value.startswith("-") else "id"
        return rows.order_by(tie) if value == tie else rows.order_by(value, tie)


class WatchFilters(GivenFilters):
    pool = PoolFilter()
