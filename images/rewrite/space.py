"""Space that jobs need: what the queued and running ones were admitted with is reserved on its filesystem.

Jobs of one host run one after another, or as many at once as it allows, so that the scratch space of most is not
needed at the same time. What stays when a job has ended does add up: with its undo copy kept, the new file lies beside
the original until the window closes. So the worst moment is the sum of all that stays, and the largest of what passes
for as many jobs as run at once (docs/decisions/0009-space-of-admitted-jobs.md).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from django.db.models import QuerySet

from images.kinds.stages import WRITTEN
from images.rewrite import refusals
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from storage_admin.jobs.plans import Plan, Refusal


class Need(NamedTuple):
    """What one job takes of a filesystem, in bytes.

    Args:
        host_id: the host in whose slots it runs.
        scratch: what it takes at most while it is at work.
        lasting: how much of that is still taken when it has ended.
    """

    host_id: int
    scratch: int
    lasting: int


def lasting_bytes(scratch: int | None, before: int, *, goes: bool) -> int:
    """How much of a job's scratch space is still taken when it has ended.

    Args:
        scratch: what the new file takes at most; ``None`` where only the agent can tell.
        before: what the original takes.
        goes: whether the original goes at once, on the same filesystem; else both files stay.
    """
    return max((scratch or 0) - (before if goes else 0), 0)


def worst_moment(needs: Iterable[Need], slots: Mapping[int, int]) -> int:
    """The most that jobs can take at any moment, in whatever order they run, in bytes.

    Args:
        slots: how many of them run at once, by the host's id.
    """
    stays, passing = 0, defaultdict[int, list[int]](list)
    for need in needs:
        stays += need.lasting
        passing[need.host_id].append(need.scratch - need.lasting)
    return stays + sum(sum(sorted(sizes, reverse=True)[: slots[host]]) for host, sizes in passing.items())


@dataclass
class _Filesystem:
    needs: list[Need]
    slots: dict[int, int]


class Admitted:
    """What jobs need on each filesystem: those that are queued or at work, and those that are planned together.

    It asks the database once for each filesystem (two queries), at the first question about it.
    """

    def __init__(self) -> None:
        self._filesystems: dict[str, _Filesystem] = {}

    def against(self, pool: StoragePool, host: Host, need: Need) -> list[Refusal]:
        """Whether one more job fits into a pool beside all others; one that needs nothing always does."""
        if not need.scratch:
            return []
        return refusals.for_space(pool, need.scratch, self.worst_with(pool, host, need) - need.scratch)

    def worst_with(self, pool: StoragePool, host: Host, need: Need) -> int:
        """The most that the jobs take on a pool's filesystem, together with one more, in bytes."""
        there = self._on(pool)
        return worst_moment([*there.needs, need], {need.host_id: slots_of(host)} | there.slots)

    def worst(self, pool: StoragePool) -> int:
        """The most that the jobs take on a pool's filesystem, in bytes."""
        there = self._on(pool)
        return worst_moment(there.needs, there.slots)

    def add(self, pool: StoragePool, host: Host, need: Need) -> None:
        """Counts a job that is planned together with those that come after it."""
        there = self._on(pool)
        there.needs.append(need)
        there.slots.setdefault(host.pk, slots_of(host))

    def _on(self, pool: StoragePool) -> _Filesystem:
        key = filesystem_of(pool)
        if key not in self._filesystems:
            self._filesystems[key] = _load(pool)
        return self._filesystems[key]


def filesystem_of(pool: StoragePool) -> str:
    """A name for the filesystem that a pool is on; a pool that was never scanned has one of its own."""
    return pool.fs_key or f"pool {pool.pk}"


def slots_of(host: Host) -> int:
    """How many rewriting jobs run at once on a host."""
    return max(host.max_jobs, 1)


def planned_need(plan: Plan, host: Host) -> Need:
    """What a job takes, as its plan says."""
    return Need(host.pk, plan.scratch_bytes or 0, plan.lasting_bytes or 0)


def needed_by_running(job: Job) -> dict[str, dict[str, int]]:
    """What other jobs at work may still write on the filesystem that a job writes on.

    One that verifies its new file, or is further, has written it all: that is missing from free space already, and
    counts no more. One that is still writing counts with all of its scratch space, as only its agent knows how much
    is written; agents on one machine tell each other (:mod:`storage_admin.agent.host.space`).

    Returns:
        Bytes by the job's ``uid``, for those on the same host (``here``) and for all others (``elsewhere``).
    """
    found: dict[str, dict[str, int]] = {"here": {}, "elsewhere": {}}
    pool = StoragePool.objects.filter(pk=job.plan.get("scratch_pool")).first()
    if pool is None:
        return found
    running = _jobs_on(pool).filter(state=Job.State.RUNNING).exclude(pk=job.pk).exclude(stage__in=WRITTEN)
    for uid, host, scratch in running.values_list("uid", "host", "plan__scratch_bytes"):
        found["here" if host == job.host_id else "elsewhere"][uid] = scratch or 0
    return found


def _jobs_on(pool: StoragePool) -> QuerySet[Job]:
    """The jobs whose scratch space is on a pool's filesystem, whichever of its pools they name."""
    same = StoragePool.objects.filter(fs_key=pool.fs_key) if pool.fs_key else StoragePool.objects.filter(pk=pool.pk)
    hosts = dict(same.values_list("pk", "host_id"))
    return Job.objects.filter(host__in=set(hosts.values()), plan__scratch_pool__in=list(hosts))


def _load(pool: StoragePool) -> _Filesystem:
    rows = (
        _jobs_on(pool)
        .filter(state__in=Job.ACTIVE)
        .values_list("host_id", "host__max_jobs", "state", "rewrites", "plan__scratch_bytes", "plan__lasting_bytes")
    )
    there, running = _Filesystem([], {}), Counter[int]()
    for host_id, max_jobs, state, rewrites, scratch, lasting in rows:
        # What has no slot, as a benchmark, may be at work beside all that have one.
        there.needs.append(Need(host_id, scratch or 0, (lasting if rewrites else scratch) or 0))
        # An admin may have lowered the limit since they were started.
        running[host_id] += rewrites and state == Job.State.RUNNING
        there.slots[host_id] = max(max_jobs, running[host_id], 1)
    return there
