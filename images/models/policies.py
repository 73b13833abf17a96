"""Policies: what is done by itself, when, to which images; each run of one, and what it chose or left out and why."""

from django.db import models
from django.utils.timezone import now

from images.models.inventory import Image
from storage_admin.guests.models import Guest
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job


class Policy(models.Model):
    """A job kind, a window in which it may start, and the images that it is for. Sizes are bytes."""

    name = models.CharField(max_length=100, unique=True)
    enabled = models.BooleanField(default=True)
    #: When windows open: five fields as cron reads them, in that time zone.
    cron = models.CharField(max_length=100)
    timezone = models.CharField(max_length=64, default="UTC")
    window_minutes = models.PositiveIntegerField(default=360)
    #: No job starts in the last minutes of a window.
    quiet_minutes = models.PositiveIntegerField(default=30)
    #: Ids of hosts and pools; empty means all of them. One that is gone matches nothing, it never widens the choice.
    hosts = models.JSONField(default=list, blank=True)
    pools = models.JSONField(default=list, blank=True)
    #: Shell patterns for names, divided by white space; one that starts with ``!`` leaves out. Empty means all names.
    name_pattern = models.CharField(max_length=500, blank=True)
    formats = models.JSONField(default=list, blank=True)
    min_reclaimable_bytes = models.BigIntegerField(default=0)
    #: Of the allocated size.
    min_reclaimable_percent = models.PositiveSmallIntegerField(default=0)
    #: Since the last job of its kind on the image.
    min_age_hours = models.PositiveIntegerField(default=0)
    min_chain_depth = models.PositiveIntegerField(default=1)
    #: Also images that were compressed and have grown back since.
    include_decayed = models.BooleanField(default=False)
    #: Also images that were preallocated, and are not any more afterwards.
    include_preallocated = models.BooleanField(default=False, db_default=False)
    #: How old the last backup of an image's guests may be; null asks for none.
    backup_max_days = models.PositiveSmallIntegerField(null=True, blank=True)
    kind = models.CharField(max_length=30, default="reclaim")
    options = models.JSONField(default=dict, blank=True)
    #: Jobs of a run that are queued or at work at once on each host.
    max_jobs_per_host = models.PositiveSmallIntegerField(default=1)
    created = models.DateTimeField(default=now)
    created_by = models.CharField(max_length=150)
    #: Up to when the clock has looked for windows that opened; what opened before is not caught up.
    clock = models.DateTimeField(default=now)

    class Meta:
        ordering = ["name"]
        verbose_name_plural = "policies"

    def __str__(self) -> str:
        return self.name


class PolicyRun(models.Model):
    """One window of a policy, or one run that somebody started by hand."""

    class State(models.TextChoices):
        RUNNING = "running"
        FINISHED = "finished"
        MISSED = "missed"
        STOPPED = "stopped"
        FAILED = "failed"

    policy = models.ForeignKey(Policy, on_delete=models.CASCADE, related_name="runs")
    #: When its window opened: two schedulers that see that make one run.
    due = models.DateTimeField()
    ends = models.DateTimeField()
    state = models.CharField(max_length=10, choices=State, default=State.RUNNING)
    #: Why it was missed, stopped or failed.
    detail = models.TextField(blank=True)
    #: The policy's rules as they were then.
    rules = models.JSONField(default=dict)
    by = models.CharField(max_length=150)
    by_hand = models.BooleanField(default=False)
    started = models.DateTimeField(default=now)
    #: When its picks were written; null until then.
    chosen_at = models.DateTimeField(null=True)
    #: Who writes them now, and since when: another one begins anew when that takes too long.
    chooser = models.CharField(max_length=40, blank=True, default="")
    chooser_since = models.DateTimeField(null=True)
    #: How many were left out without a pick of their own, by the code of the rule.
    left_out = models.JSONField(default=dict)
    finished = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-due", "-id"]
        constraints = [models.UniqueConstraint(fields=["policy", "due"], name="one_run_per_policy_and_due_time")]
        indexes = [models.Index(fields=["state"])]

    def __str__(self) -> str:
        return f"{self.policy_id} at {self.due}"


class PolicyPick(models.Model):
    """An image (a pool, a guest) that a run looked at: chosen and what became of it, or left out, and why."""

    class State(models.TextChoices):
        CHOSEN = "chosen"
        SUBMITTED = "submitted"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        SKIPPED = "skipped"

    run = models.ForeignKey(PolicyRun, on_delete=models.CASCADE, related_name="picks")
    #: Where it stands in the order of gain; skipped ones stand behind all others.
    place = models.PositiveIntegerField(default=0)
    host = models.ForeignKey(Host, null=True, on_delete=models.SET_NULL, related_name="+")
    image = models.ForeignKey(Image, null=True, on_delete=models.SET_NULL, related_name="policy_picks")
    pool = models.ForeignKey(StoragePool, null=True, on_delete=models.SET_NULL, related_name="+")
    guest = models.ForeignKey(Guest, null=True, on_delete=models.SET_NULL, related_name="+")
    #: What it was called then.
    label = models.TextField()
    state = models.CharField(max_length=10, choices=State, default=State.CHOSEN)
    #: Why it was left out or failed: a code (a refusal's, or the rule that left it out) and a sentence.
    code = models.CharField(max_length=40, blank=True)
    reason = models.TextField(blank=True)
    job = models.OneToOneField(Job, null=True, on_delete=models.SET_NULL, related_name="policy_pick")
    #: What it was expected to win; null where that was not known.
    predicted_bytes = models.BigIntegerField(null=True)

    class Meta:
        ordering = ["run", "place", "id"]
        indexes = [
            models.Index(fields=["run", "state"]),
            models.Index(fields=["run", "place"]),
        ]

    def __str__(self) -> str:
        return f"{self.label}: {self.state}"
