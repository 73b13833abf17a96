"""The shape of one image, of ``images/{id}/chain/`` and of ``overview/``, as the schema says it."""

from collections.abc import Iterable
from typing import Any

from django.utils.translation import gettext_lazy as _
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from images.models import Image, ImageSample
from images.serializers import GuestRefSerializer, ImageSerializer
from storage_admin.jobs.serializers import JobSerializer, RefusalSerializer


class NodeSerializer(serializers.Serializer[Any]):
    """One image of the tree."""

    id = serializers.IntegerField()
    name = serializers.CharField()
    path = serializers.CharField()
    format = serializers.CharField()
    virtual_size = serializers.IntegerField(allow_null=True)
    allocated_size = serializers.IntegerField(allow_null=True)
    chain_depth = serializers.IntegerField()
    state = serializers.CharField()
    in_use = serializers.BooleanField(allow_null=True)
    guests = GuestRefSerializer(many=True)
    needed_by = serializers.ListField(
        child=serializers.JSONField(),
        help_text=_("Ids of its direct overlays, then names of the guests that use it."),
    )
    freed_if_deleted = serializers.IntegerField(
        allow_null=True,
        help_text="Bytes that deleting the image would free: its allocated size, less what other files are known to "
        "share, if nothing uses it; 0 if something uses it or it has another hard link; null if its users are unknown.",
    )


class EdgeSerializer(serializers.Serializer[Any]):
    """``from`` is the id of the overlay, ``to`` that of its base."""

    to = serializers.IntegerField()

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        # "from" is a word of Python and cannot be an attribute.
        return {"from": serializers.IntegerField(), **super().get_fields()}


class ChainSerializer(serializers.Serializer[Any]):
    """A whole tree, bases first."""

    nodes = NodeSerializer(many=True)
    edges = EdgeSerializer(many=True)
    allocated_size = serializers.IntegerField(
        allow_null=True,
        help_text="Bytes that all files of the tree occupy, each inode counted once; null if a size is not known.",
    )
    virtual_size = serializers.IntegerField(
        allow_null=True,
        help_text="Sum of the virtual sizes of all images of the tree, each inode counted once; null if a size is "
        "not known.",
    )


class TotalsSerializer(serializers.Serializer[Any]):
    """Sums over all hosts: each filesystem once, each inode once. Null means not known."""

    hosts_count = serializers.IntegerField()
    pools_count = serializers.IntegerField()
    pools_counted = serializers.IntegerField(help_text=_("Pools whose capacity is known. Only these are counted."))
    images_count = serializers.IntegerField()
    measured_count = serializers.IntegerField(help_text=_("Images whose physical size is known."))
    sized_count = serializers.IntegerField(help_text=_("Images whose virtual size is known."))
    capacity_bytes = serializers.IntegerField(allow_null=True)
    used_bytes = serializers.IntegerField(allow_null=True)
    available_bytes = serializers.IntegerField(allow_null=True)
    allocated_bytes = serializers.IntegerField(allow_null=True)
    virtual_bytes = serializers.IntegerField(allow_null=True)
    overcommit_ratio = serializers.FloatField(allow_null=True)
    analyzed_count = serializers.IntegerField(help_text=_("Number of images that the reclaimable_* sums cover."))
    reclaimable_bytes = serializers.IntegerField(allow_null=True)
    reclaimable_low = serializers.IntegerField(allow_null=True)
    reclaimable_high = serializers.IntegerField(allow_null=True)


class PoolRowSerializer(serializers.Serializer[Any]):
    """One pool."""

    id = serializers.IntegerField()
    host_id = serializers.IntegerField()
    host = serializers.CharField()
    name = serializers.CharField()
    kind = serializers.CharField()
    path = serializers.CharField()
    state = serializers.CharField()
    capacity_bytes = serializers.IntegerField(allow_null=True)
    available_bytes = serializers.IntegerField(allow_null=True)
    used_bytes = serializers.IntegerField(allow_null=True)
    used_percent = serializers.FloatField(allow_null=True)
    images_count = serializers.IntegerField(allow_null=True)
    allocated_bytes = serializers.IntegerField(allow_null=True)
    virtual_bytes = serializers.IntegerField(allow_null=True)
    overcommit_ratio = serializers.FloatField(allow_null=True)
    reclaimable_bytes = serializers.IntegerField(allow_null=True)
    undo_bytes = serializers.IntegerField(allow_null=True)
    warn_percent = serializers.IntegerField()
    over_threshold = serializers.BooleanField(allow_null=True)
    days_until_full = serializers.FloatField(allow_null=True)
    days_until_full_low = serializers.FloatField(allow_null=True)
    days_until_full_high = serializers.FloatField(allow_null=True)
    last_scanned = serializers.DateTimeField(allow_null=True)


class CandidateSerializer(serializers.Serializer[Any]):
    """An image with reclaimable space."""

    id = serializers.IntegerField()
    name = serializers.CharField()
    host_id = serializers.IntegerField()
    host = serializers.CharField()
    pool_id = serializers.IntegerField()
    pool = serializers.CharField()
    format = serializers.CharField()
    virtual_size = serializers.IntegerField(allow_null=True)
    allocated_size = serializers.IntegerField(allow_null=True)
    reclaimable_bytes = serializers.IntegerField()
    reclaimable_low = serializers.IntegerField(allow_null=True)
    reclaimable_high = serializers.IntegerField(allow_null=True)
    method = serializers.CharField(allow_blank=True)
    in_use = serializers.BooleanField(allow_null=True)
    guests = GuestRefSerializer(many=True)


class ConcernItemSerializer(serializers.Serializer[Any]):
    """One thing that is wrong."""

    kind = serializers.ChoiceField(choices=("image", "host", "pool", "job"))
    id = serializers.IntegerField()
    name = serializers.CharField()
    detail = serializers.CharField(allow_blank=True)


class ConcernSerializer(serializers.Serializer[Any]):
    """One way in which things are wrong: how many, and the first few."""

    code = serializers.CharField()
    title = serializers.CharField()
    severity = serializers.ChoiceField(choices=("danger", "warning"))
    count = serializers.IntegerField()
    items = ConcernItemSerializer(many=True)


class WonSerializer(serializers.Serializer[Any]):
    """Bytes that jobs freed; bytes held by undo copies are not freed yet."""

    freed_bytes = serializers.IntegerField(help_text=_("Freed minus consumed."))
    held_bytes = serializers.IntegerField()
    jobs_count = serializers.IntegerField()
    won_bytes = serializers.IntegerField()
    taken_bytes = serializers.IntegerField(help_text=_("By jobs that consumed space."))
    copies_bytes = serializers.IntegerField(help_text=_("Of these, by new files that were asked for."))


class OverviewSerializer(serializers.Serializer[Any]):
    """The first page."""

    at = serializers.DateTimeField()
    totals = TotalsSerializer()
    pools = PoolRowSerializer(many=True)
    win_back_now = CandidateSerializer(many=True)
    needs_a_look = ConcernSerializer(many=True)
    at_work = JobSerializer(many=True)
    queued_count = serializers.IntegerField()
    won_so_far = WonSerializer()


class GuestSnapshotPartSerializer(serializers.Serializer[Any]):
    """What a snapshot has of one disk."""

    target = serializers.CharField()
    how = serializers.ChoiceField(choices=("external", "internal"))
    path = serializers.CharField(
        allow_blank=True, help_text=_("The overlay that was created; if internal, the image that holds it.")
    )


class GuestSnapshotSerializer(serializers.Serializer[Any]):
    """A snapshot of a guest."""

    name = serializers.CharField()
    created = serializers.DateTimeField(allow_null=True, help_text=_("Null where nobody tells."))
    description = serializers.CharField(allow_blank=True)
    state = serializers.CharField(help_text=_("State of the guest then; disk-snapshot if its memory was not saved."))
    parent = serializers.CharField(allow_blank=True)  # type: ignore[assignment]  # the name is also the base class's
    current = serializers.BooleanField()
    disks = GuestSnapshotPartSerializer(many=True)


class GuestSnapshotsSerializer(serializers.Serializer[Any]):
    """The snapshots of a guest."""

    snapshots = GuestSnapshotSerializer(many=True)
    unknown = serializers.CharField(allow_null=True, help_text=_("Why they are not known; null if they are."))


class BitmapSerializer(serializers.Serializer[Any]):
    """A persistent dirty bitmap of a qcow2 image, as backup tools keep them."""

    name = serializers.CharField()
    granularity = serializers.IntegerField(allow_null=True, help_text=_("Bytes that one bit stands for."))
    in_use = serializers.BooleanField(allow_null=True, help_text=_("Not closed cleanly: it cannot be relied on."))
    enabled = serializers.BooleanField(allow_null=True, help_text=_("Writes are marked in it."))
    owner = serializers.CharField(help_text=_("The tool that gives bitmaps such names, empty where none is known."))
    checkpoint_of = serializers.CharField(
        help_text=_("The guest of which a checkpoint of libvirt has this bitmap, empty where none has.")
    )
    stale = serializers.BooleanField(
        help_text=_("No tool can use it any more: it was not closed cleanly, or its checkpoint in libvirt is gone.")
    )


class HeaderSerializer(serializers.Serializer[Any]):
    """What an image's header says; null where its format does not say it, or nobody has read it."""

    compat = serializers.CharField(allow_null=True)
    refcount_bits = serializers.IntegerField(allow_null=True)
    lazy_refcounts = serializers.BooleanField(allow_null=True)
    extended_l2 = serializers.BooleanField(allow_null=True)
    subformat = serializers.CharField(allow_null=True)
    encryption = serializers.CharField(allow_null=True)
    key_slots = serializers.ListField(
        child=serializers.IntegerField(), allow_null=True, help_text=_("Numbers of the LUKS key slots that are in use.")
    )
    dirty = serializers.BooleanField(allow_null=True)
    corrupt = serializers.BooleanField(allow_null=True)
    data_file = serializers.CharField(allow_null=True, help_text=_("File that holds the data, as the header names it."))
    data_file_raw = serializers.BooleanField(allow_null=True)
    bitmaps = BitmapSerializer(many=True)


class CheckedFilesystemSerializer(serializers.Serializer[Any]):
    """What a check of a filesystem found."""

    device = serializers.CharField()
    type = serializers.CharField()
    state = serializers.ChoiceField(choices=["sound", "damaged", "unknown"])
    why = serializers.CharField()


class BackingCandidateSerializer(serializers.Serializer[Any]):
    """An image that may be the missing backing file of another one."""

    image = serializers.IntegerField(source="image.pk")
    path = serializers.CharField(source="image.path")
    proven = serializers.BooleanField()
    why = serializers.ListField(child=serializers.CharField(), help_text=_("What speaks for it."))
    filesystems = CheckedFilesystemSerializer(
        many=True, help_text=_("Of the image on this file, as the last job has found them; empty if none has checked.")
    )
    against = RefusalSerializer(allow_null=True, help_text=_("Why not even an admin may take it."))
    danger = serializers.CharField(help_text=_("How dangerous it is to take it; empty where it is proven."))


class OneImageSerializer(ImageSerializer):
    """A disk image with all that its header says."""

    header = serializers.SerializerMethodField(help_text=_("What the header says; null if it was not read."))

    class Meta(ImageSerializer.Meta):
        fields = (*ImageSerializer.Meta.fields, "header")  # type: ignore[assignment]
        read_only_fields = fields  # type: ignore[assignment]

    @extend_schema_field(HeaderSerializer(allow_null=True))
    def get_header(self, image: Image) -> dict[str, Any] | None:
        if not image.header_known:
            return None
        names: Iterable[str] = HeaderSerializer().get_fields()
        return {name: image.from_header(name) for name in names} | {"bitmaps": image.bitmaps}


class GuestFilesystemSerializer(serializers.Serializer[Any]):
    """A filesystem on an image, as its own words have it."""

    device = serializers.CharField(help_text=_("Name in the virtual machine that looks, for `device`."))
    type = serializers.CharField()
    size = serializers.IntegerField(allow_null=True, help_text=_("Bytes; null if it cannot be mounted."))
    free = serializers.IntegerField(allow_null=True)
    why = serializers.CharField(help_text=_("Why it cannot be mounted; empty for what is no filesystem."))


class GuestSystemSerializer(serializers.Serializer[Any]):
    """An operating system on an image."""

    filesystem = serializers.CharField(source="root", help_text=_("The filesystem that it is on."))
    type = serializers.CharField()
    product = serializers.CharField()
    distribution = serializers.CharField()
    architecture = serializers.CharField()
    hostname = serializers.CharField()


class GuestFileSerializer(serializers.Serializer[Any]):
    """An entry of a folder."""

    name = serializers.CharField()
    kind = serializers.CharField(help_text="file, folder, link, device, pipe, socket or other")
    mode = serializers.CharField(help_text=_("Permissions in octal."))
    size = serializers.IntegerField()
    mtime = serializers.DateTimeField(allow_null=True)
    uid = serializers.IntegerField()
    gid = serializers.IntegerField()


class FilesSerializer(serializers.Serializer[Any]):
    """Filesystems and systems, or the entries of a folder; the others are left out."""

    filesystems = GuestFilesystemSerializer(many=True, required=False)
    systems = GuestSystemSerializer(many=True, required=False)
    entries = GuestFileSerializer(many=True, required=False, help_text=_("The first 5000, by name."))
    count = serializers.IntegerField(required=False, help_text=_("How many entries the folder has."))


class AttachedSerializer(serializers.Serializer[Any]):
    """A block device of a host that is an image."""

    host = serializers.IntegerField(source="host.pk")
    host_name = serializers.CharField(source="host.name")
    device = serializers.CharField(help_text=_("Its name, such as nbd0."))
    path = serializers.CharField(help_text=_("Path of the device on the host."))
    file = serializers.CharField(help_text=_("The file that its process has open."))
    size_bytes = serializers.IntegerField(source="size")
    writable = serializers.BooleanField()
    image = serializers.IntegerField(source="image.pk", default=None, help_text=_("Null if no listed image is it."))
    at = serializers.DateTimeField(allow_null=True, help_text=_("Null if no job has attached it."))
    by = serializers.CharField(help_text=_("Who requested it; empty if no job has attached it."))
    job = serializers.IntegerField(source="job.pk", default=None)


class SampleSerializer(serializers.ModelSerializer[ImageSample]):
    """How large an image was, in bytes."""

    class Meta:
        model = ImageSample
        fields = ("at", "virtual_size", "allocated_size", "file_size")
        read_only_fields = fields
