"""Why space that a guest frees does not become free on its host: every cause by name, of the guest and of each disk.

It looks at what is attached now, not at what a scan has seen. Sources: QEMU's ``docs/interop/qcow2`` and
``qemu-options.hx`` (discard, detect-zeroes, discard-no-unref), hw/core/machine.c (virtio-blk discards since machine
type 4.0), the kernel's fs/nfs (hole punching is an operation of NFS 4.2).
"""

import re
from collections.abc import Iterator, Mapping

from django.utils.translation import gettext as _

from images.models import Image
from images.rewrite import mount
from storage_admin.hosts.live_facts import FSTRIM, AgentNow, DeviceNow, DiskNow, GuestNow
from storage_admin.jobs.plan_and_progress import Cause

#: Buses by which no guest tells which blocks it has freed.
WITHOUT_DISCARD = frozenset({"fdc", "sd", "usb"})
#: Filesystems on which a file has no holes.
WITHOUT_HOLES = frozenset({"exfat", "fuse.exfat", "hfs", "hfsplus", "iso9660", "msdos", "udf", "ufs", "vfat"})
#: The first machine types whose virtio disks take discards (hw_compat_3_1 turns them off), and the older ones of
#: distributions: RHEL's up to 8.0 (hw_compat_rhel_8_0), Ubuntu's by the names of releases (QEMU 2.0 to 3.1).
_FIRST_MACHINE = (4, 0)
_BOARD = r"(?:pc-i440fx|pc-q35|virt|pseries|s390-ccw-virtio)-"
_MACHINE = re.compile(_BOARD + r"(\d+)\.(\d+)(?:$|[^\d])")
_OLDER = re.compile(
    _BOARD + r"(?:rhel[67]\.|rhel8\.0\.|(?:trusty|utopic|vivid|wily|xenial|yakkety|zesty|artful|bionic|cosmic|disco)\b)"
)
#: Bytes that a guest's filesystem frees at once, at least; what is freed in coarser pieces is freed less often.
_BLOCK = 4096
#: Bytes of a cluster from which on much of what a guest frees covers no whole cluster.
_LARGE_CLUSTER = 1 << 20


def causes(
    guest: GuestNow, images: Mapping[str, Image], devices: Mapping[str, DeviceNow] | None = None
) -> tuple[Cause, ...]:
    """Everything that keeps what a guest frees from becoming free.

    Args:
        images: the guest's images as the last scan saw them, by the targets of their disks.
        devices: what lies below those that are block devices, likewise.
    """
    found = [*_of_agent(guest)]
    mounted = {target for one in guest.filesystems for target in one.disks}
    # What the agent cannot lead to a disk, as a ZFS, may be on any.
    known = bool(guest.filesystems) and all(one.disks for one in guest.filesystems)
    for disk in guest.disks:
        if known and disk.target not in mounted:
            found.append(
                Cause(
                    "not_mounted",
                    _("The guest agent reports no mounted filesystem on {disk}: nothing is trimmed there.").format(
                        disk=disk.target
                    ),
                    _("Mount its filesystems in the guest, then trim."),
                    disk.target,
                )
            )
        found += _of_disk(guest, disk, images.get(disk.target))
        found += _of_device(disk, (devices or {}).get(disk.target, DeviceNow()))
    return tuple(found)


def _of_agent(guest: GuestNow) -> Iterator[Cause]:
    agent: AgentNow = guest.agent
    if not agent.configured:
        yield Cause(
            "no_agent",
            _("The guest has no guest agent channel, so nobody can ask it to trim."),
            _("Add the channel org.qemu.guest_agent.0 to the definition and install qemu-guest-agent in the guest."),
            stops=True,
        )
    elif agent.answers is False:
        yield Cause(
            "agent_silent",
            _("The guest agent does not answer: {said}.").format(said=agent.said.rstrip(".")),
            _("Install qemu-guest-agent in the guest and start its service."),
            stops=True,
        )
    elif agent.commands is not None and FSTRIM not in agent.commands:
        yield Cause(
            "agent_cannot_trim",
            _("The guest agent does not take the command {command}: it is blocked, or the agent is too old.").format(
                command=FSTRIM
            ),
            _("Allow the command in the guest's qemu-ga configuration, or run fstrim -av in the guest."),
            stops=True,
        )


def _of_disk(guest: GuestNow, disk: DiskNow, image: Image | None) -> Iterator[Cause]:
    if disk.discard != "unmap":
        yield Cause(
            "discard_ignored",
            _("{disk} has discard={mode}: QEMU drops the guest's trim requests.").format(
                disk=disk.target, mode=disk.discard or "ignore"
            ),
            _("Set discard=unmap for the disk. It takes effect when the guest is started next."),
            disk.target,
            stops=True,
        )
    yield from _of_bus(guest, disk)
    if disk.detect_zeroes != "unmap":
        yield Cause(
            "zeroes_kept",
            _("{disk} has detect_zeroes={mode}: zeros that the guest writes stay allocated. Only a trim frees.").format(
                disk=disk.target, mode=disk.detect_zeroes or "off"
            ),
            _("If you fill free space with zeros in the guest, set detect_zeroes=unmap for the disk."),
            disk.target,
        )
    if disk.keeps_clusters:
        yield Cause(
            "clusters_kept",
            _("{disk} has discard_no_unref=on: clusters that the guest frees stay allocated in the image.").format(
                disk=disk.target
            ),
            _("Remove discard_no_unref from the disk if its image need not stay preallocated."),
            disk.target,
            stops=True,
        )
    if len(disk.chain) > 1:
        yield Cause(
            "held_by_base",
            _("The image of {disk} has {count} backing files: a trim frees nothing in them.").format(
                disk=disk.target, count=len(disk.chain) - 1
            ),
            _("Flatten the chain, or merge the snapshot."),
            disk.target,
        )
    if image is not None:
        yield from _of_image(disk, image)


def _of_bus(guest: GuestNow, disk: DiskNow) -> Iterator[Cause]:
    known = _MACHINE.match(guest.machine)
    old = _OLDER.match(guest.machine) or (known and (int(known[1]), int(known[2])) < _FIRST_MACHINE)
    if disk.bus in WITHOUT_DISCARD or (disk.bus == "virtio" and old):
        why = (
            _("{disk} is a virtio disk of the machine type {machine}, which passes no trim requests.")
            if disk.bus == "virtio"
            else _("{disk} is on the bus {bus}, which passes no trim requests.")
        )
        yield Cause(
            "bus_without_discard",
            why.format(disk=disk.target, bus=disk.bus, machine=guest.machine),
            _("Use a SCSI disk (virtio-scsi), or a machine type of 4.0 or later."),
            disk.target,
            stops=True,
        )


def _of_device(disk: DiskNow, device: DeviceNow) -> Iterator[Cause]:
    if device.discards is False:
        yield Cause(
            "device_without_discard",
            _("The device below {disk} takes no discards: what the guest frees stays allocated there.").format(
                disk=disk.target
            ),
            _("Move the disk to a storage that frees what is discarded."),
            disk.target,
            stops=True,
        )
    elif device.target == "thin" and device.passes_on is False:
        yield Cause(
            "thin_pool_keeps",
            _("{disk} is a thin volume: blocks become free in its pool, which does not pass discards on below.").format(
                disk=disk.target
            ),
            _("Change the pool with lvchange --discards passdown if the storage below should get them, too."),
            disk.target,
        )
    elif device.target and device.target != "thin":
        yield Cause(
            "thick_volume",
            _("{disk} is a thick volume ({target}): its blocks belong to it, whatever the guest frees.").format(
                disk=disk.target, target=device.target
            ),
            _("Move the disk to a thin pool, or to an image file."),
            disk.target,
            stops=True,
        )


def _of_image(disk: DiskNow, image: Image) -> Iterator[Cause]:
    smallest = max(image.cluster_size or 0, _BLOCK)
    if disk.granularity is not None and disk.granularity > smallest:
        yield Cause(
            "coarse_granularity",
            _(
                "The discard granularity of {disk} is {size:,} bytes, larger than the image's {smallest:,} bytes."
            ).format(disk=disk.target, size=disk.granularity, smallest=smallest),
            _("Remove discard_granularity from the disk's definition: smaller free ranges are never trimmed."),
            disk.target,
        )
    if (image.cluster_size or 0) >= _LARGE_CLUSTER:
        yield Cause(
            "large_clusters",
            _(
                "The image of {disk} has clusters of {size:,} bytes: only a cluster that is free as a whole is freed."
            ).format(disk=disk.target, size=image.cluster_size),
            _("Convert the image to a smaller cluster size if much of its free space is fragmented."),
            disk.target,
        )
    if image.snapshots:
        yield Cause(
            "held_by_snapshot",
            _("The image of {disk} has internal snapshots ({count}): blocks that they hold are not freed.").format(
                disk=disk.target, count=len(image.snapshots)
            ),
            _("Delete the snapshots that you no longer need."),
            disk.target,
        )
    filesystem = image.pool.filesystem
    if mount.has_no_holes(image.pool):
        yield Cause(
            "nfs_without_holes",
            _("The image of {disk} is on {filesystem}, which cannot free parts of a file.").format(
                disk=disk.target, filesystem=filesystem.upper()
            ),
            _("Mount the storage by NFS 4.2 (vers=4.2), if its server can do that."),
            disk.target,
            stops=True,
        )
    elif filesystem in WITHOUT_HOLES:
        yield Cause(
            "filesystem_without_holes",
            _("The image of {disk} is on {filesystem}, whose files cannot have holes.").format(
                disk=disk.target, filesystem=filesystem
            ),
            _("Move the image to a filesystem such as ext4, XFS or ZFS."),
            disk.target,
            stops=True,
        )
