"""The job kind ``benchmark``: measures a pool, on scratch files that the agent makes in it and removes."""

from typing import Any

from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from benchmarks import boot, profiles, recording
from benchmarks.models import Benchmark, BenchmarkKind
from benchmarks.profiles import Profile
from images.rewrite import refusals, space
from images.rewrite.space import Admitted, Need
from storage_admin.accounts.models import Actor
from storage_admin.agent.protocol import b64
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.hosts.selectors import find_pool
from storage_admin.jobs.kinds import JobKind, Lock, Target, Unsuccessful
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Affected, Plan, Refusal, refuse
from storage_admin.words import seconds, size

MOST_REPETITIONS = 20


class RunBenchmark(JobKind):
    """Runs one profile on a pool. No image is written; a boot storm reads one."""

    name = "benchmark"
    title = _("Benchmark")
    description = _("Measures a pool on its own scratch files, which it removes afterwards. Writes to no image.")
    target = "pool"
    verb = "benchmark"
    measures = True
    looks = True  # what it writes to measure is its own, and gone when it has ended
    progress_in_bytes = False
    unsuccessful = {
        "": Unsuccessful(
            gettext_noop("Leftover scratch files are removed by a recovery of the host or by the next benchmark.")
        )
    }
    properties = {
        "kind": {"enum": BenchmarkKind.values, "description": _("What to measure.")},
        "quick": {"type": "boolean", "default": True, "description": _("Run the quick variant instead of the "
                                                                       "thorough one.")},
        "repetitions": {
            "type": ["integer", "null"], "minimum": 1, "maximum": MOST_REPETITIONS, "default": None,
            "description": _("Repetitions of each step; null for the profile default."),
        },
        "alongside": {
            "type": "boolean", "default": False,
            "description": _("Run even while rewriting jobs run on the host. Both then slow each other down."),
        },
        "size_bytes": {
            "type": ["integer", "null"], "minimum": 1 << 20, "maximum": 1 << 40, "multipleOf": 1 << 20, "default": None,
            "description": _("Size in whole MiB that each step writes or reads, or that each guest may write; null "
                             "for the size of the profile, or less if that does not fit."),
        },
        "seconds": {
            "type": ["integer", "null"], "minimum": 1, "maximum": 600, "default": None,
            "description": _("Duration of each fio step, or the most time for guests to come up; null for the "
                             "profile default."),
        },
        "idle_io": {
            "type": "boolean", "default": False,
            "description": _("Idle I/O priority. On a busy host, the benchmark then measures only the remaining "
                             "capacity."),
        },
        "boot": boot.SCHEMA,
    }  # fmt: skip

    def clean(self, options: Any) -> dict[str, Any]:
        given = options if isinstance(options, dict) else {}
        wanted = boot.clean(given.get("kind"), given.get("boot"))
        return super().clean(options) | {"boot": wanted}

    def resolve(self, target_id: int) -> Target:
        pool = find_pool(target_id)
        return Target(kind="pool", id=pool.pk, host=pool.host, label=pool.name)

    def locks(self, target: Target, options: dict[str, Any]) -> list[Lock]:  # noqa: ARG002 (the same for all)
        return boot.locks(options.get("boot"))

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:
        pool = find_pool(target_id)
        boot.require_role(actor, pool.host, options["boot"])
        profile = profile_for(pool, options)
        cost = profile.cost
        reason = gettext(
            "{count} steps, {repetitions} times each. Writes about {bytes_written} in about {about}, to scratch "
            "files of at most {scratch}."
        ).format(
            count=len(profile.steps),
            repetitions=profile.repetitions,
            bytes_written=size(cost.bytes_written),
            about=seconds(cost.seconds_about),
            scratch=size(cost.scratch_bytes),
        )
        against = _against(pool, profile)
        read: list[Affected] = []
        if profile.kind == boot.KIND:
            boots = boot.of(pool.host, options["boot"])
            against = against or boot.against(boots)
            read = boot.read(boots)
            copies = gettext("Boots copies of {image}.") if boots.image else gettext("Boots with empty disks.")
            reason += f" {copies.format(image=boots.image and boots.image.name)}"
        return Plan(
            method=f"{profile.kind} {'quick' if profile.quick else 'thorough'}",
            reason=reason,
            facts_at=pool.last_scanned,
            scratch_bytes=cost.scratch_bytes,
            scratch_pool=pool.pk,
            lasting_bytes=0,
            refusals=tuple(against or _no_room(pool, cost.scratch_bytes)),
            warnings=profile.warnings,
            affected_images=tuple(read),
            options=options,
        )

    def admit(self, target: Target, plan: Plan) -> None:
        refuse(_no_room(find_pool(target.id), plan.scratch_bytes or 0))

    def submitted(self, job: Job) -> None:
        pool = find_pool(job.target_id)
        profile = profile_for(pool, job.options)
        Benchmark.objects.create(
            job=job, host=pool.host, pool=pool, kind=profile.kind, quick=profile.quick, options=job.options,
            steps=list(profile.steps), profile_key=profile.key, notes=list(profile.warnings), created_by=job.created_by,
        )  # fmt: skip

    def may_disturb(self, options: dict[str, Any]) -> bool:
        return bool(options.get("alongside"))

    def request(self, job: Job) -> dict[str, Any]:
        pool = find_pool(job.target_id)
        run = Benchmark.objects.get(job=job)
        recording.start(run)
        return {
            "pool_path_b64": b64(bytes(pool.path_bytes)),
            "kind": run.kind,
            "reserve_bytes": refusals.reserve_of(pool.capacity_bytes or 0),
            "others_bytes": space.needed_by_running(job),
            "steps": boot.told(pool.host, run.steps, job.options["boot"]) if run.kind == boot.KIND else run.steps,
            "repetitions": profile_for(pool, job.options).repetitions,
            "idle_io": job.options["idle_io"],
        }

    def on_event(self, job: Job, event: dict[str, Any]) -> None:
        if not recording.take(Benchmark.objects.get(job=job), event):
            super().on_event(job, event)

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        return result | recording.finish(Benchmark.objects.select_related("pool").get(job=job), result)


def profile_for(pool: StoragePool, options: dict[str, Any]) -> Profile:
    """The profile that a job's options ask for."""
    return profiles.build(
        pool, options["kind"], quick=options["quick"], repetitions=options["repetitions"],
        size_bytes=options["size_bytes"], seconds=options["seconds"], boot=options.get("boot"),
    )  # fmt: skip


def _against(pool: StoragePool, profile: Profile) -> list[Refusal]:
    """What stands against measuring a pool. Who uses its images does not: none of them is touched."""
    host = pool.host
    if against := refusals.without_agent(host):
        return against
    if host.transport == Host.Transport.PLAIN:
        told = gettext(
            "Python 3 is not installed on {host}, so no agent can run there. Install it, then scan the host."
        )
        return [Refusal("tool_missing", told.format(host=host.name))]
    if host.status == Host.Status.UNREACHABLE:
        told = gettext("{host} does not answer: {why} Scan the host first.")
        return [Refusal("host_unreachable", told.format(host=host.name, why=host.status_detail))]
    if pool.kind not in refusals.FOLDERS or not pool.path_bytes:
        told = gettext("{pool} is a {kind} pool, not a folder. No files can be created there.")
        return [Refusal("unsupported_pool", told.format(pool=pool.name, kind=pool.kind))]
    if against := refusals.silent(pool):
        return against
    return [Refusal("tool_missing", profile.missing)] if profile.missing else []


def _no_room(pool: StoragePool, scratch: int) -> list[Refusal]:
    """Whether the scratch files fit beside what admitted jobs need and what must stay free.

    A benchmark has no slot: it may run beside every other job, and is counted in full.
    """
    capacity, available = pool.capacity_bytes, pool.available_bytes
    if capacity is None or available is None:
        return []  # the agent looks
    reserve = refusals.reserve_of(capacity)
    worst = Admitted().worst_with(pool, pool.host, Need(pool.host_id, scratch, scratch))
    if available - reserve >= worst:
        return []
    sentence = gettext(
        "The scratch files take up to {scratch:,} bytes, and {reserve:,} must stay free. {pool} has {available:,} "
        "free. Choose a smaller size, or free some space."
    )
    if worst > scratch:
        sentence = gettext(
            "The scratch files take up to {scratch:,} bytes, queued and running jobs need up to {others:,} more, "
            "and {reserve:,} must stay free. {pool} has {available:,} free. Choose a smaller size, or free some "
            "space."
        )
    told = sentence.format(
        scratch=scratch, others=worst - scratch, reserve=reserve, pool=pool.name, available=available
    )
    return [Refusal("not_enough_space", told)]
