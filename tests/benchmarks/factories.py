# mypy: disable-error-code="no-untyped-call"
"""Rows of benchmarks for tests, plausible by default."""

from django.utils import timezone
from factory.declarations import LazyAttribute, LazyFunction, SubFactory

from benchmarks.models import Benchmark, Sample, Watch
from tests.factories import JobFactory, Rows, StoragePoolFactory


class BenchmarkFactory(Rows[Benchmark]):
    """A quick run of dd that has ended well, without figures; ``job=None`` and ``source="pasted"`` for pasted lines."""

    class Meta:
        model = Benchmark

    pool = SubFactory(StoragePoolFactory)
    host = LazyAttribute(lambda run: run.pool.host if run.pool else None)
    kind = "dd"
    job = LazyAttribute(
        lambda run: (
            JobFactory.create(target=run.pool, kind="benchmark", state="succeeded", finished=timezone.now())
            if run.pool
            else None
        )
    )
    profile_key = "the same steps"
    created_by = "admin"
    finished = LazyFunction(timezone.now)


class SampleFactory(Rows[Sample]):
    class Meta:
        model = Sample

    benchmark = SubFactory(BenchmarkFactory)
    setting = LazyFunction(lambda: {"mode": "write", "sync": "direct", "block": "1M"})
    metric = "write_rate"
    unit = "B/s"
    value = 400e6


class WatchFactory(Rows[Watch]):
    class Meta:
        model = Watch

    pool = SubFactory(StoragePoolFactory)
    kind = "fio"
    created_by = "admin"
