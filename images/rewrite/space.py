"""Space: what an analysis said that an image could give back, what jobs need for their work, and the sums of pools.

An estimate stands on the image's row. What the queued and running jobs were admitted with is reserved on its
filesystem. Jobs of one host run one after another, or as many at once as it allows, so that the scratch space of most
is not needed at the same time. What stays when a job has ended does add up: with its undo copy kept, the new file lies
beside the original until the window closes. So the worst moment is the sum of all that stays, and the largest of what
passes for as many jobs as run at once (docs/decisions/0009-space-of-admitted-jobs.md).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db.models import Count, F, Max, Q, QuerySet, Sum
from django.utils import timezone
from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import refusals
from images.scan import shared_storages
from storage_admin.agent.measure import preallocation
from storage_admin.agent.measure.prediction import best
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job
from storage_admin.jobs.plan_and_progress import Plan, Refusal

#: The formats that each method is offered for; an estimate for another one is a fact, but no offer.
FORMATS = {"compress": ("qcow2",), "copy": ("qcow2", "raw", "vdi", "vmdk", "vpc"), "in_place": ("qcow2", "raw")}
METHODS = tuple(FORMATS)
#: What a row offers.
OFFERED_BYTES = ("reclaimable_bytes", "reclaimable_low", "reclaimable_high")
OFFER = (*OFFERED_BYTES, "reclaimable_method")
#: Preallocations that a rewrite undoes, and the kinds of jobs that do.
PREALLOCATED = ("metadata", "falloc", "full")
UNDOES_PREALLOCATION = ("reclaim", "flatten")
#: The stages that all rewrites end with, as parts of the whole job in percent. From there on the new file is written:
#: what it takes is missing from the filesystem's free space already.
WRITTEN: dict[str, tuple[float, float]] = {"verifying": (70, 97), "syncing": (97, 98), "swapping": (98, 100)}
#: Formats that are sampled in the background: those that something is offered for.
SAMPLED_FORMATS = tuple(sorted({name for formats in FORMATS.values() for name in formats}))


def offered(image: Image) -> list[str]:
    """The methods that there are for an image's format, for what it holds, and for where it lies.

    Nobody on another machine can be kept from the file itself while it gets holes, and these drop file capabilities.
    """
    if image.is_volume:
        return ["in_place"] if image.pool.kind == StoragePool.Kind.LVMTHIN else []
    against = {refusal.code for refusal in refusals.of_content(image)}
    digs = not image.pool.network and not image.from_header("capabilities") and not against - refusals.DIGGING_KEEPS
    possible = {"in_place": digs, "compress": not against, "copy": not against}
    return [name for name in METHODS if image.declared_format in FORMATS[name] and possible[name]]


def due_for_estimates(host_id: int) -> QuerySet[Image]:
    """The images of a host that have no estimate for their present content, the largest first."""
    files = Image.objects.filter(host=host_id, pool__kind__in=refusals.FOLDERS)
    readable = files.filter(declared_format__in=SAMPLED_FORMATS).exclude(
        state__in=(*Image.NOT_THERE, Image.State.UNREADABLE, Image.State.FORMAT_MISMATCH)
    )
    changed = readable.filter(~Q(analyzed_fingerprint=F("fingerprint")), encrypted=False)
    return changed.select_related("host", "pool", "backing__pool").order_by("-allocated_size", "pk")


def thin_volumes(host_id: int) -> QuerySet[Image]:
    """The volumes of the thin pools that LVM lists on a host."""
    pools = StoragePool.objects.filter(host=host_id, kind=StoragePool.Kind.LVMTHIN, volume_facts__isnull=False)
    return Image.objects.filter(host=host_id, pool__in=pools, missing_since=None)


def due_for_exclusive_sizes(host_id: int) -> bool:
    """Whether a host has thin volumes, and nobody has begun to measure them in the last hour."""
    jobs = Job.objects.filter(host=host_id, kind="exclusive", created__gt=timezone.now() - timedelta(minutes=55))
    return thin_volumes(host_id).exists() and not jobs.exists()


def record_estimate(image: Image, fingerprint: bytes, estimate: dict[str, Any], at: datetime) -> None:
    """Writes an estimate; where the agent could not make one, it says why and the numbers stay unknown.

    All methods' numbers stay in ``estimate``. The row's own are those of the method that is offered and wins most, or
    of a gentler one that wins at least 98 % of that: ``in_place``, which needs no scratch space, before ``copy``,
    which leaves the image as quick as it was, before ``compress``
    (:func:`storage_admin.agent.measure.prediction.best`).

    Args:
        fingerprint: of the content that was looked at; an image that is another one by now is sampled again.
    """
    if bytes(image.fingerprint) != fingerprint:
        return
    image.estimate = estimate
    if "preallocation" in estimate:
        made = estimate["preallocation"]
        image.preallocation = _as_made(image) if made == preallocation.FILLED else made
    _offer(image)
    image.analyzed_at = at
    image.analyzed_fingerprint = image.fingerprint
    image.save(update_fields=["estimate", *OFFER, "analyzed_at", "analyzed_fingerprint", "preallocation"])


def _offer(image: Image) -> None:
    """Takes the numbers from the estimate."""
    methods = estimated(image)
    method = best(methods, offered(image))
    numbers = methods[method] if method else {}
    most = image.alone_bytes  # what other volumes share stays taken
    for name in OFFERED_BYTES:
        told = numbers.get(name)
        setattr(image, name, told if told is None or most is None else min(told, most))
    image.reclaimable_method = method if method and numbers else ""


def settle_offers(host: Host, sound_again: Collection[int]) -> None:
    """What a job cannot rewrite now offers nothing, in no list and no sum; its estimate stays for when it can.

    Nor is a method offered that is none for where the image lies, as it may have been before that was known.

    Args:
        sound_again: images that are, by their ids.
    """
    away = Image.every.filter(host=host, reclaimable_bytes__isnull=False).exclude(state=Image.State.OK)
    away.update(reclaimable_bytes=None, reclaimable_low=None, reclaimable_high=None, reclaimable_method="")
    known = Image.every.filter(host=host, analyzed_fingerprint=F("fingerprint"), estimate__isnull=False)
    otherwise = Q(pk__in=sound_again) | Q(pool__network=True, reclaimable_method="in_place")
    for image in known.filter(otherwise).select_related("pool"):
        _offer(image)
        image.save(update_fields=OFFER)


def _as_made(image: Image) -> str:
    """``full`` where a conversion here has made this file so: of a full file nothing else tells."""
    made = Job.objects.filter(host=image.host_id, kind="convert", state=Job.State.SUCCEEDED, result__path=image.path)
    for job in made.order_by("-id")[:1]:
        if str((job.result or {}).get("inode")) == image.inode:
            return "full" if job.options.get("format_options", {}).get("preallocation") == "full" else ""
    return ""


def undone_preallocation(image: Image, method: str = "") -> list[str]:
    """What a plan says where a method undoes an image's preallocation, or may do so: sentences.

    Args:
        method: of a reclaim.
    """
    if image.declared_format not in FORMATS["in_place"]:
        return []
    if image.preallocation in PREALLOCATED:
        told = _(
            "The image is preallocated ({preallocation}). The new file is not, so writes to it allocate space again."
        )
        keeps = (image.preallocation, method) == ("metadata", "in_place")
        return [] if keeps else [told.format(preallocation=image.preallocation)]
    told = _(
        "Nearly all of the image is allocated. If it was created with preallocation=full and should stay so, do not "
        "reclaim it: a reclaim cannot tell preallocated space from an image filled with zeros."
    )
    return [told] if (image.estimate or {}).get("preallocation") == preallocation.FILLED else []


class Predicted(NamedTuple):
    """Allocated bytes after a method: best guess, lowest, highest; ``None`` where they are not known."""

    after: int | None
    low: int | None
    high: int | None


def predicted(image: Image, method: str, compression: str = "") -> Predicted:
    """What an image takes after a method, by the estimate on its row.

    Args:
        method: one of :data:`METHODS`.
        compression: ``zlib`` or ``zstd``, for ``compress``; without it, or where the host cannot measure it, the range
            holds for each.

    Returns:
        Nothing known where the image was not looked at since it changed, the method cannot be used for it, or no job
        rewrites it in its state.
    """
    numbers = estimated(image).get(method) or {}
    each = numbers.get("compressions") or {}
    numbers = each.get(compression) or numbers
    return Predicted(*(numbers.get(f"predicted_{which}") for which in ("after_bytes", "low", "high")))


def analyzed_bytes(image: Image) -> int:
    """What the image took when its estimate was made."""
    return int((image.estimate or {}).get("allocated_size") or 0)


def won_bytes(image: Image, method: str, after: int | None) -> int | None:
    """What a method would free on the filesystem, negative where it would take more.

    Args:
        after: as :func:`predicted`.
    """
    if after is None or image.allocated_size is None:
        return None
    told: int | None = (estimated(image).get(method) or {}).get("reclaimable_bytes") if image.shared_bytes else None
    return image.allocated_size - after if told is None else told


def is_bound(image: Image) -> bool:
    """Whether the highest numbers are sure ones: everything that is allocated was read, not a sample of it."""
    return (image.estimate or {}).get("mode") == "full"


def estimated(image: Image) -> dict[str, Any]:
    """The estimate's numbers of each method; none in a state in which no job rewrites the image."""
    return ((image.estimate or {}).get("methods") or {}) if image.state == Image.State.OK else {}


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


def limits(job: Job) -> dict[str, Any]:
    """What a job has to leave free, as its agent is told of it: the reserve, and what other jobs may still write."""
    reserve = {"percent": float(refusals.RESERVE_PERCENT), "bytes": refusals.RESERVE_BYTES}
    return {"reserve": reserve, "others_bytes": needed_by_running(job)}


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
        .values_list(
            "host_id", "host__max_jobs", "state", "rewrites", "plan__scratch_bytes", "plan__lasting_bytes",
            "kept__received",
        )
    )  # fmt: skip
    there, running = _Filesystem([], {}), Counter[int]()
    for host_id, max_jobs, state, rewrites, wanted, lasting, arrived in rows:
        # What has arrived of an upload is missing from what is free already.
        scratch = max((wanted or 0) - (arrived or 0), 0)
        # What has no slot, as a benchmark, may be at work beside all that have one.
        there.needs.append(Need(host_id, scratch, (lasting if rewrites else scratch) or 0))
        # An admin may have lowered the limit since they were started.
        running[host_id] += rewrites and state == Job.State.RUNNING
        there.slots[host_id] = max(max_jobs, running[host_id], 1)
    return there


def write_totals(pools: Iterable[StoragePool]) -> None:
    """Sums of the images that are there, each inode once."""
    for pool in pools:
        there = Image.objects.filter(pool=shared_storages.listed_in(pool)).exclude(state__in=Image.NOT_THERE)
        sums = there.filter(nlink=1).aggregate(
            count=Count("pk"), allocated=Sum("allocated_size"), virtual=Sum("virtual_size"),
            reclaimable=Sum("reclaimable_bytes"), measured=Count("allocated_size"), sized=Count("virtual_size"),
        )  # fmt: skip
        # Of several names of an inode, one may have been analyzed.
        linked = (
            there.filter(nlink__gt=1).order_by().values("dev", "inode")
            .annotate(allocated=Max("allocated_size"), virtual=Max("virtual_size"), most=Max("reclaimable_bytes"))
            .values_list("allocated", "virtual", "most")
        )  # fmt: skip
        columns = zip(*linked, strict=True) if linked else ((), (), ())
        allocated, virtual, reclaimable = ([value for value in column if value is not None] for column in columns)
        known = [value for value in (sums["reclaimable"], *reclaimable) if value is not None]
        # Without one of them, the sum would be too small.
        measured = sums["measured"] == sums["count"] and len(allocated) == len(linked)
        sized = sums["sized"] == sums["count"] and len(virtual) == len(linked)
        count = sums["count"] + len(linked)
        # Nobody has listed it yet: that it has none is not known.
        listed = bool(count) or pool.last_scanned is not None
        StoragePool.objects.filter(pk=pool.pk).update(
            images_count=count,
            allocated_bytes=(sums["allocated"] or 0) + sum(allocated) if measured and listed else None,
            virtual_bytes=(sums["virtual"] or 0) + sum(virtual) if sized and listed else None,
            reclaimable_bytes=sum(known) if known else None,
        )
