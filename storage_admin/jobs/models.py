"""The job's row is the truth; Celery only rings that there is one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from django.db import models, transaction
from django.db.models import Max, Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from storage_admin.agent.protocol import STEP, Moment
from storage_admin.hosts.models import Host, PartialRows, StoragePool


def forget_all_but_the_ledger(collector: Any, field: Any, jobs: Any, using: str) -> None:
    """What becomes of a host's jobs when it is removed: those that changed space stay as lines of the ledger, with the
    host's id and name as they were; the others go with it.
    """
    models.CASCADE(collector, field, jobs.filter(freed_bytes__isnull=True), using)
    # Nobody gets such a job as the answer to a request any more.
    answers = IdempotentAnswer.objects.using(using).filter(job__in=jobs.filter(freed_bytes__isnull=False).values("pk"))
    models.CASCADE(collector, IdempotentAnswer._meta.get_field("job"), answers, using)


def _uid() -> str:
    return uuid.uuid4().hex[:16]


class Job(PartialRows):
    """One piece of work on a host: queued → running → succeeded | failed | cancelled | interrupted."""

    class State(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELLED = "cancelled"
        INTERRUPTED = "interrupted"

    ACTIVE = (State.QUEUED, State.RUNNING)

    class ParkedFor(models.TextChoices):
        """Whom a parked job waits for."""

        GUESTS = "guests"
        #: Whoever sends a file, and whoever knows a passphrase.
        BYTES = "bytes"
        SECRETS = "secrets"

    class UndoState(models.TextChoices):
        NONE = "none"
        AVAILABLE = "available"
        UNDONE = "undone"
        DISCARDED = "discarded"
        EXPIRED = "expired"
        MISSING = "missing", _("deleted by somebody else")

    #: Names the job's files on the host (``.sa-<uid>.new``): two dashboards may work on one pool.
    uid = models.CharField(max_length=40, unique=True, default=_uid)
    kind = models.CharField(max_length=30)
    state = models.CharField(max_length=12, choices=State, default=State.QUEUED)
    waiting_for = models.CharField(max_length=200, blank=True)
    rewrites = models.BooleanField(default=False)
    #: Of a host that was removed the id is left (:func:`forget_all_but_the_ledger`): the ledger alone reads such rows.
    #: It has no index of its own: SQLite would read all jobs of a host by it, where one of those below finds the few.
    host = models.ForeignKey(
        Host, on_delete=forget_all_but_the_ledger, related_name="jobs", db_constraint=False, db_index=False
    )
    #: The target's kind and id; the registered job kind resolves it, so that this app needs no key upward.
    target_kind = models.CharField(max_length=10)
    target_id = models.BigIntegerField()
    target_label = models.TextField(blank=True)
    options = models.JSONField(default=dict)
    plan = models.JSONField(default=dict)
    result = models.JSONField(null=True)
    error_code = models.CharField(max_length=40, blank=True)
    error_detail = models.TextField(blank=True)
    #: Every claim counts it up; whoever holds an older one is not heard any more.
    generation = models.PositiveIntegerField(default=0)
    worker = models.CharField(max_length=100, blank=True)
    heartbeat = models.DateTimeField(null=True)
    cancel_requested = models.BooleanField(default=False)
    progress = models.FloatField(default=0.0)
    stage = models.CharField(max_length=40, blank=True)
    message = models.TextField(blank=True)
    done_bytes = models.BigIntegerField(null=True)
    total_bytes = models.BigIntegerField(null=True)
    #: When it last came further: another stage, more done, one more command run. A heartbeat says only that its
    #: worker is alive.
    progressed = models.DateTimeField(null=True)
    #: Since when a storage that a running job needs has not answered; it takes no slot of its host then.
    stalled_since = models.DateTimeField(null=True)
    bytes_per_sec = models.BigIntegerField(null=True)
    eta_seconds = models.BigIntegerField(null=True)
    commands = models.JSONField(default=list)
    created_by = models.CharField(max_length=150)
    created = models.DateTimeField(default=timezone.now)
    rung = models.DateTimeField(default=timezone.now)
    started = models.DateTimeField(null=True)
    finished = models.DateTimeField(null=True)
    undo_state = models.CharField(max_length=10, choices=UndoState, default=UndoState.NONE)
    undo_expires = models.DateTimeField(null=True)
    undo_bytes = models.BigIntegerField(default=0)
    #: When its window has surely passed, in seconds of :class:`Elapsed`; null for a copy from before they were counted.
    undo_due = models.FloatField(null=True)
    #: While the copy waits: inode and times of the image as scans saw them, each ``[inode, mtime_ns, ctime_ns]``.
    undo_seen = models.JSONField(default=list)
    #: The host still has to be recovered after this job was interrupted.
    needs_recovery = models.BooleanField(default=False)
    #: Since when a queued job waits for something outside, such as a guest to be shut down. Nobody rings for it then;
    #: who watches what it waits for lets it go on, or gives it up when ``wait_until`` has passed.
    parked_at = models.DateTimeField(null=True)
    parked_for = models.CharField(max_length=10, choices=ParkedFor, default="guests")
    wait_until = models.DateTimeField(null=True)
    #: The guests that it waited for: each ``kind``, ``uid``, ``name``.
    waited_guests = models.JSONField(default=list)
    #: It has been claimed, and when it has ended its guests are to be started.
    start_due = models.BooleanField(default=False)
    #: What the job changes beside an image's bytes, as it was before: the image's name and what admins declared of it,
    #: the disks of guests whose definitions name it. Written before anything of that is changed.
    kept = models.JSONField(default=dict)
    #: Whether those definitions may not agree with the name that the image has by now.
    repoint_due = models.BooleanField(default=False)
    #: Whether guests may still be locked at their hypervisor on the job's behalf.
    unlock_due = models.BooleanField(default=False)

    #: Of a job that this process has claimed: what it was told in confidence (:mod:`storage_admin.jobs.sealed`).
    secrets: Mapping[str, str] = MappingProxyType({})

    # The job's line of the ledger, written by ``images.rewrite.record`` alone, in the transaction of its result. Bytes.
    #: The pool whose space it changed; of one that was removed the id is left, as of a host. The names are as of then.
    space_pool = models.ForeignKey(
        StoragePool, null=True, on_delete=models.DO_NOTHING, related_name="+", db_constraint=False, db_index=False
    )
    host_name = models.CharField(max_length=200, blank=True, default="")
    pool_name = models.CharField(max_length=200, blank=True, default="")
    #: What it was expected to win.
    predicted_bytes = models.BigIntegerField(null=True)
    before_bytes = models.BigIntegerField(null=True)
    after_bytes = models.BigIntegerField(null=True)
    #: What the filesystem gave for its new file: less than that occupies where it shares blocks with the original. Null
    #: where nobody told.
    made_bytes = models.BigIntegerField(null=True)
    #: By how much allocated space has become less; negative where it has become more. 0 while an undo copy holds it and
    #: where the job was undone; null for a job that changed no space, which has no line.
    freed_bytes = models.BigIntegerField(null=True)
    #: Since when that is so for good; null while an undo copy waits and where the job was undone.
    freed_at = models.DateTimeField(null=True)
    #: The calendar month of that in UTC, as ``2026-11``; empty where there is none.
    freed_month = models.CharField(max_length=7, blank=True, default="")

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["state", "rung"]),
            models.Index(fields=["host", "state"]),
            models.Index(fields=["undo_state", "host"], name="job_undo_host"),
            # Counts by kind and state, for the list's filters and for /metrics, which read no row of the table.
            models.Index(fields=["kind", "state", "-id"], name="job_kind_state"),
            models.Index(fields=["target_kind", "target_id", "-id"]),
            # What the list filters by, so that rows, which are large, are read of one page alone.
            models.Index(fields=["created", "created_by", "host"], name="job_created"),
            models.Index(fields=["state", "created", "created_by", "host"], name="job_state_created"),
            models.Index(fields=["undo_expires"], condition=Q(undo_state="available"), name="job_undo_due"),
            models.Index(fields=["parked_at"], condition=Q(parked_at__isnull=False, state="queued"), name="job_parked"),
            models.Index(fields=["id"], condition=Q(start_due=True), name="job_start_due"),
            models.Index(fields=["id"], condition=Q(repoint_due=True), name="job_repoint_due"),
            models.Index(fields=["id"], condition=Q(unlock_due=True), name="job_unlock_due"),
            models.Index(fields=["id"], condition=Q(needs_recovery=True), name="job_needs_recovery"),
            # A pool that is forgotten is looked for here.
            models.Index(fields=["space_pool"], condition=Q(space_pool__isnull=False), name="job_space_pool"),
            # All that the ledger filters, orders and sums by: it reads no row of the table to do so.
            models.Index(
                fields=[
                    "host",
                    "space_pool",
                    "freed_month",
                    "freed_at",
                    "finished",
                    "id",
                    "kind",
                    "created_by",
                    "target_kind",
                    "target_id",
                    "undo_state",
                    "undo_bytes",
                    "freed_bytes",
                    "before_bytes",
                    "after_bytes",
                    "made_bytes",
                    "predicted_bytes",
                    "started",
                ],
                condition=Q(freed_bytes__isnull=False),
                name="job_ledger",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.target_label}"

    def ours(self) -> QuerySet[Job]:
        """The row, as long as it is running and of the generation that we hold; for ``update``."""
        return Job.objects.filter(pk=self.pk, state=Job.State.RUNNING, generation=self.generation)

    @property
    def active(self) -> bool:
        return self.state in self.ACTIVE

    @property
    def undo_available(self) -> bool:
        return self.undo_state == self.UndoState.AVAILABLE


class JobLog(models.Model):
    """What happened, in order: state changes, refusals, tool calls, the agent's own words."""

    class Level(models.TextChoices):
        INFO = "info"
        WARNING = "warning"
        ERROR = "error"
        COMMAND = "command"

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="log_lines")
    at = models.DateTimeField(default=timezone.now)
    level = models.CharField(max_length=8, choices=Level, default=Level.INFO)
    text = models.TextField()

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return self.text


class ResourceLock(models.Model):
    """What an active job holds: exclusive on what it writes, shared on that image's ancestors."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="locks")
    key = models.CharField(max_length=600)
    exclusive = models.BooleanField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["key"], condition=Q(exclusive=True), name="one_writer_per_resource"),
            models.UniqueConstraint(fields=["job", "key"], name="one_lock_per_job_and_resource"),
        ]
        indexes = [models.Index(fields=["key"])]

    def __str__(self) -> str:
        return f"{'exclusive' if self.exclusive else 'shared'} {self.key}"


class IdempotentAnswer(models.Model):
    """The first answer to a request that carried an ``Idempotency-Key``; the same key gets it again."""

    actor = models.CharField(max_length=150)
    key = models.CharField(max_length=255)
    request_digest = models.CharField(max_length=64)
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="+")
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["actor", "key"], name="one_answer_per_idempotency_key")]

    def __str__(self) -> str:
        return self.key


class Worker(models.Model):
    """A worker process that is alive as long as ``seen`` is recent."""

    name = models.CharField(max_length=100, unique=True)
    #: The slug of the host whose queue it listens to; empty for none.
    host = models.CharField(max_length=50, blank=True, default="")
    #: Whether it listens to the default queue, and so takes the jobs of every host that it can reach.
    general = models.BooleanField(default=True)
    #: The machine that it runs on, and its process numbers there (:func:`storage_admin.jobs.routing.place`).
    place = models.CharField(max_length=200, blank=True, default="")
    started = models.DateTimeField(default=timezone.now)
    seen = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return self.name


class Elapsed(models.Model):
    """How far one machine has counted the time since one of its boots.

    From that comes the time that has surely passed, whatever a clock says: one on the wall may be set. So each machine
    of the dashboard's counts by the one that runs on since its boot, and the most that any of them has counted counts
    for all. What nobody saw, while every machine was off, has not passed. Undo copies and the times of guests go by
    this; beside it, a clock that was set is noticed.
    """

    #: Seconds after which a clock that was set, and left like that, counts as right.
    SETTLED = 24 * 3600.0

    boot_id = models.CharField(max_length=40, unique=True)
    #: Seconds since that boot, and those that had passed in all, when it was written last.
    boottime = models.FloatField()
    seconds = models.FloatField()
    #: By how much its clock on the wall is ahead of the seconds since its boot.
    offset = models.FloatField()
    #: When that clock was set, in seconds that had passed, and by how much; null while it is right.
    jumped_at = models.FloatField(null=True)
    jump = models.FloatField(default=0.0)

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s"

    @classmethod
    def now(cls) -> float:
        """Seconds that have surely passed since the dashboard began to count."""
        moment = Moment.now()
        own = cls.objects.filter(boot_id=moment.boot_id).first()
        most = cls.objects.aggregate(most=Max("seconds"))["most"] or 0.0
        return float(most if own is None else max(most, own.seconds + moment.boottime - own.boottime))

    @classmethod
    def tick(cls) -> float:
        """Write down how far this machine has counted, and notice whether its clock was set; returns :meth:`now`."""
        with transaction.atomic():
            moment, wall = Moment.now(), timezone.now().timestamp()
            seconds, offset = cls.now(), wall - moment.boottime
            first = {"boottime": moment.boottime, "seconds": seconds, "offset": offset}
            own, _new = cls.objects.select_for_update().get_or_create(boot_id=moment.boot_id, defaults=first)
            own.boottime, own.seconds = moment.boottime, max(seconds, own.seconds)
            jump = offset - own.offset
            if abs(jump) <= STEP or (own.jumped_at is not None and seconds - own.jumped_at > cls.SETTLED):
                own.offset, own.jumped_at, own.jump = offset, None, 0.0
            else:
                own.jumped_at, own.jump = seconds if own.jumped_at is None else own.jumped_at, jump
            own.save()
            return own.seconds

    @classmethod
    def clock_jump(cls) -> float:
        """Seconds by which this machine's clock was set, as long as nobody has put it right; 0 where it was not."""
        moment = Moment.now()
        own = cls.objects.filter(boot_id=moment.boot_id).first()
        step = 0.0 if own is None else timezone.now().timestamp() - moment.boottime - own.offset
        return step if abs(step) > STEP else 0.0


class Automation(models.Model):
    """The one switch for all that starts by itself and changes something: policies, watches, removals of undo copies.

    Scans go on, so that the numbers stay true. There is at most one row; none means that nothing is paused.
    """

    paused = models.BooleanField(default=False)
    by = models.CharField(max_length=150, blank=True)
    reason = models.CharField(max_length=300, blank=True)
    since = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return "paused" if self.paused else "on"


class Sealed(models.Model):
    """The passphrases of a job that has not begun (:mod:`storage_admin.jobs.sealed`)."""

    job = models.OneToOneField(Job, on_delete=models.CASCADE, related_name="sealed")
    content = models.BinaryField()
    since = models.DateTimeField()

    def __str__(self) -> str:
        return f"of job {self.job_id}"
