"""The numbers of the first page, from the database alone."""

from django.db.models import F, QuerySet
from django.utils import timezone

from images.ledger.selectors import freed_of, rows_for
from images.models import Image
from images.rewrite import space
from images.selectors.chains import GuestRef
from images.selectors.concerns import concerns
from images.selectors.lists import images_for
from images.selectors.overview_shapes import Candidate, Overview, Won
from images.selectors.pools import pool_rows
from images.selectors.totals import shown_again, totals_of
from storage_admin.accounts.models import Actor
from storage_admin.hosts.models import StoragePool
from storage_admin.hosts.selectors import hosts_for, pools_for
from storage_admin.jobs.models import Job
from storage_admin.jobs.selectors import jobs_for

CANDIDATES = 10


def overview(actor: Actor) -> Overview:
    """What somebody who opens the dashboard wants to know first, as far as it exists for ``actor``."""
    hosts, pools = list(hosts_for(actor)), list(pools_for(actor))
    rows = pool_rows(pools)
    jobs = jobs_for(actor)
    return Overview(
        at=timezone.now(),
        totals=totals_of(actor, hosts, pools),
        pools=rows,
        win_back_now=candidates(images_for(actor), pools),
        needs_a_look=concerns(actor, hosts, pools, rows),
        at_work=tuple(jobs.filter(state=Job.State.RUNNING).order_by("id")),
        queued_count=jobs.filter(state=Job.State.QUEUED).count(),
        won_so_far=won(actor),
    )


def candidates(
    rows: QuerySet[Image], pools: list[StoragePool], limit: int = CANDIDATES
) -> tuple[Candidate, ...]:  # fmt: skip
    """The images with the most to win back by a method that there is, largest first; each file once, as in the totals.

    Args:
        rows: as of :func:`images_for`.
        pools: all that these may be in.
    """
    rows = rows.filter(reclaimable_bytes__gt=0, reclaimable_method__in=space.METHODS, state=Image.State.OK)
    rows = rows.exclude(pool__in=shown_again(pools))
    found: dict[tuple[int, str, str], Candidate] = {}
    for image in rows.order_by(F("reclaimable_bytes").desc(nulls_last=True), "-id")[: 2 * limit]:
        found.setdefault((image.host_id, image.dev, image.inode), _candidate(image))
    return tuple(found.values())[:limit]


def _candidate(image: Image) -> Candidate:
    disks = image.disks
    return Candidate(
        id=image.pk,
        name=image.name,
        host_id=image.host_id,
        host=image.host.name,
        pool_id=image.pool_id,
        pool=image.pool.name,
        format=image.format,
        virtual_size=image.virtual_size,
        allocated_size=image.allocated_size,
        reclaimable_bytes=image.reclaimable_bytes or 0,
        reclaimable_low=image.reclaimable_low,
        reclaimable_high=image.reclaimable_high,
        method=image.reclaimable_method,
        in_use=image.in_use,
        guests=tuple(GuestRef(disk.guest_id, disk.guest.name, disk.guest.state, disk.target) for disk in disks),
    )


def won(actor: Actor) -> Won:
    """What jobs freed for good, by the ledger; what an undo copy holds is not won yet."""
    sums = freed_of(rows_for(actor))
    return Won(**{name: getattr(sums, name) for name in Won.__dataclass_fields__})
