"""What an agent needs to know to tell whether an undo copy may be the last good one; which copies stay, and why."""

from collections.abc import Collection, Iterator
from typing import Any

from django.db.models import Exists, OuterRef, Q, QuerySet, Subquery
from django.utils import timezone
from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import refusals
from storage_admin.accounts.models import SYSTEM
from storage_admin.guests.models import OFF_STATES, Guest, GuestDisk
from storage_admin.guests.services import spans_of
from storage_admin.hosts.models import Host
from storage_admin.hosts.names import display, path_key
from storage_admin.jobs.models import Elapsed, Job
from storage_admin.jobs.plan_and_progress import Refusal

#: A removal that was refused so is not tried again by itself: a user decides.
STAYS = "undo_kept"
#: Looks at one image that are kept; beyond them nothing is known.
MOST_SEEN = 200


def evidence(removal: Job, undone: Job, image: Image) -> dict[str, Any]:
    """What the agent is told of an image whose undo copy is to be removed.

    Returns:
        ``by_itself``, ``used`` and ``seen`` as the verb ``discard_undo`` takes them.
    """
    now = Elapsed.now()
    guests = Guest.objects.filter(disks__use__image=image, disks__readonly=False, disks__only_in="").distinct()
    used = [[max(now - since, 0.0), max(now - until, 0.0)] for since, until in spans_of(list(guests))]
    return {
        "by_itself": removal.created_by == SYSTEM.name,
        "used": used + [list(span) for span in _own_jobs(undone, image)],
        "seen": undone.undo_seen,
    }


def _own_jobs(undone: Job, image: Image) -> Iterator[tuple[float, float]]:
    """When later jobs of ours were at the image, which look themselves at who else is; in seconds before now."""
    now = timezone.now()
    on_image = Job.objects.filter(target_kind="image", target_id=image.pk)
    mine = Q(pk__in=on_image.values("pk")) | Q(kind="undo", target_kind="job", target_id__in=on_image.values("pk"))
    jobs = Job.objects.filter(mine, pk__gt=undone.pk, rewrites=True, state=Job.State.SUCCEEDED)
    for started, finished in jobs.values_list("started", "finished"):
        if started is not None and finished is not None:
            yield (now - started).total_seconds(), (now - finished).total_seconds()


def needed_by(host_id: int, copy: bytes) -> list[Refusal]:
    """Who would miss an undo copy, as the last scan knows: an overlay, or a guest's disk, that names it.

    Args:
        copy: its path.
    """
    key = path_key(copy)
    overlays = Image.objects.filter(host=host_id, backing_key=key).exclude(state__in=Image.NOT_THERE)
    disks = GuestDisk.objects.filter(guest__host=host_id, path_key=key)
    found = [*overlays.values_list("name", flat=True)[:3], *disks.values_list("guest__name", flat=True)[:3]]
    told = _("The undo copy {copy} is used by {names}. It stays until nothing names it.")
    return [Refusal(STAYS, told.format(copy=display(copy), names=", ".join(found)))] if found else []


def note_seen(host_id: int, scan: int) -> None:
    """Notes when images whose undo copies wait were changed last, where a scan found that and no guest runs on them.

    What a guest that runs has written says nothing of who wrote before it, which the scans before have seen.

    Args:
        scan: as it stands in the rows of what it found changed.
    """
    jobs = _waiting().filter(host=host_id).only("pk", "target_id", "undo_seen")
    ran_on = Guest.objects.exclude(state__in=OFF_STATES).filter(disks__use__isnull=False).values("disks__use__image")
    for job in jobs:
        image = Image.every.filter(pk=job.target_id, changed_scan=scan).exclude(pk__in=ran_on).first()
        if image is None or not image.inode.isdecimal() or len(job.undo_seen) > MOST_SEEN:
            continue
        seen = [int(image.inode), image.mtime_ns, image.ctime_ns]
        # Too many to go by end in a time that no guest ran at.
        more = seen if len(job.undo_seen) < MOST_SEEN else [seen[0], 0, 0]
        Job.objects.filter(pk=job.pk).update(undo_seen=[*job.undo_seen, more])


def hosts_with_copies(*, but_not: Collection[int] = (), libvirt: bool = False) -> list[int]:
    """Ids of the hosts on which undo copies wait, so that it matters when their guests run.

    Args:
        but_not: ids of hosts that are left out.
        libvirt: only those that have one.
    """
    jobs = _waiting().exclude(host__in=but_not).exclude(host__status=Host.Status.UNREACHABLE)
    if libvirt:
        jobs = jobs.filter(host__capabilities__libvirt="present")
    return sorted(set(jobs.order_by().values_list("host", flat=True)))


def kept(limit: int) -> list[tuple[Job, str]]:
    """The undo copies that stay because they may be the last good ones: whose they are, and why, the oldest first."""
    tries = Job.objects.filter(kind="discard_undo", target_kind="job", target_id=OuterRef("pk"))
    last = tries.exclude(state__in=Job.ACTIVE).order_by("-id")
    lost = Image.every.filter(state__in=refusals.MAY_BE_LOST).values("pk")
    jobs = _waiting().annotate(code=Subquery(last.values("error_code")[:1]))
    over = Q(undo_expires__lte=timezone.now(), target_id__in=lost)
    # A removal by force that came to nothing changes nothing about that.
    stays = Exists(tries.filter(error_code=STAYS))
    jobs = jobs.filter(stays | Q(code__in=["stale_plan", "undo_written_to"]) | over).select_related("host")
    found = list(jobs.defer("plan", "commands", "host__capabilities").order_by("pk")[:limit])
    if not found:
        return []
    whys = whys_of(found)
    images = Image.every.in_bulk({job.target_id for job in found})
    return [(job, _why(images.get(job.target_id)) or whys.get(job.pk, "")) for job in found]


def whys_of(jobs: Collection[Job]) -> dict[int, str]:
    """Why the undo copies of jobs could not be removed, by the jobs' ids: the last reason that was about the copy."""
    tries = Job.objects.filter(kind="discard_undo", target_kind="job", target_id__in=[job.pk for job in jobs])
    ended = tries.filter(state__in=(Job.State.FAILED, Job.State.INTERRUPTED)).order_by("id")
    told = list(ended.values_list("target_id", "error_code", "error_detail"))
    return {job: why for job, __, why in told} | {job: why for job, code, why in told if code == STAYS}


def _why(image: Image | None) -> str:
    return " ".join(refusal.detail for refusal in refusals.only_copy(image)) if image is not None else ""


def _waiting() -> QuerySet[Job]:
    return Job.objects.filter(undo_state=Job.UndoState.AVAILABLE, target_kind="image")
