"""Guests of every kind, as a hypervisor tells of them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DiskFacts:
    """A disk as its guest's definition says.

    Args:
        target: how the guest, or its definition, calls it: ``vda``, ``scsi0``, ``rootfs``.
        device: ``disk``, ``cdrom``, ...
        path: absolute path of the file or device; empty for an empty drive, a network disk, and what is not known.
        format: that the definition declares; empty where it declares none.
        records_chain: the definition names the images that its own stands on.
        volume: the storage's own name for it, such as a Proxmox volume id.
        only_in: the snapshot, or ``pending``, where only that section of the definition names it.
        in_backups: whether backups of its guest have it; ``None`` where nobody tells.
    """

    target: str
    device: str
    path: str
    format: str = ""
    cache: str = ""
    discard: str = ""
    readonly: bool = False
    records_chain: bool = False
    volume: str = ""
    only_in: str = ""
    in_backups: bool | None = None


@dataclass(frozen=True)
class SnapshotFacts:
    """A snapshot that a guest's manager keeps.

    Args:
        created: seconds since the epoch; ``None`` where nobody tells.
        external: it has files of its own, into which the guest writes.
        files: paths of these, as its manager names them.
    """

    name: str
    created: int | None = None
    external: bool = False
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class GuestFacts:
    """A guest.

    Args:
        kind: ``domain``, ``vm`` or ``container``.
        state: in libvirt's words (running, paused, shut off, ...), or ``unknown``.
        lock: why its manager has it locked; empty where it is not.
        io_priority: 0 to 7, of a container; ``None`` where it is not set.
        io_weight: share of the disks' time; ``None`` where it is not set.
        io_limits: by disk target: ``read_bytes_sec``, ``write_bytes_sec``, ``read_iops_sec``, ``write_iops_sec``.
        unread: lines of its definition that were not understood: what they may name is no orphan.
        digest: of its configuration, for compare-and-set; empty where its manager has none.
        snapshots: that its manager keeps.
        checkpoints: names of the bitmaps that its manager's checkpoints have, by disk target; ``None`` where nobody
            tells.
        waiting: targets of disks that are taken away, or replaced by another volume, when it is started next.
    """

    kind: str
    uid: str
    name: str
    state: str
    disks: tuple[DiskFacts, ...] = ()
    lock: str = ""
    io_priority: int | None = None
    io_weight: int | None = None
    io_limits: dict[str, dict[str, int]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    digest: str = ""
    waiting: tuple[str, ...] = ()
    snapshots: tuple[SnapshotFacts, ...] = ()
    checkpoints: dict[str, list[str]] | None = None
