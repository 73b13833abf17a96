"""Disk images, their chains and their sizes over time."""

import re
from datetime import datetime
from typing import Any

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from images import raidz
from images.indexes import FilterIndex
from storage_admin.guests.models import GuestDisk
from storage_admin.hosts.models import Host, PartialRows, StoragePool
from storage_admin.jobs.models import Job


class ListedImages(models.Manager["Image"]):
    """Images that a finished scan has listed. What a scan at work has found so far is not shown."""

    def get_queryset(self) -> models.QuerySet["Image"]:
        return super().get_queryset().filter(listed=True)


#: By whom bitmaps are made whose names begin so, or look so: virtnbdbackup (its README), Proxmox VE's QEMU
#: (pve-backup.c), oVirt's checkpoints, whose ids are UUIDs (vdsm, libvirt's ``backup_domain_begin``), and those that
#: libvirt calls by the second in which they were made (``virDomainMomentDefPostParse``).
_OWNERS = (
    (re.compile(r"virtnbdbackup\."), "virtnbdbackup"),
    (re.compile(r"pbs-"), "Proxmox Backup Server"),
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"), "oVirt"),
    (re.compile(r"[0-9]{10}$"), "libvirt"),
)
#: Those of them that have a checkpoint of libvirt for each bitmap.
_BY_CHECKPOINTS = frozenset({"virtnbdbackup", "oVirt", "libvirt"})


def _owner(bitmap: str) -> str:
    return next((owner for pattern, owner in _OWNERS if pattern.match(bitmap)), "")


class Image(PartialRows):
    """A disk image on a host, as the last scan saw it. Sizes are in bytes."""

    class State(models.TextChoices):
        OK = "ok"
        MISSING = "missing"
        CHAIN_BROKEN = "chain_broken", _("chain broken")
        CHAIN_CYCLE = "chain_cycle", _("chain cycle")
        OUTSIDE_POOL = "outside_pool", _("base outside every pool")
        FORMAT_MISMATCH = "format_mismatch", _("format mismatch")
        MERGED = "merged"
        UNREADABLE = "unreadable"
        MODIFYING = "modifying"
        SET_ASIDE = "set_aside", _("set aside")
        DELETED = "deleted"

    #: What is not where it was: it counts in no sum, and as nobody's base.
    NOT_THERE = (State.MISSING, State.SET_ASIDE, State.DELETED)

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="images", db_index=False)
    pool = models.ForeignKey(StoragePool, on_delete=models.CASCADE, related_name="images", db_index=False)
    #: How the name is shown (control characters as \x..); the name itself is ``path_bytes``.
    path = models.TextField()
    name = models.CharField(max_length=1100)
    path_bytes = models.BinaryField()
    path_key = models.CharField(max_length=32)

    #: The agent's digest of path, device, inode, size, times and blocks: equal means unchanged.
    fingerprint = models.BinaryField(max_length=16)
    dev = models.CharField(max_length=20)
    inode = models.CharField(max_length=20)
    nlink = models.PositiveIntegerField(default=1)
    mtime_ns = models.BigIntegerField()
    ctime_ns = models.BigIntegerField()
    #: Null where nobody tells: a hypervisor's API knows no more than its storages do.
    file_size = models.BigIntegerField(null=True)
    allocated_size = models.BigIntegerField(null=True)
    virtual_size = models.BigIntegerField(null=True)
    #: Of a volume: what deleting it would free, what its snapshots take beside it, what is kept for it and not written
    #: yet; null where that is not measured.
    exclusive_bytes = models.BigIntegerField(null=True)
    snapshot_bytes = models.BigIntegerField(null=True)
    reservation_bytes = models.BigIntegerField(null=True)

    #: What the content looks like, and what it is declared to be (by whom): only a declaration is acted upon.
    format = models.CharField(max_length=20)
    declared_format = models.CharField(max_length=20, blank=True)
    declared_by = models.CharField(max_length=40, blank=True)
    admin_format = models.CharField(max_length=20, blank=True)
    cluster_size = models.BigIntegerField(null=True)
    compression = models.CharField(max_length=10, blank=True)
    preallocation = models.CharField(max_length=10, blank=True)
    encrypted = models.BooleanField(null=True)
    #: Everything else that the header says.
    header = models.JSONField(default=dict)
    snapshots = models.JSONField(default=list)

    backing_file = models.TextField(blank=True)
    backing_format = models.CharField(max_length=20, blank=True)
    #: Digest of the base's absolute path, and the inode that stood there when this image was scanned.
    backing_key = models.CharField(max_length=32, blank=True)
    backing_path = models.TextField(blank=True)
    backing_path_bytes = models.BinaryField(default=b"")
    backing_found = models.CharField(max_length=41, blank=True)
    backing_unsafe = models.TextField(blank=True)
    #: Without a constraint in the database: SQLite's check of a table against itself made linking five times slower.
    backing = models.ForeignKey(
        "self", null=True, on_delete=models.SET_NULL, related_name="overlays", db_constraint=False
    )
    #: The lowest image of the chain: equal for all images of one tree.
    root_id = models.BigIntegerField(null=True, db_index=True)
    chain_depth = models.PositiveIntegerField(default=1)
    overlays_count = models.PositiveIntegerField(default=0)

    #: Whether a running guest or a process has it open; null where that is not known.
    in_use = models.BooleanField(null=True)
    in_use_detail = models.TextField(blank=True)
    held = models.CharField(max_length=200, blank=True)
    orphan = models.BooleanField(null=True)
    orphan_evidence = models.JSONField(default=list)
    state = models.CharField(max_length=16, choices=State, default=State.OK)
    state_detail = models.TextField(blank=True)
    #: Of an overlay that a job has merged into the image below it: the ``job`` and the ``file`` that it was
    #: (device, inode and when it was written). Another file by that name has nothing to do with it.
    merged = models.JSONField(null=True)
    #: Why the header could not be read; empty where it could.
    unreadable = models.TextField(blank=True)

    #: Null until analyzed; the estimate belongs to ``analyzed_fingerprint`` alone.
    reclaimable_bytes = models.BigIntegerField(null=True)
    reclaimable_low = models.BigIntegerField(null=True)
    reclaimable_high = models.BigIntegerField(null=True)
    reclaimable_method = models.CharField(max_length=20, blank=True)
    estimate = models.JSONField(null=True)
    analyzed_at = models.DateTimeField(null=True)
    #: Of a thin volume: what it has alone, and when that was measured.
    alone_bytes = models.BigIntegerField(null=True)
    alone_at = models.DateTimeField(null=True)
    analyzed_fingerprint = models.BinaryField(max_length=16, default=b"")

    first_seen = models.DateTimeField()
    #: When this row was last written; an unchanged image was seen whenever its pool was scanned.
    seen = models.DateTimeField()
    missing_since = models.DateTimeField(null=True)
    #: The job that has set it aside, and since when; it may be deleted from ``aside_until`` on. While it is aside,
    #: ``path_key`` is that of the name that it has then, and ``path`` and the rest are what it gets back.
    aside_job = models.ForeignKey(Job, null=True, on_delete=models.SET_NULL, related_name="+", db_index=False)
    aside_since = models.DateTimeField(null=True)
    aside_until = models.DateTimeField(null=True)
    aside_by = models.CharField(max_length=150, blank=True, default="", db_default="")
    deleted_at = models.DateTimeField(null=True)
    listed = models.BooleanField(default=False)
    changed_scan = models.BigIntegerField(default=0)

    objects = ListedImages()
    every = models.Manager()

    class Meta:
        ordering = ["name", "id"]
        base_manager_name = "every"
        default_manager_name = "objects"
        constraints = [models.UniqueConstraint(fields=["host", "path_key"], name="image_path_once_per_host")]
        # ``listed`` leads no index: nearly all rows are, and to list ten thousand would rewrite each index.
        indexes = [
            models.Index(fields=[column, "id"], name=f"image_by_{column[:20]}")
            for column in ("name", "allocated_size", "reclaimable_bytes")
        ] + [
            FilterIndex(
                fields=[
                    "path",
                    "listed",
                    "declared_format",
                    "format",
                    "state",
                    "in_use",
                    "orphan",
                    "chain_depth",
                    "virtual_size",
                    "reclaimable_bytes",
                    "host",
                    "pool",
                ],
                name="image_filters",
            ),
            models.Index(fields=["pool", "listed"], name="image_by_pool"),
            models.Index(fields=["host", "changed_scan"], name="image_by_scan"),
            models.Index(fields=["host", "dev", "inode"], name="image_by_inode"),
            models.Index(fields=["id"], condition=Q(orphan=True), name="image_orphans"),
            models.Index(fields=["id"], condition=~Q(state="ok"), name="image_not_ok"),
            models.Index(fields=["host"], condition=Q(aside_since__isnull=False), name="image_aside"),
            # A job that is deleted is looked for here: without it, each one would cost a look at every image.
            models.Index(fields=["aside_job"], condition=Q(aside_job__isnull=False), name="image_aside_job"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def last_scanned(self) -> datetime | None:
        """When it was last seen on its host."""
        if self.state in self.NOT_THERE or self.pool.last_scanned is None:
            return self.seen
        return max(self.seen, self.pool.last_scanned)

    @property
    def disks(self) -> list[GuestDisk]:
        """The guests' disks that it is: as its uses were read with it (into ``read_uses``), else as they are now."""
        read: list[ImageUse] | None = vars(self).get("read_uses")
        return [use.disk for use in (self.uses.select_related("disk__guest") if read is None else read)]

    @property
    def guest_names(self) -> list[str]:
        """The guests whose disk it is, each once, as sentences of plans name them."""
        return sorted({disk.guest.name_for(self.host_id) for disk in self.disks})

    @property
    def attached(self) -> dict[str, Any] | None:
        """What its host told of the device that a job has attached it as; ``None`` where it is not attached."""
        told = self.host.capabilities.get("attached") or ()
        return next((one for one in told if (str(one["dev"]), str(one["inode"])) == (self.dev, self.inode)), None)

    @property
    def header_known(self) -> bool:
        """Whether an agent has read its header; a hypervisor's API tells neither clusters nor snapshots."""
        return self.file_size is not None and not self.unreadable

    @property
    def bitmaps(self) -> list[dict[str, Any]]:
        """The persistent dirty bitmaps of its header: ``name``, ``granularity`` in bytes, ``in_use``, ``enabled``,
        ``owner`` (the tool that gives such names, empty where none is known), ``checkpoint_of`` (the guest of which a
        checkpoint of libvirt has it, else empty), ``stale``: no tool can use it any more, since it was not closed, or
        its checkpoint is gone.

        Of a header that was read before those were kept the name alone is known; the others are ``None``.
        """
        unknown = dict.fromkeys(("granularity", "in_use", "enabled"))
        found = [one if isinstance(one, dict) else {"name": one} | unknown for one in self.from_header("bitmaps") or ()]
        guests, told = self._checkpoints() if found else [], list[dict[str, Any]]()
        for one in found:
            owner = _owner(one["name"])
            of = next((guest for guest, names in guests if names and one["name"] in names), "")
            asked = bool(guests) and all(names is not None for _, names in guests)
            stale = not of and (bool(one["in_use"]) or (asked and owner in _BY_CHECKPOINTS))
            told.append(one | {"owner": owner, "checkpoint_of": of, "stale": stale})
        return told

    def _checkpoints(self) -> list[tuple[str, list[str] | None]]:
        """Guests that use it, as a disk or below one: the name, and the bitmaps that its checkpoints have on that disk;
        ``None`` where nobody tells these.
        """
        above, level = [self.pk], [self.pk]
        while level := list(Image.objects.filter(backing__in=level).exclude(pk__in=above).values_list("pk", flat=True)):
            above += level
        found = list[tuple[str, list[str] | None]]()
        for disk in GuestDisk.objects.filter(use__image__in=above).select_related("guest"):
            guest, known = disk.guest, disk.guest.checkpoints
            found.append((guest.name_for(self.host_id), None if known is None else known.get(disk.target, [])))
        return found

    @property
    def occupied_bytes(self) -> int:
        """Its allocated size, for what is worked out of it; 0 where nobody tells, of images that no job works on."""
        return self.allocated_size or 0

    @property
    def deletion_frees(self) -> int | None:
        """What deleting a volume would free, as the scan told, else as it was measured at ``alone_at``; ``None`` where
        that is not known.
        """
        return self.alone_bytes if self.exclusive_bytes is None else self.exclusive_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of it that other files have as well, as reflinked copies do: they stay taken without it."""
        return int((self.estimate or {}).get("basis", {}).get("shared_bytes") or 0)

    @property
    def own_bytes(self) -> int | None:
        """What of its physical size goes with it: a volume may share blocks with its snapshots, a file with others."""
        if self.pool.volume_facts is not None:
            return self.deletion_frees
        return None if self.allocated_size is None else max(self.allocated_size - self.shared_bytes, 0)

    @property
    def full_bytes(self) -> int | None:
        """What ZFS counts for a volume when all of it is written; ``None`` where parity and padding play no part."""
        layout = (self.pool.volume_facts or {}).get("raidz")
        if not layout or not self.virtual_size or not self.cluster_size:
            return None
        return raidz.full_bytes(self.virtual_size, self.cluster_size, **layout)

    @property
    def full_percent(self) -> int | None:
        """That as a share of the virtual size."""
        return round(100 * self.full_bytes / self.virtual_size) if self.full_bytes and self.virtual_size else None

    @property
    def is_volume(self) -> bool:
        """Whether it is a volume of LVM, ZFS or Ceph, and no file."""
        return self.pool.is_of_volumes

    @property
    def volume(self) -> dict[str, str]:
        """What its host's agent knows a volume by that can be set aside, and its other name; empty for others."""
        known: dict[str, str] = self.header.get("volume") or {}
        return {"backend": "lvm"} | known if known else {}

    @property
    def place(self) -> dict[str, str]:
        """Its file, as the agent's verbs take it."""
        return self.pool.place_of(bytes(self.path_bytes))

    @property
    def volume_place(self) -> dict[str, str]:
        """That, as the agent's verbs take it."""
        return {name: self.volume.get(name, "") for name in ("backend", "group", "group_id", "name", "id")}

    @property
    def offered_bytes(self) -> int | None:
        """What can be reclaimed now: nothing in a state in which no job rewrites it; ``None`` until it was analyzed."""
        return self.reclaimable_bytes if self.state == Image.State.OK else 0

    def from_header(self, name: str) -> Any:
        """One of the header's further facts, ``None`` where it does not say."""
        return self.header.get(name)


class ImageSample(models.Model):
    """How large an image was; written when a scan found another size than before."""

    image = models.ForeignKey(Image, on_delete=models.CASCADE, related_name="samples")
    at = models.DateTimeField()
    virtual_size = models.BigIntegerField(null=True)
    allocated_size = models.BigIntegerField(null=True)
    file_size = models.BigIntegerField(null=True)

    class Meta:
        ordering = ["at"]
        indexes = [models.Index(fields=["image", "at"])]

    def __str__(self) -> str:
        return f"{self.image_id} at {self.at}"


class ImageUse(models.Model):
    """A guest's disk is this image."""

    image = models.ForeignKey(Image, on_delete=models.CASCADE, related_name="uses")
    disk = models.OneToOneField(GuestDisk, on_delete=models.CASCADE, related_name="use")

    def __str__(self) -> str:
        return f"{self.image_id} is {self.disk_id}"


class Claim(models.Model):
    """Something that a scan was told of and that needs an image of a host, or may need it, and is neither its guest nor
    an image of its pools.
    """

    class Kind(models.TextChoices):
        #: A guest of another node of the cluster has this number: what is named after it may be its disk.
        NUMBER = "number"
        #: The file of this device and inode is the base of a guest's disk that lies outside of every pool.
        FILE = "file"
        #: What such a disk stands on cannot be told: it may be any image of the host.
        ANY = "any"

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="claims")
    kind = models.CharField(max_length=10, choices=Kind)
    #: A guest's number; device and inode with a colon between them.
    key = models.CharField(max_length=100, blank=True)
    #: Who it is, as a sentence.
    why = models.TextField()

    class Meta:
        ordering = ["host", "kind", "key"]
        constraints = [models.UniqueConstraint(fields=["host", "kind", "key"], name="claim_once_per_host")]

    def __str__(self) -> str:
        return self.why
