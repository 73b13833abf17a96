"""Why space that a guest frees does not become free on its host: every cause by name, of the guest and of each disk.

It looks at what is attached now, not at what a scan has seen. Sources: QEMU's ``docs/interop/qcow2`` and
``qemu-options.hx`` (discard, detect-zeroes, discard-no-unref), hw/core/machine.c (virtio-blk discards since machine
type 4.0), the kernel's fs/nfs (hole punching is an operation of NFS 4.2).
"""

import re
from collections.abc import Iterator, Mapping

from django.utils.translation import gettext_lazy as _

from images.models import Image
from images.rewrite import mount
from storage_admin.hosts.live_facts import FSTRIM, AgentNow, DeviceNow, DiskNow, GuestNow
from storage_admin.jobs.plan_and_progress import Cause
from storage_admin.words import Translatable

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


#: Each cause, by its code: what is so, and what to do about it.
_WORDS: dict[str, tuple[Translatable, Translatable]] = {
    "no_agent": (
        _("The guest has no guest agent channel, so nobody can ask it to trim."),
        _("Add the channel org.qemu.guest_agent.0 to the definition and install qemu-guest-agent in the guest."),
    ),
    "agent_silent": (
        _("The guest agent does not answer: {said}."),
        _("Install qemu-guest-agent in the guest and start its service."),
    ),
    "agent_cannot_trim": (
        _("The guest agent does not take the command {command}: it is blocked, or the agent is too old."),
        _("Allow the command in the guest's qemu-ga configuration, or run fstrim -av in the guest."),
    ),
    "not_mounted": (
        _("The guest agent reports no mounted filesystem on {disk}: nothing is trimmed there."),
        _("Mount its filesystems in the guest, then trim."),
    ),
    "discard_ignored": (
        _("{disk} has discard={mode}: QEMU drops the guest's trim requests."),
        _("Set discard=unmap for the disk. It takes effect when the guest is started next."),
    ),
    "bus_without_discard": (
        _("{disk} is on the bus {bus}, which passes no trim requests."),
        _("Use a SCSI disk (virtio-scsi), or a machine type of 4.0 or later."),
    ),
    "zeroes_kept": (
        _("{disk} has detect_zeroes={mode}: zeros that the guest writes stay allocated. Only a trim frees."),
        _("If you fill free space with zeros in the guest, set detect_zeroes=unmap for the disk."),
    ),
    "clusters_kept": (
        _("{disk} has discard_no_unref=on: clusters that the guest frees stay allocated in the image."),
        _("Remove discard_no_unref from the disk if its image need not stay preallocated."),
    ),
    "held_by_base": (
        _("The image of {disk} has {count} backing files: a trim frees nothing in them."),
        _("Flatten the chain, or merge the snapshot."),
    ),
    "device_without_discard": (
        _("The device below {disk} takes no discards: what the guest frees stays allocated there."),
        _("Move the disk to a storage that frees what is discarded."),
    ),
    "thin_pool_keeps": (
        _("{disk} is a thin volume: blocks become free in its pool, which does not pass discards on below."),
        _("Change the pool with lvchange --discards passdown if the storage below should get them, too."),
    ),
    "thick_volume": (
        _("{disk} is a thick volume ({target}): its blocks belong to it, whatever the guest frees."),
        _("Move the disk to a thin pool, or to an image file."),
    ),
    "coarse_granularity": (
        _("The discard granularity of {disk} is {size:,} bytes, larger than the image's {smallest:,} bytes."),
        _("Remove discard_granularity from the disk's definition: smaller free ranges are never trimmed."),
    ),
    "large_clusters": (
        _("The image of {disk} has clusters of {size:,} bytes: only a cluster that is free as a whole is freed."),
        _("Convert the image to a smaller cluster size if much of its free space is fragmented."),
    ),
    "held_by_snapshot": (
        _("The image of {disk} has internal snapshots ({count}): blocks that they hold are not freed."),
        _("Delete the snapshots that you no longer need."),
    ),
    "nfs_without_holes": (
        _("The image of {disk} is on {filesystem}, which cannot free parts of a file."),
        _("Mount the storage by NFS 4.2 (vers=4.2), if its server can do that."),
    ),
    "filesystem_without_holes": (
        _("The image of {disk} is on {filesystem}, whose files cannot have holes."),
        _("Move the image to a filesystem such as ext4, XFS or ZFS."),
    ),
}
#: What is so of a virtio disk, on the bus that is none for it.
_OLD_MACHINE = _("{disk} is a virtio disk of the machine type {machine}, which passes no trim requests.")
#: Those by which less becomes free; by the others nothing does.
_LESSENS = frozenset(
    {
        "not_mounted", "zeroes_kept", "held_by_base", "thin_pool_keeps", "coarse_granularity", "large_clusters",
        "held_by_snapshot",
    }
)  # fmt: skip


def causes(
    guest: GuestNow, images: Mapping[str, Image], devices: Mapping[str, DeviceNow] | None = None
) -> tuple[Cause, ...]:
    """Everything that keeps what a guest frees from becoming free.

    Args:
        images: the guest's images as the last scan saw them, by the targets of their disks.
        devices: what lies below those that are block devices, likewise.
    """
    found = [*_of_agent(guest.agent)]
    mounted = {target for one in guest.filesystems for target in one.disks}
    # What the agent cannot lead to a disk, as a ZFS, may be on any.
    known = bool(guest.filesystems) and all(one.disks for one in guest.filesystems)
    for disk in guest.disks:
        if known and disk.target not in mounted:
            found.append(_cause("not_mounted", disk))
        found += _of_disk(guest, disk, images.get(disk.target))
        found += _of_device(disk, (devices or {}).get(disk.target, DeviceNow()))
    return tuple(found)


def _cause(code: str, disk: DiskNow | None = None, *, so: Translatable = "", **values: object) -> Cause:
    """A cause in words.

    Args:
        disk: that it is about; ``None`` for the whole guest.
        so: what is so, where that is put in other words.
    """
    (sentence, mend), target = _WORDS[code], "" if disk is None else disk.target
    told = str(so or sentence).format(disk=target, **values)
    return Cause(code, told, str(mend), target, stops=code not in _LESSENS)


def _of_agent(agent: AgentNow) -> Iterator[Cause]:
    if not agent.configured:
        yield _cause("no_agent")
    elif agent.answers is False:
        yield _cause("agent_silent", said=agent.said.rstrip("."))
    elif agent.commands is not None and FSTRIM not in agent.commands:
        yield _cause("agent_cannot_trim", command=FSTRIM)


def _of_disk(guest: GuestNow, disk: DiskNow, image: Image | None) -> Iterator[Cause]:
    if disk.discard != "unmap":
        yield _cause("discard_ignored", disk, mode=disk.discard or "ignore")
    known = _MACHINE.match(guest.machine)
    old = _OLDER.match(guest.machine) or (known and (int(known[1]), int(known[2])) < _FIRST_MACHINE)
    if disk.bus == "virtio" and old:
        yield _cause("bus_without_discard", disk, so=_OLD_MACHINE, machine=guest.machine)
    elif disk.bus in WITHOUT_DISCARD:
        yield _cause("bus_without_discard", disk, bus=disk.bus)
    if disk.detect_zeroes != "unmap":
        yield _cause("zeroes_kept", disk, mode=disk.detect_zeroes or "off")
    if disk.keeps_clusters:
        yield _cause("clusters_kept", disk)
    if len(disk.chain) > 1:
        yield _cause("held_by_base", disk, count=len(disk.chain) - 1)
    if image is not None:
        yield from _of_image(disk, image)


def _of_device(disk: DiskNow, device: DeviceNow) -> Iterator[Cause]:
    if device.discards is False:
        yield _cause("device_without_discard", disk)
    elif device.target == "thin" and device.passes_on is False:
        yield _cause("thin_pool_keeps", disk)
    elif device.target and device.target != "thin":
        yield _cause("thick_volume", disk, target=device.target)


def _of_image(disk: DiskNow, image: Image) -> Iterator[Cause]:
    smallest = max(image.cluster_size or 0, _BLOCK)
    if disk.granularity is not None and disk.granularity > smallest:
        yield _cause("coarse_granularity", disk, size=disk.granularity, smallest=smallest)
    if (image.cluster_size or 0) >= _LARGE_CLUSTER:
        yield _cause("large_clusters", disk, size=image.cluster_size)
    if image.snapshots:
        yield _cause("held_by_snapshot", disk, count=len(image.snapshots))
    filesystem = image.pool.filesystem
    if mount.has_no_holes(image.pool):
        yield _cause("nfs_without_holes", disk, filesystem=filesystem.upper())
    elif filesystem in WITHOUT_HOLES:
        yield _cause("filesystem_without_holes", disk, filesystem=filesystem)
