"""Images, chains, guests and pools as the API shows them."""

from datetime import UTC, datetime
from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from images import backups
from images.models import Image
from images.orphans.selectors import evidence
from images.scan import known
from images.selectors.guests import why_no_image
from images.selectors.snapshots import KINDS, LISTED_BY, held_by_each
from images.services import DECLARABLE
from storage_admin.guests.backups import of_guests
from storage_admin.guests.models import Guest, GuestDisk
from storage_admin.hosts.live_facts import since_1970
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.jobs.serializers import LastBackupSerializer
from storage_admin.rest.fields import Body, StrictBoolean, StrictInteger, StrictNumber, StrictText, TextOrNull
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

    host = serializers.PrimaryKeyRelatedField[Any](read_only=True)
    host_name = serializers.CharField(source="host.name", read_only=True)
    pool = serializers.PrimaryKeyRelatedField[Any](read_only=True)
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
        read_only=True, allow_null=True, help_text=_("What deleting a logical volume would free; null while unknown.")
    )
    exclusive_at = serializers.DateTimeField(
        source="alone_at",
        read_only=True,
        allow_null=True,
        help_text=_("When that was measured of a thin volume; null of any other, whose exclusive size is of the scan."),
    )
    last_scanned = serializers.DateTimeField(read_only=True, allow_null=True)

    class Meta:
        model = Image
        fields = (
            "id", "host", "host_name", "pool", "pool_name", "path", "name", "format", "declared_format", "declared_by",
            "virtual_size", "allocated_size", "exclusive_bytes", "exclusive_at", "file_size", "cluster_size",
            "compression", "preallocation", "backing_file", "backing_format", "backing", "chain_depth",
            "overlays_count", "snapshots", "encrypted", "in_use", "in_use_detail", "guests", "state",
            "state_detail", "orphan", "orphan_evidence", "reclaimable_bytes", "reclaimable_low", "reclaimable_high",
            "reclaimable_method", "analyzed_at", "first_seen", "last_scanned", "missing_since",
            "aside_since", "aside_until", "aside_by", "deleted_at", "last_backup",
        )  # fmt: skip
        read_only_fields = fields
        extra_kwargs = {
            "in_use": {
                "help_text": "Whether a running guest or a process has the image open; null if this is not known."
            },
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
        return None if created is None else f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%SZ}"


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

    host = serializers.PrimaryKeyRelatedField[Any](read_only=True)
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


class LeftoverSerializer(serializers.Serializer[Any]):
    """Files that a job left which this dashboard does not know."""

    job = serializers.CharField(help_text=_("Value for the option `job` of `settle_leftover`."))
    path = serializers.CharField(
        source="shown", help_text=_("Path of the image; of the folder if no journal names an image.")
    )
    files = serializers.ListField(child=serializers.CharField(), source="kinds")
    held_bytes = serializers.IntegerField()
    has_copy = serializers.BooleanField(help_text=_("Whether there is an undo copy that can be restored or removed."))


class PoolSerializer(Shown, serializers.ModelSerializer[StoragePool]):
    """A place that holds images. ``allocated_bytes`` and the like are sums over its images, each inode once."""

    host = serializers.PrimaryKeyRelatedField[Any](read_only=True)
    host_name = serializers.CharField(source="host.name", read_only=True)
    overcommit_ratio = serializers.FloatField(
        read_only=True,
        allow_null=True,
        help_text=_("Virtual sizes divided by the usable capacity, without the space that is reserved for root."),
    )
    images_count = serializers.IntegerField(
        source="known_count", read_only=True, allow_null=True, help_text=_("Null until the pool is listed.")
    )
    used_bytes = serializers.IntegerField(
        read_only=True, allow_null=True, help_text=_("As in df: space reserved for root does not count as used.")
    )
    metadata_bytes = serializers.IntegerField(
        read_only=True, allow_null=True, help_text=_("Size of the metadata of an LVM thin pool; null for all else.")
    )
    metadata_percent = serializers.FloatField(
        read_only=True, allow_null=True, help_text=_("How much of that is used, as LVM reports it.")
    )
    shared_key = TextOrNull()
    filesystem = TextOrNull()
    leftovers = serializers.SerializerMethodField(help_text=_("Files of jobs that this dashboard does not know."))
    aside_bytes = serializers.SerializerMethodField(help_text=_("Bytes that images set aside occupy in the pool."))
    days_until_full = serializers.SerializerMethodField(
        help_text=_(
            "Days until full at the growth of the last 30 days; null if fewer than eight days of samples "
            "exist or they show no clear growth."
        )
    )
    days_until_full_low = serializers.SerializerMethodField(
        help_text="Lower bound, by the fastest growth that fits the samples."
    )
    days_until_full_high = serializers.SerializerMethodField(
        help_text=_("Upper bound, based on the slowest growth consistent with the samples.")
    )

    class Meta:
        model = StoragePool
        fields = (
            "id", "host", "host_name", "name", "kind", "source", "path", "shared_key", "filesystem", "network",
            "all_hosts_registered", "share_bases", "look_inside", "state", "state_detail", "owners_unknown",
            "capacity_bytes",
            "available_bytes", "reserved_bytes", "used_bytes", "metadata_bytes", "metadata_percent",
            "images_count", "allocated_bytes", "virtual_bytes",
            "overcommit_ratio", "reclaimable_bytes", "undo_bytes", "leftovers", "aside_bytes", "warn_percent",
            "warn_overcommit", "warn_days", "warn_undo_percent", "days_until_full", "days_until_full_low",
            "days_until_full_high", "last_scanned",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(LeftoverSerializer(many=True))
    def get_leftovers(self, pool: StoragePool) -> Any:
        return LeftoverSerializer(known.leftovers_of(pool), many=True).data

    @extend_schema_field({"type": "integer"})
    def get_aside_bytes(self, pool: StoragePool) -> int:
        found: dict[int, tuple[int, int]] = self.context["aside"]
        return found.get(pool.pk, (0, 0))[1]

    @extend_schema_field({"type": ["number", "null"]})
    def get_days_until_full(self, pool: StoragePool) -> float | None:
        return self._forecast(pool, "days")

    @extend_schema_field({"type": ["number", "null"]})
    def get_days_until_full_low(self, pool: StoragePool) -> float | None:
        return self._forecast(pool, "low")

    @extend_schema_field({"type": ["number", "null"]})
    def get_days_until_full_high(self, pool: StoragePool) -> float | None:
        return self._forecast(pool, "high")

    def _forecast(self, pool: StoragePool, name: str) -> float | None:
        return getattr(self.context["forecasts"].get(pool.pk), name, None)


@extend_schema_field({"oneOf": [{"type": "integer"}, {"type": "string"}]})
class HostRef(serializers.Field[Any, Any, Any, Any]):
    """A host in a body: its id, or its slug."""

    def to_internal_value(self, data: Any) -> Host:
        hosts = self.context["hosts"]
        found: Host | None = None
        if isinstance(data, int) and not isinstance(data, bool):
            found = hosts.filter(pk=data).first()
        elif isinstance(data, str):
            found = hosts.filter(slug=data).first()
        if found is None:
            raise serializers.ValidationError(gettext("This host does not exist. Give its id or slug."))
        return found


class NewPoolBody(Body):
    """A folder that becomes a pool."""

    host = HostRef()
    kind = serializers.ChoiceField(choices=[(StoragePool.Kind.DIR, "a folder")], required=False)
    path = StrictText(max_length=4096, trim_whitespace=False)
    name = StrictText(max_length=200, required=False)
    add_to_list = serializers.BooleanField(
        required=False,
        help_text="Add the folder to the list of image folders on the host if it is missing there (admin of all "
        "hosts, and only where the dashboard is root on the host).",
    )


class PoolBody(Body):
    """What an admin decides of a pool."""

    name = StrictText(max_length=200, required=False)
    warn_percent = StrictInteger(required=False, min_value=1, max_value=100)
    warn_overcommit = StrictNumber(
        required=False,
        allow_null=True,
        min_value=0.1,
        max_value=1000,
        help_text="Warn above this overcommit ratio; null: never.",
    )
    warn_days = StrictInteger(
        required=False,
        allow_null=True,
        min_value=1,
        max_value=365,
        help_text=_("Warn when forecast full within this many days; null: never."),
    )
    warn_undo_percent = StrictInteger(
        required=False,
        allow_null=True,
        min_value=1,
        max_value=100,
        help_text=_("Warn when undo copies hold more than this percentage of the capacity; null: never."),
    )
    all_hosts_registered = StrictBoolean(
        required=False, help_text="Confirms that every host that uses this storage is registered here."
    )
    share_bases = StrictBoolean(
        required=False,
        help_text=_(
            "Jobs may copy data of images in this pool into overlays, even if the owners of those overlays "
            "may not read these images."
        ),
    )
    look_inside = StrictBoolean(
        required=False,
        help_text=_("Operators may have jobs read partition tables and filesystem headers of images in this pool."),
    )
