"""Profiles: a kind of benchmark with its sizes, and what it would cost on a pool, before it starts."""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from django.utils.translation import gettext as _

from benchmarks import boot as storms
from benchmarks import results
from benchmarks.models import Benchmark, BenchmarkKind
from benchmarks.steps import ASSUMED_RATE, MADE, MIB, Sizing, Step, short
from images.rewrite import refusals
from storage_admin.hosts.models import Host, StoragePool

QUICK_REPETITIONS, THOROUGH_REPETITIONS = 3, 5
QUICK_SECONDS, THOROUGH_SECONDS = 5, 30
#: Steps get no smaller than that by themselves: below it, nothing could be measured.
SMALLEST = 32 * MIB
#: Runs whose write rate tells how fast a pool is.
_WRITING = ("dd", "fio", "bonnie")


@dataclass(frozen=True)
class Cost:
    """What a run costs.

    Args:
        bytes_written: about, over all repetitions.
        scratch_bytes: the most that it takes of the pool at any time; all of it is given back.
        seconds_about: about how long it takes.
    """

    bytes_written: int
    scratch_bytes: int
    seconds_about: int


@dataclass(frozen=True)
class Profile:
    """One kind in one variant, worked out for a pool.

    Args:
        missing: why it is not offered there; empty where it is. ``package`` then brings what is missing.
        warnings: what the figures will not say, as sentences.
    """

    kind: str
    quick: bool
    title: str
    question: str
    steps: tuple[dict[str, Any], ...]
    repetitions: int
    cost: Cost
    missing: str = ""
    package: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """A digest of the steps: runs with the same one can be measured against each other."""
        told = json.dumps([self.kind, self.steps], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:32]


def every(pool: StoragePool) -> list[Profile]:
    """Each kind in its quick and its thorough variant, as they would be on a pool."""
    return [build(pool, kind, quick=quick) for kind in BenchmarkKind.values for quick in (True, False)]


def build(
    pool: StoragePool,
    kind: str,
    *,
    quick: bool = True,
    repetitions: int | None = None,
    size_bytes: int | None = None,
    seconds: int | None = None,
    boot: dict[str, Any] | None = None,
) -> Profile:
    """A profile with its steps.

    Args:
        repetitions: of every step; three for the quick variant and five for the thorough one unless given.
        size_bytes: what each step writes or reads; unless given the profile's, halved until it fits into the pool.
        seconds: how long each of fio's steps lasts, or how long guests may take to come up.
        boot: what a boot storm boots (:mod:`benchmarks.boot`); without it, an empty disk is told of.

    Raises:
        InvalidError: the image that is to boot is not there.
    """
    times = repetitions or (QUICK_REPETITIONS if quick else THOROUGH_REPETITIONS)
    made = MADE.get(kind)
    if made is None:
        title = BenchmarkKind(kind).label.capitalize()
        return Profile(kind, quick, title, "", (), times, Cost(0, 0, 0), _("This kind is not offered on this host."))
    memory = memory_of(pool.host)
    boots = storms.of(pool.host, boot) if kind == storms.KIND else None
    usual = storms.SECONDS if boots else QUICK_SECONDS if quick else THOROUGH_SECONDS
    sizing = Sizing(
        quick=quick,
        data_bytes=size_bytes or (made.quick_bytes if quick else made.thorough_bytes),
        seconds=seconds or usual,
        memory_bytes=memory,
        rate=rate_of(pool),
        boots=boots,
    )
    steps = list(made.make(sizing))
    while size_bytes is None and sizing.data_bytes // 2 >= SMALLEST and not _fits(pool, steps):
        # Where even the thorough sizes that memory asks for do not fit, memory is not asked.
        sizing = replace(sizing, data_bytes=sizing.data_bytes // 2, memory_bytes=None)
        steps = list(made.make(sizing))
    cost = Cost(
        bytes_written=sum(step.written for step in steps) * times,
        scratch_bytes=max(step.scratch for step in steps),
        seconds_about=max(1, round(sum(step.seconds for step in steps) * times)),
    )
    missing, package = storms.missing(pool.host, [*made.needs, *(storms.NEEDED if boots else ())])
    warnings = _warnings(kind, steps, memory)
    if boots:
        warnings.append(boots.memory_sentence(max(step.fields["guests"] for step in steps)))
    return Profile(
        kind, quick, _(made.title), _(made.question), tuple(step.fields for step in steps), times, cost, missing,
        package, tuple(warnings),
    )  # fmt: skip


def _fits(pool: StoragePool, steps: list[Step]) -> bool:
    if pool.capacity_bytes is None or pool.available_bytes is None:
        return True  # not known: the agent looks
    needed = max(step.scratch for step in steps)
    return needed <= pool.available_bytes - refusals.reserve_of(pool.capacity_bytes)


def _warnings(kind: str, steps: list[Step], memory: int | None) -> list[str]:
    if kind != "bonnie":
        return []
    size = steps[0].fields["size_bytes"]
    if memory is None:
        told = _(
            "It is not known how much memory the host has. Some of the data may be read from memory, not from the disk."
        )
        return [told]
    if size < 2 * memory:
        told = _(
            "{size} is less than twice the memory of the host. Some of the data is read from memory, not from the "
            "disk. Writes are flushed to the disk and measured correctly."
        )
        return [told.format(size=short(size))]
    return []


def memory_of(host: Host) -> int | None:
    """A host's memory in bytes: as a scan tells it, else as an earlier benchmark did."""
    told = host.capabilities.get("memory_bytes")
    if told is None:
        earlier = Benchmark.objects.filter(host=host).exclude(environment={}).first()
        told = earlier.environment.get("memory_bytes") if earlier else None
    return told if isinstance(told, int) and told > 0 else None


def rate_of(pool: StoragePool) -> int:
    """What a pool writes sequentially, in bytes a second: as last measured there, else assumed."""
    last = Benchmark.objects.filter(pool=pool, kind__in=_WRITING, finished__isnull=False).first()
    if last is None:
        return ASSUMED_RATE
    metrics = ("seq_write_rate", "write_rate")
    rows = [row for row in results.of(last) if "unbuffered" not in row.setting]
    rates = [row.median for row in rows if row.metric in metrics and row.median]
    return max(int(min(rates)), MIB) if rates else ASSUMED_RATE
