"""Runs of benchmarks: what was asked, where, and every single figure that came of it."""

from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.models import Job


class BenchmarkKind(models.TextChoices):
    """What is measured."""

    DD = "dd", "dd"
    BONNIE = "bonnie", "bonnie++"
    FIO = "fio", "fio"
    PREALLOCATION = "preallocation", _("preallocation")
    CLUSTER_SIZE = "cluster_size", _("cluster size")
    FORMATS = "formats", _("formats and chains")
    MODES = "modes", _("cache and AIO modes")
    BOOT = "boot", _("boot storm")


class Benchmark(models.Model):
    """One run, or result lines that somebody pasted; then there is no job, no host and no pool."""

    class Source(models.TextChoices):
        RUN = "run", _("run")
        PASTED = "pasted", _("pasted")

    class Caches(models.TextChoices):
        """What stood between the figures and the disk, as the agent says it."""

        DROPPED = "dropped", _("caches dropped")
        DIRECT = "direct", _("direct, bypassing the page cache")
        NOT_DROPPED = "not dropped", _("caches not dropped")

    job = models.OneToOneField(Job, on_delete=models.SET_NULL, null=True, related_name="benchmark")
    host = models.ForeignKey(Host, on_delete=models.CASCADE, null=True, related_name="benchmarks")
    pool = models.ForeignKey(StoragePool, on_delete=models.CASCADE, null=True, related_name="benchmarks")
    source = models.CharField(max_length=6, choices=Source, default=Source.RUN)
    kind = models.CharField(max_length=20, choices=BenchmarkKind)
    quick = models.BooleanField(default=True)
    #: What it is called where it has no pool: the name in pasted lines.
    label = models.CharField(max_length=200, blank=True)
    options = models.JSONField(default=dict)
    #: The agent's steps, worked out when it was submitted, and a digest of them: only runs of the same steps are
    #: measured against each other over time.
    steps = models.JSONField(default=list)
    profile_key = models.CharField(max_length=40, blank=True)
    environment = models.JSONField(default=dict)
    environment_after = models.JSONField(default=dict)
    notes = models.JSONField(default=list)
    caches = models.CharField(max_length=12, blank=True, choices=Caches)
    #: What got worse than it usually is (:mod:`benchmarks.regression`); written when the run has ended well.
    regressions = models.JSONField(default=list)
    created_by = models.CharField(max_length=150)
    created = models.DateTimeField(default=timezone.now)
    #: When it ended well and its figures are whole; null for one that did not, whose figures are a part.
    finished = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["pool", "kind", "profile_key", "-id"])]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} {self.pool or self.label}"


class Sample(models.Model):
    """One figure of one repetition."""

    benchmark = models.ForeignKey(Benchmark, on_delete=models.CASCADE, related_name="samples")
    #: Index of the step in the benchmark's ``steps``; null for pasted figures.
    step = models.PositiveIntegerField(null=True)
    setting = models.JSONField(default=dict)
    metric = models.CharField(max_length=40)
    unit = models.CharField(max_length=8)
    #: Null where the tool gave none; ``note`` then says why.
    value = models.FloatField(null=True)
    note = models.CharField(max_length=200, blank=True)
    repetition = models.PositiveIntegerField(default=1)

    class Meta:
        ordering = ["id"]

    def __str__(self) -> str:
        return f"{self.metric} {self.value} {self.unit}"


class Watch(models.Model):
    """A quick profile that is run on a pool again and again, so that it shows when the pool gets slower."""

    pool = models.ForeignKey(StoragePool, on_delete=models.CASCADE, related_name="benchmark_watches")
    kind = models.CharField(max_length=20, choices=BenchmarkKind)
    every_hours = models.PositiveIntegerField(default=24)
    last_started = models.DateTimeField(null=True)
    #: Why it could not be started when it was due; empty where it could.
    problem = models.TextField(blank=True)
    created_by = models.CharField(max_length=150)
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["id"]
        constraints = [models.UniqueConstraint(fields=["pool", "kind"], name="one_watch_per_pool_and_kind")]

    def __str__(self) -> str:
        return f"{self.kind} on {self.pool}"
