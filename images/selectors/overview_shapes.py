"""What the first page shows. Sizes are bytes; ``None`` means that it is not known, which is never shown as 0."""

from dataclasses import dataclass
from datetime import datetime

from images.selectors.chains import GuestRef
from storage_admin.jobs.models import Job


class _Sized:
    used_bytes: int | None
    available_bytes: int | None

    @property
    def usable_bytes(self) -> int | None:
        """The capacity without what filesystems keep for root."""
        if self.used_bytes is None or self.available_bytes is None:
            return None
        return self.used_bytes + self.available_bytes


@dataclass(frozen=True)
class PoolRow(_Sized):
    """One pool. ``days_until_full`` is ``None`` unless its samples carry it (:mod:`images.alert_rules.trend`)."""

    id: int
    host_id: int
    host: str
    name: str
    kind: str
    path: str
    state: str
    capacity_bytes: int | None
    available_bytes: int | None
    used_bytes: int | None
    used_percent: float | None
    images_count: int | None
    allocated_bytes: int | None
    virtual_bytes: int | None
    overcommit_ratio: float | None
    reclaimable_bytes: int | None
    undo_bytes: int | None
    warn_percent: int
    over_threshold: bool | None
    days_until_full: float | None
    days_until_full_low: float | None
    days_until_full_high: float | None
    last_scanned: datetime | None


@dataclass(frozen=True)
class Totals(_Sized):
    """Sums over all hosts.

    Capacity, used and available count each filesystem once (``pools_counted`` of ``pools_count`` pools have a known
    size); allocated, virtual and reclaimable count each file once, also where hosts share a pool or hard links exist.
    ``reclaimable_*`` are sums over the ``analyzed_count`` analyzed images alone, ``allocated_bytes`` over the
    ``measured_count`` of which somebody tells what they occupy, ``virtual_bytes`` over the ``sized_count`` of which the
    virtual size is known; the overcommit is only known where that is all of them.
    """

    hosts_count: int
    pools_count: int
    pools_counted: int
    images_count: int
    measured_count: int
    sized_count: int
    capacity_bytes: int | None
    used_bytes: int | None
    available_bytes: int | None
    allocated_bytes: int | None
    virtual_bytes: int | None
    overcommit_ratio: float | None
    analyzed_count: int
    reclaimable_bytes: int | None
    reclaimable_low: int | None
    reclaimable_high: int | None


@dataclass(frozen=True)
class Candidate:
    """An image that space can be won back from, by which method; ``in_use`` is ``None`` where that is not known."""

    id: int
    name: str
    host_id: int
    host: str
    pool_id: int
    pool: str
    format: str
    virtual_size: int | None
    allocated_size: int | None
    reclaimable_bytes: int
    reclaimable_low: int | None
    reclaimable_high: int | None
    method: str
    in_use: bool | None
    guests: tuple[GuestRef, ...]


@dataclass(frozen=True)
class ConcernItem:
    """One thing that is wrong: ``kind`` is image, host, pool or job."""

    kind: str
    id: int
    name: str
    detail: str


@dataclass(frozen=True)
class Concern:
    """One way in which things are wrong: how many there are, and the first few of them.

    Args:
        code: an image's state, ``host_unreachable``, ``host_degraded``, ``job_failed``, ``job_interrupted``,
            ``pool_over_threshold``, ``pool_unreadable`` or ``orphan``.
        severity: ``danger`` or ``warning``.
    """

    code: str
    title: str
    severity: str
    count: int
    items: tuple[ConcernItem, ...]


@dataclass(frozen=True)
class Won:
    """Bytes that jobs freed on disk, and bytes that undo copies still hold, which are not won yet.

    Args:
        freed_bytes: what was won, less what was taken.
        jobs_count: jobs that won or took something.
        copies_bytes: of what was taken, new files, which somebody asked for.
    """

    freed_bytes: int
    held_bytes: int
    jobs_count: int
    won_bytes: int
    taken_bytes: int
    copies_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """What was freed but for such files, which are no job's loss."""
        return self.freed_bytes + self.copies_bytes


@dataclass(frozen=True)
class Overview:
    """The first page."""

    at: datetime
    totals: Totals
    pools: tuple[PoolRow, ...]
    win_back_now: tuple[Candidate, ...]
    needs_a_look: tuple[Concern, ...]
    at_work: tuple[Job, ...]
    queued_count: int
    won_so_far: Won

    @property
    def oldest_scan(self) -> PoolRow | None:
        """The pool whose last scan is the longest ago. Space is looked at more often (`space_at`)."""
        scanned = [row for row in self.pools if row.last_scanned is not None]
        return min(scanned, key=lambda row: row.last_scanned or self.at, default=None)
