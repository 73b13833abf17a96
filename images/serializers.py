"""Images, chains, guests and snapshots as the API shows them."""

from datetime import UTC, datetime
from typing import Any

from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from images import backups
from images.models import Image
from images.orphans.selectors import evidence
from images.selectors.guests import why_no_image
from images.selectors.snapshots import KINDS, LISTED_BY, held_by_each
from images.services import DECLARABLE
from storage_admin.guests.backups import of_guests
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.live_facts import as_text, since_1970
from storage_admin.jobs.serializers import LastBackupSerializer
from storage_admin.rest.fields import Body, StrictInteger, TextOrNull
from storage_admin.rest.shown import Shown


class GuestRefSerializer(serializers.Serializer[Any]):
    """A guest that has an image as one of its disks."""

    id = serializers.IntegerField()
    name = serializers.CharField()
    state = serializers.CharField()
    target = serializers.CharField(help_text=_("Name of the disk in the guest, such as vda."))


class SnapshotSerializer(serializers.Serializer[Any]):
    """An internal snapshot; ``size`` is that of the saved machine state in bytes."""

    name = serializers.CharField()
    size = serializers.IntegerField(allow_null=True)
    created = serializers.DateTimeField(allow_null=True)
    held_bytes = serializers.IntegerField(
        allow_null=True, help_text=_("What it alone holds, as of the last analysis; null until then, and in lists.")
    )


class ImageSerializer(Shown, serializers.ModelSerializer[Image]):
    """A disk image. ``allocated_size`` is what it occupies on its host; null means not known (or not there)."""

    host_name = serializers.CharField(source="host.name", read_only=True)
    pool_name = serializers.CharField(source="pool.name", read_only=True)
    backing = serializers.IntegerField(source="backing_id", read_only=True, allow_null=True)
    declared_format = TextOrNull()
    declared_by = TextOrNull()
    compression = TextOrNull()
    preallocation = TextOrNull()
    backing_file = TextOrNull()
    backing_format = TextOrNull()
    reclaimable_method = TextOrNull()
    snapshots = serializers.SerializerMethodField(help_text=_("Internal snapshots; null if the header was not read."))
    guests = serializers.SerializerMethodField()
    orphan_evidence = serializers.SerializerMethodField(
        help_text=_("Evidence in sentences: why the image is an orphan, why it is not, or why this is not known.")
    )
    aside_by = TextOrNull()
    last_backup = serializers.SerializerMethodField(
        help_text=_("Last backup of its guest, of several the one that helps least; null where nothing reports any.")
    )
    exclusive_bytes = serializers.IntegerField(
        source="deletion_frees",
        read_only=True,
        allow_null=True,
        help_text=_("What deleting a volume would free; null while unknown, and of files."),
    )
    exclusive_at = serializers.DateTimeField(
        source="alone_at",
        read_only=True,
        allow_null=True,
        help_text=_("When that was measured of a thin volume; null of any other, whose exclusive size is of the scan."),
    )
    last_scanned = serializers.DateTimeField(read_only=True, allow_null=True)

    full_bytes = serializers.IntegerField(
        read_only=True,
        allow_null=True,
        help_text=_(
            "What ZFS counts for a volume on raidz when all of it is written, with parity and padding of its blocks, "
            "without metadata (up to 3 %); null elsewhere."
        ),
    )

    class Meta:
        model = Image
        fields = (
            "id", "host", "host_name", "pool", "pool_name", "path", "name", "format", "declared_format", "declared_by",
            "virtual_size", "allocated_size", "exclusive_bytes", "exclusive_at", "snapshot_bytes", "reservation_bytes",
            "full_bytes", "file_size", "cluster_size", "compression", "preallocation", "backing_file",
            "backing_format", "backing", "chain_depth", "overlays_count", "snapshots", "encrypted", "in_use",
            "in_use_detail", "guests", "state", "state_detail", "orphan", "orphan_evidence", "reclaimable_bytes",
            "reclaimable_low", "reclaimable_high", "reclaimable_method", "analyzed_at", "first_seen", "last_scanned",
            "missing_since", "aside_since", "aside_until", "aside_by", "deleted_at", "last_backup",
        )  # fmt: skip
        read_only_fields = fields
        extra_kwargs = {
            "snapshot_bytes": {"help_text": _("What the snapshots of a volume take beside it.")},
            "reservation_bytes": {"help_text": _("What is kept for a volume and not written yet.")},
            "in_use": {"help_text": "Whether a running guest or a process has it open; null if this is not known."},
            "reclaimable_bytes": {
                "help_text": "Null until the image is analyzed, and in states in which no job rewrites it."
            },
            "aside_until": {"help_text": "While the image is set aside: when it may be deleted at the earliest."},
        }

    @extend_schema_field({"type": "array", "items": {"type": "string"}})
    def get_orphan_evidence(self, image: Image) -> list[str]:
        return evidence(image)

    @extend_schema_field(LastBackupSerializer(allow_null=True))
    def get_last_backup(self, image: Image) -> Any:
        found = backups.of(image)
        return LastBackupSerializer(found[0]).data if found else None

    @extend_schema_field(SnapshotSerializer(many=True, allow_null=True))
    def get_snapshots(self, image: Image) -> list[dict[str, Any]] | None:
        if not image.header_known:
            return None
        rows = [
            {
                "name": snapshot.get("name", ""),
                "size": snapshot.get("size"),
                "created": since_1970(snapshot.get("created")),
                "held_bytes": held,
            }
            for snapshot, held in zip(image.snapshots, held_by_each(image), strict=True)
        ]
        return list(SnapshotSerializer(rows, many=True).data)

    @extend_schema_field(GuestRefSerializer(many=True))
    def get_guests(self, image: Image) -> list[dict[str, Any]]:
        disks = image.disks
        return [
            {"id": disk.guest_id, "name": disk.guest.name, "state": disk.guest.state, "target": disk.target}
            for disk in disks
        ]


class ImageBody(Body):
    """Which format an image has, where nothing else says so; null or empty takes that back."""

    declared_format = serializers.ChoiceField(choices=DECLARABLE, required=False, allow_null=True, allow_blank=True)


class SetAsideBody(Body):
    """For how many days an image that is set aside cannot be deleted; 14 where nothing is given."""

    grace_days = StrictInteger(required=False, min_value=1, max_value=365)


class GuestDiskSerializer(serializers.ModelSerializer[GuestDisk]):
    """One disk of a guest, as its definition says; ``image`` is null where no scanned image is that file."""

    image = serializers.SerializerMethodField()
    why_no_image = serializers.SerializerMethodField(
        help_text=_("Why no image is linked to this disk; null if one is, and if the disk has no file.")
    )
    format = TextOrNull()
    cache = TextOrNull()
    discard = TextOrNull()

    class Meta:
        model = GuestDisk
        fields = ("image", "why_no_image", "path", "target", "device", "format", "cache", "discard", "readonly")
        read_only_fields = fields

    @extend_schema_field({"type": ["integer", "null"]})
    def get_image(self, disk: GuestDisk) -> int | None:
        use = getattr(disk, "use", None)
        return use.image_id if use else None

    @extend_schema_field({"type": ["string", "null"]})
    def get_why_no_image(self, disk: GuestDisk) -> str | None:
        return None if self.get_image(disk) is not None else why_no_image(disk) or None


class KeptSnapshotSerializer(serializers.Serializer[Any]):
    """A snapshot that a guest's hypervisor keeps, as the last scan saw it."""

    name = serializers.CharField()
    created = serializers.SerializerMethodField(help_text=_("Null where the hypervisor does not tell."))
    external = serializers.BooleanField(help_text=_("It has files of its own, into which the guest writes."))

    @extend_schema_field({"type": ["string", "null"], "format": "date-time"})
    def get_created(self, snapshot: dict[str, Any]) -> str | None:
        created = snapshot["created"]
        return None if created is None else as_text(datetime.fromtimestamp(created, UTC))


class SnapshotRowSerializer(serializers.Serializer[Any]):
    """A snapshot of a guest, whoever keeps it."""

    guest = serializers.IntegerField(source="guest.pk")
    guest_name = serializers.CharField(source="guest.name")
    host = serializers.IntegerField(source="guest.host_id")
    host_name = serializers.CharField(source="guest.host.name")
    name = serializers.CharField()
    created = serializers.DateTimeField(allow_null=True, help_text=_("Null where nobody tells."))
    kind = serializers.ChoiceField(
        choices=KINDS,
        help_text=_("internal: in its qcow2 images; external: files of its own; storage: the storage keeps it."),
    )
    by = serializers.ChoiceField(
        choices=LISTED_BY, help_text=_("Who lists it; image: only the header of an image does.")
    )
    held_bytes = serializers.IntegerField(
        allow_null=True,
        help_text=_("What it alone holds and its deletion frees, by the last analysis; null while unknown."),
    )
    held_at = serializers.DateTimeField(allow_null=True, help_text=_("When the first of these images was analyzed."))
    files_bytes = serializers.IntegerField(
        allow_null=True, help_text=_("What its own files occupy; null if it has none, or they are unknown.")
    )


class GuestSerializer(serializers.ModelSerializer[Guest]):
    """A guest and its disks. Null priorities and weights are not set, or not known."""

    host_name = serializers.CharField(source="host.name", read_only=True)
    disks = GuestDiskSerializer(many=True, read_only=True)
    io_limits = serializers.DictField(read_only=True)
    snapshots = KeptSnapshotSerializer(many=True, read_only=True)
    last_backup = serializers.SerializerMethodField(help_text=_("Its last backup; null where nothing reports any."))

    class Meta:
        model = Guest
        fields = (
            "id", "host", "host_name", "kind", "uid", "name", "state", "disks", "io_priority", "io_weight", "io_limits",
            "snapshots", "last_seen", "last_backup",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(LastBackupSerializer(allow_null=True))
    def get_last_backup(self, guest: Guest) -> Any:
        known = self.context.get("backups")
        found = (of_guests([guest]) if known is None else known).get(guest.pk)
        return LastBackupSerializer(found).data if found else None
