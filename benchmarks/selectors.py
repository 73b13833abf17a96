"""Reads: runs and their figures, as far as they exist for the actor."""

from django.db.models import Prefetch, QuerySet

from benchmarks import regression
from benchmarks.models import Benchmark, Sample, Watch
from storage_admin.accounts.models import Actor
from storage_admin.hosts.selectors import in_scope

#: Runs that can be compared at once, and that a history goes back.
MOST_COMPARED = 12
LONGEST_HISTORY = 100


def benchmarks_for(actor: Actor) -> QuerySet[Benchmark]:
    """The runs on hosts that exist for ``actor``, newest first. Pasted ones have no host: a limited token has none."""
    rows = Benchmark.objects.select_related("host", "pool", "pool__host", "job", "job__host")
    return in_scope(rows.defer("host__capabilities", "pool__path_bytes", "job__plan", "job__commands"), actor)


def with_samples(rows: QuerySet[Benchmark]) -> QuerySet[Benchmark]:
    """The same with every figure, in one query more."""
    return rows.prefetch_related(Prefetch("samples", Sample.objects.order_by("id")))


def history(benchmark: Benchmark) -> list[Benchmark]:
    """The runs of the same steps on the same pool that ended well, the oldest first, with their figures."""
    return list(with_samples(regression.same_steps(benchmark))[:LONGEST_HISTORY])[::-1]


def last_of(kind: str, pool_id: int) -> Benchmark | None:
    """The newest run of a kind on a pool that ended well, with its figures."""
    rows = Benchmark.objects.filter(pool=pool_id, kind=kind, finished__isnull=False)
    return with_samples(rows).order_by("-finished").first()


def watches_for(actor: Actor) -> QuerySet[Watch]:
    """What is run on a schedule, on pools that exist for ``actor``."""
    rows = Watch.objects.select_related("pool", "pool__host").defer("pool__path_bytes", "pool__host__capabilities")
    return in_scope(rows, actor, "pool__host")
