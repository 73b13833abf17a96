"""Filters of the list of benchmarks."""

import django_filters

from benchmarks.models import Benchmark, BenchmarkKind
from storage_admin.hosts.filters import HostFilter, PoolFilter


class BenchmarkFilters(django_filters.FilterSet):  # type: ignore[misc]  # an untyped library
    kind = django_filters.ChoiceFilter(choices=BenchmarkKind.choices)
    source = django_filters.ChoiceFilter(choices=Benchmark.Source.choices)
    host = HostFilter()
    pool = PoolFilter()


class WatchFilters(django_filters.FilterSet):  # type: ignore[misc]  # an untyped library
    pool = PoolFilter()
