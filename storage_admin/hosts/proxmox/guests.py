"""A guest of Proxmox VE from its configuration, whichever way that was read.

A configuration has sections: what holds now, what is to hold from the next start (pending), one for each snapshot, and
what backups keep there (fleecing images). A volume may be named by any of them alone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts, SnapshotFacts
from storage_admin.hosts.names import shown
from storage_admin.hosts.proxmox import drives, limits, volumes
from storage_admin.hosts.proxmox.drives import CONTAINER, VM, Drive, volume_of
from storage_admin.hosts.proxmox.known import is_known
from storage_admin.hosts.proxmox.storages import StorageFacts

#: Kinds of sections.
NOW, PENDING, SNAPSHOT, FLEECING = "now", "pending", "snapshot", "fleecing"
#: Lines that Proxmox VE itself does not understand, or passes over: it drops them when it writes the file.
HIDDEN = "hidden"

OFF, RUNNING, PAUSED, UNKNOWN = "shut off", "running", "paused", "unknown"
#: What qemu calls the states in which it holds its images and the guest stands still.
_STANDING = frozenset(
    {"paused", "prelaunch", "suspended", "io-error", "inmigrate", "postmigrate", "finish-migrate", "restore-vm",
     "save-vm", "guest-panicked", "internal-error", "watchdog", "colo", "debug"}
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """One section of a configuration.

    Args:
        kind: :data:`NOW`, :data:`PENDING`, :data:`SNAPSHOT`, :data:`FLEECING` or :data:`HIDDEN`.
        values: by key, as they stand there.
        name: of the snapshot.
    """

    kind: str
    values: Mapping[str, str]
    name: str = ""

    @property
    def only_in(self) -> str:
        """Where a disk is said to be that no other section names."""
        return "" if self.kind == NOW else self.name or self.kind


@dataclass(frozen=True)
class ProxmoxGuest:
    """A VM or a container.

    Args:
        facts: as of a guest of any kind.
        stands_on: by the path of each snapshot that is a file, what it stands on as its header names it, by the order
            of the snapshots; empty where that is nothing, ``None`` where a change of the snapshots is not finished.
        options: what else its configuration says now, drives and description left out.
    """

    facts: GuestFacts
    node: str
    vmid: int
    stands_on: Mapping[str, str | None] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)


def has_agent(values: Mapping[str, str]) -> bool:
    """Whether a configuration says that a guest agent runs in the VM."""
    first = values.get("agent", "0").split(",")[0]
    return first.removeprefix("enabled=").lower() in ("1", "on", "yes", "true")


def state(status: str, qmp: str = "") -> str:
    """A guest's state in libvirt's words; whatever is not known to be off is not off.

    Args:
        status: ``stopped`` or ``running``.
        qmp: qemu's own word, of a VM.
    """
    if status == "stopped":
        return OFF
    if status != "running":
        return UNKNOWN
    if qmp == "shutdown":
        return "shutting down"
    return PAUSED if qmp in _STANDING else RUNNING


def build(
    kind: str,
    node: str,
    vmid: int,
    sections: Iterable[Section],
    storages: Mapping[str, StorageFacts],
    *,
    state: str = UNKNOWN,
    digest: str = "",
    unread: Iterable[str] = (),
) -> ProxmoxGuest:
    """The guest that these sections describe.

    Args:
        kind: :data:`VM` or :data:`CONTAINER`.
        sections: in any order.
        storages: by name, for the paths of volumes.
        digest: SHA-1 of the configuration file, for compare-and-set; the same by the API and by the file.
        unread: lines that were not understood.
    """
    known = tuple(sections)
    now = next((section.values for section in known if section.kind == NOW), {})
    snapshots = [section for section in known if section.kind == SNAPSHOT]
    reading = _Reading(kind, vmid, storages, [*unread])
    found = tuple(reading.disks(known))
    facts = GuestFacts(
        kind=kind,
        uid=str(vmid),
        name=shown(now.get("name" if kind == VM else "hostname") or f"{'VM' if kind == VM else 'CT'} {vmid}"),
        state=state,
        disks=found,
        lock=now.get("lock", ""),
        io_limits=limits_of(now) if kind == VM else {},
        unread=tuple(dict.fromkeys(reading.unread)),
        digest=digest,
        waiting=tuple(sorted(_waiting(now, known))),
        snapshots=tuple(map(_snapshot, snapshots)),
    )
    return ProxmoxGuest(
        facts=facts,
        node=node,
        vmid=vmid,
        stands_on=dict(_chained(now, snapshots, storages)),
        options={key: value for key, value in now.items() if not _left_out(key)},
    )


def _snapshot(section: Section) -> SnapshotFacts:
    created = section.values.get("snaptime", "")
    return SnapshotFacts(shown(section.name), int(created) if created.isdecimal() and len(created) < 12 else None)


def _waiting(now: Mapping[str, str], sections: Iterable[Section]) -> set[str]:
    """The drives that will not be what they are: another volume waits to take their place, or they go."""
    found = set[str]()
    for values in (section.values for section in sections if section.kind == PENDING):
        changed = {key for key, text in values.items() if key in now and volume_of(text) != volume_of(now[key])}
        # Of what goes whatever happens to it, Proxmox VE writes "!scsi0".
        gone = {key.lstrip("!") for key in re.split(r"[,; ]+", values.get("delete", ""))}
        found |= {key for key in changed | (gone & now.keys()) if drives.looks_like_drive(key)}
    return found


def _chained(
    now: Mapping[str, str], snapshots: list[Section], storages: Mapping[str, StorageFacts]
) -> Iterator[tuple[str, str | None]]:
    """Each snapshot that is a file, and what it stands on."""
    by_name = {section.name: section.values for section in snapshots}
    unfinished = bool(now.get("lock")) or any("snapstate" in section.values for section in snapshots)
    for section in snapshots:
        before = section.values.get("parent", "")
        for key, text in section.values.items():
            volume = volume_of(text) if drives.looks_like_drive(key) else ""
            path = volumes.snapshot_path(volume, section.name, storages)
            if path and unfinished:
                yield path, None
            elif path and volume_of(by_name.get(before, {}).get(key, "")) == volume:
                yield path, volumes.snapshot_path(volume, before, storages).rpartition("/")[2]
            elif path:
                base = volumes.base_id(volume, storages[volume.partition(":")[0]])
                yield path, f"../{base.partition(':')[2]}" if base else ""


def _left_out(key: str) -> bool:
    return drives.looks_like_drive(key) or key in ("description", "digest", "lxc")


def limits_of(values: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """The I/O limits of each drive that has some, by our names."""
    found = {}
    for key, value in sorted(values.items()):
        if drives.is_drive(key, VM) and not key.startswith("unused"):
            drive = drives.parsed(value)
            found[key] = limits.of(drive) if drive is not None else {}
    return {key: set_ones for key, set_ones in found.items() if set_ones}


@dataclass(frozen=True)
class _Reading:
    """One configuration that is being read; ``unread`` grows by what is not understood."""

    kind: str
    vmid: int
    storages: Mapping[str, StorageFacts]
    unread: list[str]

    def disks(self, sections: tuple[Section, ...]) -> Iterator[DiskFacts]:
        """What holds now first; the other sections where they name something else."""
        told: set[str] = set()
        for section in sorted(sections, key=lambda one: (one.kind != NOW, one.kind != PENDING)):
            for key, value in section.values.items():
                for disk in (*self._named(section, key, value), *self._kept_in(section, key, value)):
                    what = disk.path or disk.volume
                    if section.kind == NOW or (what and what not in told):
                        yield disk
                    told.add(what)

    def _named(self, section: Section, key: str, value: str) -> Iterator[DiskFacts]:
        if section.kind == FLEECING:
            for volume in filter(None, re.split(r"[,; \0]+", value)):
                yield self._disk(FLEECING, Drive((("", volume),)), section)
        elif section.kind == HIDDEN:
            yield self._disk(key, Drive.parse(value), section)
        elif drives.looks_like_drive(key):
            drive = drives.parsed(value)
            if drive is not None:
                yield self._disk(key, drive, section)
            else:
                self.unread.append(f"{key}: {value}")
        elif (key == "args" or not is_known(key, self.kind)) and re.search(r"[/:]", value):
            # The former go to qemu as they are; either may name any file.
            self.unread.append(f"{key}: {value}")

    def _kept_in(self, section: Section, key: str, value: str) -> Iterator[DiskFacts]:
        """The file that is a disk's snapshot, where its storage keeps snapshots as files."""
        drive = drives.parsed(value)
        if section.kind != SNAPSHOT or self.kind != VM or not drives.looks_like_drive(key) or drive is None:
            return
        volume = _as_id(drive, self.vmid)
        path = volumes.snapshot_path(volume, section.name, self.storages)
        if path and not drive.is_cdrom:
            named = volumes.snapshot_id(volume, section.name, self.storages)
            yield DiskFacts(key, self._device(drive), path, "qcow2", volume=shown(named), only_in=section.only_in)

    def _disk(self, target: str, drive: Drive, section: Section) -> DiskFacts:
        volume = _as_id(drive, self.vmid) if self.kind == VM else drive.volume
        return DiskFacts(
            target=target,
            device=self._device(drive),
            path=volumes.path(volume, self.storages),
            format=self._format(drive, volume),
            cache=drive.option("cache"),
            discard=drive.option("discard"),
            readonly=drive.flag("ro") is True or drive.is_cdrom,
            volume=shown(volume) if volumes.split(volume) is not None else "",
            only_in=section.only_in,
            in_backups=self._is_backed_up(target, drive, section),
        )

    def _is_backed_up(self, target: str, drive: Drive, section: Section) -> bool:
        """Whether vzdump takes it (``get_backup_volumes`` of PVE::QemuConfig and PVE::LXC::Config)."""
        if section.kind != NOW or target.startswith("unused") or target == "vmstate":
            return False
        if self.kind == CONTAINER:
            is_volume = volumes.split(drive.volume) is not None
            return target == "rootfs" or (is_volume and drive.flag("backup") is True)
        lacks_bios = target.startswith("efidisk") and section.values.get("bios") != "ovmf"
        return not drive.is_cdrom and drive.flag("backup") is not False and not lacks_bios

    def _device(self, drive: Drive) -> str:
        if self.kind == CONTAINER and drive.volume.startswith("/") and not drive.volume.startswith("/dev/"):
            return "bind"
        return "cdrom" if drive.is_cdrom else "disk"

    def _format(self, drive: Drive, volume: str) -> str:
        """What Proxmox VE opens it as: by the volume's name; of a path what the drive says, else raw."""
        if drive.is_empty:
            return ""
        if volumes.split(volume) is None:
            return (drive.option("format") or "raw") if self.kind == VM else ""
        __, found = volumes.find(volume, self.storages)
        return found.format if found else ""


def _as_id(drive: Drive, vmid: int) -> str:
    """A bare file name, as old configurations have it, lies in ``local`` (PVE::QemuServer, filename_to_volume_id)."""
    volume = drive.volume
    if drive.is_empty or "/" in volume or ":" in volume:
        return volume
    return f"local:iso/{volume}" if drive.is_cdrom else f"local:{vmid}/{volume}"
