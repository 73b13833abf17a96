"""What the API shows and takes of pools."""

from typing import Any

from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from images.scan import known
from storage_admin.hosts.models import Host, StoragePool
from storage_admin.rest.fields import Body, StrictBoolean, StrictInteger, StrictNumber, StrictText, TextOrNull
from storage_admin.rest.shown import Shown


class LeftoverSerializer(serializers.Serializer[Any]):
    """Files that a job left which this dashboard does not know."""

    job = serializers.CharField(help_text=_("Value for the option `job` of `settle_leftover`."))
    path = serializers.CharField(
        source="shown", help_text=_("Path of the image; of the folder if no journal names an image.")
    )
    files = serializers.ListField(child=serializers.CharField(), source="kinds")
    held_bytes = serializers.IntegerField()
    has_copy = serializers.BooleanField(help_text=_("Whether there is an undo copy that can be restored or removed."))


class MountSerializer(serializers.Serializer[Any]):
    """A mount of NFS, as its host's kernel describes it. A null means that it is not known."""

    version = serializers.CharField(allow_null=True, help_text=_("Null for a folder that the host itself exports."))
    addresses = serializers.ListField(child=serializers.CharField(), help_text=_("Addresses of the server."))
    fsid = serializers.CharField(allow_null=True, help_text=_("The number that the server gives the filesystem."))
    soft = serializers.BooleanField(help_text=_("Errors after a while instead of waiting when the server is away."))
    writable = serializers.BooleanField(help_text=_("Whether it is mounted with write access."))
    locks = serializers.BooleanField(help_text=_("Whether locks reach other hosts."))
    holes = serializers.BooleanField(allow_null=True, help_text=_("Whether parts of a file can be freed."))
    reserves = serializers.BooleanField(allow_null=True, help_text=_("Whether space can be reserved unwritten."))
    root_writes = serializers.BooleanField(help_text=_("Whether the server lets root write in the folder."))


@extend_schema_field({"type": ["number", "null"]})
class ForecastField(serializers.Field[Any, Any, "float | None", StoragePool]):
    """Read only: a number of days of a pool's forecast; null where there is none.

    Args:
        of: the forecast's attribute.
    """

    def __init__(self, of: str, **options: Any) -> None:
        super().__init__(source="*", read_only=True, **options)
        self.of = of

    def to_representation(self, pool: StoragePool) -> float | None:
        return getattr(self.context["forecasts"].get(pool.pk), self.of, None)


class PoolSerializer(Shown, serializers.ModelSerializer[StoragePool]):
    """A place that holds images. ``allocated_bytes`` and the like are sums over its images, each inode once."""

    host_name = serializers.CharField(source="host.name", read_only=True)
    overcommit_ratio = serializers.FloatField(
        read_only=True,
        allow_null=True,
        help_text=_("Virtual sizes divided by the usable capacity, without the space that is reserved for root."),
    )
    images_count = serializers.IntegerField(
        source="known_count", read_only=True, allow_null=True, help_text=_("Null until the pool is listed.")
    )
    undo_bytes = serializers.IntegerField(
        source="known_undo_bytes", read_only=True, allow_null=True, help_text=_("Null until the pool is scanned.")
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
    #: Bytes by what takes the space of a place of volumes; empty where nobody measures it.
    shares = serializers.DictField(child=serializers.IntegerField(allow_null=True), read_only=True)
    health = TextOrNull(source="volume_facts.health", allow_null=True)
    changes_refused = TextOrNull(
        source="volume_facts.not_alone",
        allow_null=True,
        help_text=_("Why its volumes are not changed from this host, as LVM or ZFS tells; null where nothing says so."),
    )
    shared_key = TextOrNull()
    mount = serializers.SerializerMethodField(help_text=_("What a mount of NFS can do; null for all else."))
    may_be_shared = serializers.BooleanField(
        source="may_be",
        read_only=True,
        help_text=_("It may be the same storage as another pool: protected as one, and counted once."),
    )
    filesystem = TextOrNull()
    leftovers = serializers.SerializerMethodField(help_text=_("Files of jobs that this dashboard does not know."))
    aside_bytes = serializers.SerializerMethodField(
        help_text=_("Bytes that images set aside occupy in the pool; null if one of them is not measured.")
    )
    days_until_full = ForecastField(
        "days",
        help_text=_(
            "Days until full at the growth of the last 30 days; null if fewer than eight days of samples "
            "exist or they show no clear growth."
        ),
    )
    days_until_full_low = ForecastField("low", help_text="Lower bound, by the fastest growth that fits the samples.")
    days_until_full_high = ForecastField(
        "high", help_text=_("Upper bound, based on the slowest growth consistent with the samples.")
    )

    class Meta:
        model = StoragePool
        fields = (
            "id", "host", "host_name", "name", "kind", "source", "path", "shared_key", "filesystem", "network",
            "mount", "may_be_shared", "changes_refused",
            "all_hosts_registered", "share_bases", "look_inside", "state", "state_detail", "owners_unknown",
            "capacity_bytes", "available_bytes", "reserved_bytes", "used_bytes", "space_seen", "metadata_bytes",
            "metadata_percent", "shares", "health", "images_count", "allocated_bytes", "virtual_bytes",
            "overcommit_ratio", "reclaimable_bytes", "undo_bytes", "leftovers", "aside_bytes", "warn_percent",
            "warn_overcommit", "warn_days", "warn_undo_percent", "days_until_full", "days_until_full_low",
            "days_until_full_high", "last_scanned",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(LeftoverSerializer(many=True))
    def get_leftovers(self, pool: StoragePool) -> Any:
        return LeftoverSerializer(known.leftovers_of(pool), many=True).data

    @extend_schema_field(MountSerializer(allow_null=True))
    def get_mount(self, pool: StoragePool) -> Any:
        return MountSerializer(pool.mount).data if pool.mount else None

    @extend_schema_field({"type": ["integer", "null"]})
    def get_aside_bytes(self, pool: StoragePool) -> int | None:
        found: dict[int, tuple[int, int | None]] = self.context["aside"]
        return found.get(pool.pk, (0, 0))[1]


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
            raise serializers.ValidationError(
                gettext("There is no such host, or you have no access to it. Give its id or slug.")
            )
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
