"""Hypervisors, and the places on them where images live."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Self

from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from storage_admin.agent.protocol import b64
from storage_admin.words import ratio


class PartialRows(models.Model):
    """For models with many columns of which lists leave out the large ones.

    Django looks each column up in the list of those that were read: fifty columns of fifty rows are compared as often
    as all the rest of a list's page takes. In a set each is found at once.
    """

    class Meta:
        abstract = True

    @classmethod
    def from_db(cls, db: str | None, field_names: Collection[str], values: Collection[Any], **options: Any) -> Self:
        """As Django's."""
        return super().from_db(db, frozenset(field_names), values, **options)


class Host(PartialRows):
    """A hypervisor and how it is reached."""

    class Kind(models.TextChoices):
        LOCAL = "local"
        SSH = "ssh"
        LIBVIRT = "libvirt"
        PROXMOX = "proxmox"

    class Transport(models.TextChoices):
        LOCAL = "local", _("this machine")
        SSH = "ssh"
        FORCED = "forced", _("ssh, with a key that can only run the agent")
        PLAIN = "plain", _("ssh, plain commands (no Python 3 there)")
        TLS = "tls", "TLS"
        API = "api", _("the API alone")
        API_SSH = "api+ssh", _("the API and ssh")

    class Status(models.TextChoices):
        OK = "ok"
        UNREACHABLE = "unreachable"
        DEGRADED = "degraded"

    slug = models.SlugField(unique=True)
    name = models.CharField(max_length=200)
    kind = models.CharField(max_length=10, choices=Kind)
    address = models.CharField(max_length=255, blank=True)
    port = models.PositiveIntegerField(null=True, blank=True)
    user = models.CharField(max_length=64, blank=True)
    transport = models.CharField(max_length=20, blank=True, choices=Transport)
    #: The one public key that it may show, as ``TYPE BASE64``.
    host_key = models.TextField(blank=True)
    #: Our private key and the secret of an API token, encrypted (:mod:`storage_admin.hosts.secrets`).
    private_key_locked = models.BinaryField(default=b"")
    token_id = models.CharField(max_length=200, blank=True)
    token_locked = models.BinaryField(default=b"")
    #: Its name in its cluster of Proxmox VE, and its SSH server's port; ``port`` is its API's there.
    node = models.CharField(max_length=100, blank=True)
    ssh_port = models.PositiveIntegerField(null=True, blank=True)
    #: SHA-256 of the certificate that its API shows; empty where a known authority has signed that.
    tls_fingerprint = models.CharField(max_length=100, blank=True)
    cluster = models.CharField(max_length=100, blank=True)
    status = models.CharField(max_length=12, choices=Status, default=Status.DEGRADED)
    status_detail = models.TextField(blank=True, default="It has not been scanned yet.")
    last_seen = models.DateTimeField(null=True, blank=True)
    #: What the agent found there: qemu_img, zstd, tools, kernel, ...
    capabilities = models.JSONField(default=dict, blank=True)
    #: Rewriting jobs at once.
    max_jobs = models.PositiveSmallIntegerField(default=1)
    #: Bytes a second that each rewriting job may take where it does not say otherwise; null for no limit.
    bandwidth_bytes_sec = models.BigIntegerField(null=True, blank=True)
    #: Whether such a job only uses the disk when nobody else does.
    idle_io = models.BooleanField(default=True)
    #: Why it is not known which guests use which images; empty where it is known.
    owners_unknown = models.TextField(blank=True, default="The host has not been scanned yet.")
    #: Links, depths and totals hold for all scans up to this job.
    resolved_scan = models.BigIntegerField(default=0)

    @property
    def by_api_alone(self) -> bool:
        """Whether the API of Proxmox VE is the only way to it."""
        return self.transport == self.Transport.API

    @property
    def has_proxmox(self) -> bool:
        """Whether the last scan found Proxmox VE there, and its agent can be asked."""
        return bool(self.capabilities.get("proxmox"))

    @property
    def runs_proxmox(self) -> bool:
        """Whether its guests are those of Proxmox VE."""
        return self.kind == self.Kind.PROXMOX or self.has_proxmox

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def roots(self) -> dict[str, Any]:
        """Which folder the path of each pool led to, by path as it travels; those of which that is known."""
        rows = StoragePool.objects.filter(host=self, root__isnull=False).values_list("path_bytes", "root")
        return {b64(bytes(path)): root for path, root in rows}


class KeyPair(models.Model):
    """A key of ours that waits for its host (:mod:`storage_admin.hosts.key_pairs`)."""

    #: Name of the actor who created it; nobody else uses it.
    owner = models.CharField(max_length=200)
    address = models.CharField(max_length=255)
    port = models.PositiveIntegerField()
    #: As ``TYPE BASE64``.
    public_key = models.TextField()
    private_key_locked = models.BinaryField()
    created = models.DateTimeField(auto_now_add=True)

    #: Whether nobody has seen its public key yet.
    is_new = False

    class Meta:
        constraints = [models.UniqueConstraint(fields=["owner", "address", "port"], name="one_key_pair_waits")]

    def __str__(self) -> str:
        return self.address


class StoragePool(PartialRows):
    """A directory (later also other storages) that holds images."""

    #: The state of one whose storage does not answer.
    SILENT = "silent"

    class Kind(models.TextChoices):
        DIR = "dir"
        NFS = "nfs"
        LVM = "lvm"
        LVMTHIN = "lvmthin"
        ZFS = "zfs"
        RBD = "rbd"
        OTHER = "other"

    #: Kinds whose images are volumes.
    VOLUMES = (Kind.LVM, Kind.LVMTHIN, Kind.ZFS, Kind.RBD)

    class Source(models.TextChoices):
        """Who named the pool; it also decides which files in it are volumes."""

        ADMIN = "admin", _("registered by an admin")
        STANDARD = "standard", _("libvirt's standard folder")
        LIBVIRT = "libvirt", "libvirt"
        PROXMOX = "proxmox", "Proxmox VE"
        LVM = "lvm", "LVM"
        ZFS = "zfs", "ZFS"
        RBD = "rbd", "Ceph RBD"
        DEMO = "demo", _("the demo")

    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="pools")
    name = models.CharField(max_length=200)
    kind = models.CharField(max_length=10, choices=Kind, default=Kind.DIR)
    source = models.CharField(max_length=10, choices=Source, default=Source.ADMIN)
    path = models.TextField()
    path_bytes = models.BinaryField()
    #: Digest of ``path_bytes``: paths may be longer than what an index takes.
    path_key = models.CharField(max_length=32)
    #: Which folder the path led to when it was registered or last seen (the agent's ``roots.Identity``); null where
    #: that is not known. Work in another one that has taken its place is refused.
    root = models.JSONField(null=True, blank=True)
    #: The same storage has the same key on every host that mounts it; ``fs_key`` is the filesystem's.
    shared_key = models.CharField(max_length=500, blank=True, db_index=True)
    fs_key = models.CharField(max_length=500, blank=True)
    #: What the kernel tells of a mount of NFS, or of a folder that its host exports
    #: (:func:`storage_admin.agent.host.nfs.facts`), with the keys as they were told; empty for all else.
    mount = models.JSONField(default=dict, blank=True)
    #: Pools that may be the same storage by another name: ``pool``, ``ours``, ``theirs``
    #: (:mod:`images.scan.same_storages`).
    may_be = models.JSONField(default=list, blank=True)
    #: When its folder was first read.
    known_since = models.DateTimeField(null=True, blank=True)
    filesystem = models.CharField(max_length=40, blank=True)
    network = models.BooleanField(default=False)
    all_hosts_registered = models.BooleanField(default=False)
    #: Whether overlays may take over what images here hold although the overlays' owners may not read these.
    share_bases = models.BooleanField(default=False)
    #: Whether jobs may read what partition tables and filesystems on the images here say.
    look_inside = models.BooleanField(default=False)
    state = models.CharField(max_length=12, default="new")
    state_detail = models.TextField(blank=True)
    #: Why it is not known who uses the images in it; empty where it is known (see also the host's).
    owners_unknown = models.TextField(blank=True)
    capacity_bytes = models.BigIntegerField(null=True)
    available_bytes = models.BigIntegerField(null=True)
    #: Free, but not available: what the filesystem keeps for root; null where nobody tells.
    reserved_bytes = models.BigIntegerField(null=True)
    #: When that was so; null where only ``last_scanned`` tells.
    space_seen = models.DateTimeField(null=True, blank=True)
    #: When it is looked at next without a scan (:mod:`images.scan.minutes`); null for at once.
    space_due = models.DateTimeField(null=True, blank=True)
    #: What LVM, ZFS or Ceph says of it beside its space, where the agent has read the pool's volumes there; else null.
    volume_facts = models.JSONField(null=True, blank=True)
    #: Sums over the pool's images, each inode once; written when a scan or a job ends.
    images_count = models.PositiveIntegerField(default=0)
    allocated_bytes = models.BigIntegerField(null=True)
    virtual_bytes = models.BigIntegerField(null=True)
    #: Over the images that were analyzed; null until one was.
    reclaimable_bytes = models.BigIntegerField(null=True)
    undo_bytes = models.BigIntegerField(default=0)
    #: Files that jobs of another dashboard left, as the last scan found them: each job, folder and name (base64), kinds
    #: of files, bytes.
    leftovers = models.JSONField(default=list, blank=True)
    others_count = models.PositiveIntegerField(default=0)
    others_bytes = models.BigIntegerField(default=0)
    warn_percent = models.PositiveSmallIntegerField(default=85)
    #: Further thresholds of alerts; null for none. Virtual sizes per capacity, which many exceed on purpose.
    warn_overcommit = models.FloatField(null=True, blank=True)
    #: Days until full.
    warn_days = models.PositiveSmallIntegerField(null=True, blank=True, default=14)
    #: How much of the capacity undo copies hold, in percent.
    warn_undo_percent = models.PositiveSmallIntegerField(null=True, blank=True, default=25)
    last_scanned = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["host__name", "name"]
        constraints = [models.UniqueConstraint(fields=["host", "path_key"], name="pool_path_once_per_host")]

    def __str__(self) -> str:
        return f"{self.host.name} / {self.name}"

    @property
    def told_fs_key(self) -> str:
        """Its filesystem's key as its own host tells it, whatever other name the storage goes by."""
        return str(self.mount.get("fs_key", self.fs_key))

    @property
    def is_exported(self) -> bool:
        """Whether it is a folder of its host that others mount by NFS."""
        return bool(self.mount) and self.mount["version"] is None

    @property
    def known_count(self) -> int | None:
        """How many images it has; ``None`` while nobody has listed them yet."""
        return self.images_count if self.images_count or self.last_scanned is not None else None

    @property
    def known_undo_bytes(self) -> int | None:
        """What undo copies hold in it; ``None`` while nobody has looked yet."""
        return self.undo_bytes if self.undo_bytes or self.last_scanned is not None else None

    @property
    def metadata_bytes(self) -> int | None:
        """The size of a thin pool's metadata volume; ``None`` for what is none, or where nobody tells."""
        return (self.volume_facts or {}).get("metadata_bytes")

    @property
    def metadata_percent(self) -> float | None:
        """How much of that is used, as LVM tells."""
        return (self.volume_facts or {}).get("metadata_percent")

    @property
    def is_of_volumes(self) -> bool:
        """Whether its images are volumes, and no files."""
        return self.kind in self.VOLUMES

    def place_of(self, path: bytes) -> dict[str, str]:
        """A file in it, as the agent's verbs take one."""
        return {"path_b64": b64(path), "pool_path_b64": b64(bytes(self.path_bytes))}

    @property
    def is_own_place(self) -> bool:
        """Whether neither an admin nor a hypervisor has named it: its volumes were found, and it goes when they do."""
        return self.source in {self.Source.LVM, self.Source.ZFS, self.Source.RBD}

    @property
    def shares(self) -> dict[str, int | None]:
        """What takes the space of a place of volumes, in bytes, as its backend measures it; empty where it does not.

        ``used``: all of it; ``images``: the physical sizes of its volumes; ``snapshots``; ``reserved``: kept for
        volumes and not written yet; ``others``: thin pools in a group, datasets that are listed elsewhere or are
        no volumes; ``remainder``: what is left of ``used``, as metadata and what is being freed.
        """
        facts = self.volume_facts or {}
        if facts.get("used_bytes") is None:
            return {}
        names = {"snapshots": "snapshot_bytes", "reserved": "reservation_bytes", "others": "others_bytes"}
        told = {"images": self.allocated_bytes} | {name: facts.get(key) for name, key in names.items() if key in facts}
        known = [size for size in told.values() if size is not None]
        rest = facts["used_bytes"] - sum(known)
        # Ceph counts whole objects, which may be more than is stored.
        remainder = rest if len(known) == len(told) and rest >= 0 else None
        return {"used": facts["used_bytes"], **told, "remainder": remainder}

    @property
    def is_broken(self) -> bool:
        """Whether the kernel lets nobody write to a thin pool although it may have room."""
        told = self.volume_facts or {}
        return told.get("mode") in ("ro", "Fail", "Error") or bool(told.get("needs_check"))

    @property
    def metadata_used_bytes(self) -> int | None:
        """The same in bytes."""
        whole, percent = self.metadata_bytes, self.metadata_percent
        return None if whole is None or percent is None else round(whole * percent / 100)

    @property
    def space_at(self) -> datetime | None:
        """When its space was as the row says; ``None`` where nobody has looked yet."""
        return self.space_seen or self.last_scanned

    def take_space(self, told: Mapping[str, Any], at: datetime) -> None:
        """Takes how much space there was, unless somebody has looked since; the row is not saved.

        Args:
            told: ``capacity_bytes``, ``available_bytes``, ``reserved_bytes``; without the first, nothing is known anew.
        """
        if "capacity_bytes" in told and (self.space_seen is None or self.space_seen <= at):
            self.capacity_bytes, self.available_bytes = told["capacity_bytes"], told["available_bytes"]
            self.reserved_bytes = told.get("reserved_bytes")
            self.space_seen = at if self.available_bytes is not None else None

    @property
    def overcommit_ratio(self) -> float | None:
        """Virtual sizes of its images against what its filesystem can give them: not what is kept for root."""
        if not self.usable_bytes or self.virtual_bytes is None:
            return None
        return ratio(self.virtual_bytes, self.usable_bytes)

    @property
    def used_bytes(self) -> int | None:
        """What `df` calls used: neither available nor kept for root."""
        if self.capacity_bytes is None or self.available_bytes is None:
            return None
        return max(self.capacity_bytes - self.available_bytes - (self.reserved_bytes or 0), 0)

    @property
    def used_percent(self) -> float | None:
        """Of what can be used at all, as `df` counts it: 100 when nothing is available any more."""
        if not self.capacity_bytes or self.used_bytes is None or self.usable_bytes is None:
            return None
        return 100 * self.used_bytes / self.usable_bytes if self.usable_bytes else 100.0

    @property
    def usable_bytes(self) -> int | None:
        """The capacity without what is kept for root."""
        if self.used_bytes is None or self.available_bytes is None:
            return None
        return self.used_bytes + self.available_bytes


class PoolSample(models.Model):
    """How full a pool was."""

    pool = models.ForeignKey(StoragePool, on_delete=models.CASCADE, related_name="samples")
    at = models.DateTimeField()
    capacity_bytes = models.BigIntegerField()
    available_bytes = models.BigIntegerField()
    reserved_bytes = models.BigIntegerField(null=True)

    class Meta:
        ordering = ["at"]
        indexes = [models.Index(fields=["pool", "at"])]
        constraints = [
            models.CheckConstraint(
                condition=Q(available_bytes__lte=F("capacity_bytes")), name="pool_sample_available_within_capacity"
            )
        ]

    def __str__(self) -> str:
        return f"{self.pool_id} at {self.at}"

    @property
    def used_bytes(self) -> int:
        return max(self.capacity_bytes - self.available_bytes - (self.reserved_bytes or 0), 0)


class PoolMinute(models.Model):
    """How full a pool was at a look between scans, for what fills up within hours; kept for a day."""

    pool = models.ForeignKey(StoragePool, on_delete=models.CASCADE, related_name="minutes")
    at = models.DateTimeField()
    used_bytes = models.BigIntegerField()
    #: Of a thin pool's metadata; null for what has none.
    metadata_used_bytes = models.BigIntegerField(null=True)

    class Meta:
        ordering = ["at"]
        indexes = [models.Index(fields=["pool", "at"])]

    def __str__(self) -> str:
        return f"{self.pool_id} at {self.at}"
