"""Guests and their disks. Which image a disk is, the images app knows."""

from datetime import datetime

from django.db import models
from django.utils.translation import gettext

from storage_admin.hosts.live_facts import since_1970
from storage_admin.hosts.models import Host

#: States in which nothing of a guest runs, so that nothing of it can write.
OFF_STATES = frozenset({"shut off", "stopped", "crashed"})


class Guest(models.Model):
    """A libvirt domain, a Proxmox VM or a container."""

    class Kind(models.TextChoices):
        DOMAIN = "domain"
        VM = "vm"
        CONTAINER = "container"

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="guests")
    kind = models.CharField(max_length=10, choices=Kind)
    uid = models.CharField(max_length=100)
    name = models.CharField(max_length=255)
    #: running, paused, shut off, crashed, pmsuspended, ... in libvirt's words.
    state = models.CharField(max_length=20)
    io_priority = models.SmallIntegerField(null=True)
    io_weight = models.IntegerField(null=True)
    #: By disk target, bytes or operations a second: ``{"vda": {"read_bytes_sec": 1000000}}``.
    io_limits = models.JSONField(default=dict, blank=True)
    #: Why its manager has it locked, such as ``backup``; empty where it is not.
    lock = models.CharField(max_length=100, blank=True)
    #: Lines of its definition that were not understood: what they may name is no orphan.
    unread = models.JSONField(default=list, blank=True)
    #: Of its configuration as it was last seen, and of the one whose hidden lines an admin lets go (``hidden_lines``).
    digest = models.CharField(max_length=40, blank=True)
    accepted_digest = models.CharField(max_length=40, blank=True)
    #: Targets of disks that are taken away, or replaced by another volume, when it is started next.
    waiting = models.JSONField(default=list, blank=True)
    #: That its manager keeps: each ``name``, ``created`` (seconds since the epoch, or null), ``external``, and paths of
    #: its ``files`` (rows of earlier versions have none).
    snapshots = models.JSONField(default=list, blank=True)
    #: Names of the bitmaps that its manager's checkpoints have, by disk target; null where nobody has told.
    checkpoints = models.JSONField(null=True, blank=True)
    last_seen = models.DateTimeField()

    class Meta:
        ordering = ["name", "id"]
        constraints = [models.UniqueConstraint(fields=["host", "kind", "uid"], name="guest_once_per_host")]

    def __str__(self) -> str:
        return self.name

    def name_for(self, host_id: int) -> str:
        """Its name in a sentence that whoever sees this host reads: a guest of another one may not exist for them."""
        return self.name if self.host_id == host_id else gettext("a guest of another host")

    @property
    def takes_io(self) -> bool:
        """Whether its hypervisor lets its share of the disks be set: Proxmox VE has nothing for containers."""
        return self.kind != self.Kind.CONTAINER or not self.host.runs_proxmox

    @property
    def oldest_snapshot(self) -> datetime | None:
        """When the oldest of its snapshots was made; ``None`` where it has none, or nobody tells."""
        created = [at for one in self.snapshots if (at := since_1970(one["created"])) is not None]
        return min(created, default=None)

    @property
    def off(self) -> bool:
        """Whether nothing of it runs, so that nothing of it can write."""
        return self.state in OFF_STATES


class GuestDisk(models.Model):
    """One disk of a guest, as its definition says."""

    guest = models.ForeignKey(Guest, on_delete=models.CASCADE, related_name="disks")
    target = models.CharField(max_length=40)
    device = models.CharField(max_length=10, default="disk")
    path = models.TextField(blank=True)
    path_bytes = models.BinaryField(default=b"")
    path_key = models.CharField(max_length=32, blank=True, db_index=True)
    dev = models.CharField(max_length=20, blank=True)
    inode = models.CharField(max_length=20, blank=True)
    #: The format that the guest's definition declares; empty where it declares none.
    format = models.CharField(max_length=20, blank=True)
    cache = models.CharField(max_length=20, blank=True)
    discard = models.CharField(max_length=20, blank=True)
    readonly = models.BooleanField(default=False)
    #: Its definition names the images that its own stands on: another chain would contradict it.
    records_chain = models.BooleanField(default=False)
    #: The storage's own name for it, such as a Proxmox volume id.
    volume = models.TextField(blank=True)
    #: The snapshot, or ``pending``, where only that section of the definition names it; empty for what the guest has.
    only_in = models.CharField(max_length=100, blank=True)
    #: Whether backups of its guest have it; null where nobody tells.
    in_backups = models.BooleanField(null=True)

    class Meta:
        ordering = ["guest", "target", "only_in"]
        constraints = [models.UniqueConstraint(fields=["guest", "target", "only_in"], name="disk_once_per_guest")]

    def __str__(self) -> str:
        return f"{self.guest_id} {self.target}"


class GuestSpan(models.Model):
    """A time in which a guest was seen to run, or to be off, at every look; it outlives the guest's row.

    Of those in which it was off, the last alone is kept.
    """

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="+")
    kind = models.CharField(max_length=10, choices=Guest.Kind)
    uid = models.CharField(max_length=100)
    ran = models.BooleanField()
    #: In seconds of :class:`storage_admin.jobs.models.Elapsed`.
    since = models.FloatField()
    until = models.FloatField()

    class Meta:
        ordering = ["id"]
        indexes = [models.Index(fields=["host", "kind", "uid", "-id"], name="span_of_guest")]

    def __str__(self) -> str:
        return f"{self.uid} {'ran' if self.ran else 'was off'}"


class GuestBackup(models.Model):
    """The newest usable backup of a guest of Proxmox VE, also of one that is gone, as a host's last scan was told."""

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="+")
    #: Of the guest; empty where the storage does not tell.
    kind = models.CharField(max_length=10, blank=True)
    uid = models.CharField(max_length=100)
    at = models.DateTimeField()
    volume = models.TextField()
    #: How many newer ones failed their verification.
    passed_over = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["id"]
        constraints = [models.UniqueConstraint(fields=["host", "uid", "kind"], name="newest_backup_of_guest")]

    def __str__(self) -> str:
        return f"{self.uid} at {self.at}"


class BackupListing(models.Model):
    """What stands behind a host's backups: when they were listed, by which storages, and why some may be missing."""

    host = models.OneToOneField(Host, on_delete=models.CASCADE, related_name="+")
    #: Null where they never were.
    at = models.DateTimeField(null=True)
    storages = models.JSONField(default=list)
    #: Each ``detail``, a sentence, and ``uid`` where it is of one guest alone (else empty).
    gaps = models.JSONField(default=list)

    def __str__(self) -> str:
        return f"backups of {self.host_id}"
