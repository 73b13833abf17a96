"""Domains of libvirt as facts, from their definitions. Run by the programs that ask libvirt."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from storage_admin.hosts.guest_facts import DiskFacts, GuestFacts, SnapshotFacts
from storage_admin.hosts.libvirt import sections
from storage_admin.hosts.libvirt.elements import attribute, file_of, number

STATES = {
    libvirt.VIR_DOMAIN_NOSTATE: "no state",
    libvirt.VIR_DOMAIN_RUNNING: "running",
    libvirt.VIR_DOMAIN_BLOCKED: "running",
    libvirt.VIR_DOMAIN_PAUSED: "paused",
    libvirt.VIR_DOMAIN_SHUTDOWN: "shutting down",
    libvirt.VIR_DOMAIN_SHUTOFF: "shut off",
    libvirt.VIR_DOMAIN_CRASHED: "crashed",
    libvirt.VIR_DOMAIN_PMSUSPENDED: "suspended",
}

#: Pool types whose volumes are files in one folder, and the kinds that we call them.
FOLDER_POOLS = {"dir": "dir", "fs": "dir", "netfs": "nfs"}
#: Put behind the target of a disk that a running domain has from its next start on.
NEXT_START = " (next start)"
#: What a definition limits of a disk, for each of reading, writing and both.
LIMITS = tuple(f"{way}_{unit}_sec" for unit in ("bytes", "iops") for way in ("read", "write", "total"))


def all_domains(connection: Any) -> list[GuestFacts]:
    """Every domain, running or not.

    Raises:
        libvirt.libvirtError: libvirt does not answer.
    """
    found = []
    for domain in connection.listAllDomains():
        try:
            found.append(_domain(connection, domain))
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise
    return found


def _domain(connection: Any, domain: Any) -> GuestFacts:
    root = ET.fromstring(domain.XMLDesc())  # noqa: S314 (libvirt wrote it)
    unread: list[str] = []
    disks = {disk.target: disk for disk in _disks(connection, root, unread)}
    if domain.isPersistent() and domain.isActive():
        # What the guest will have at its next start belongs to it as well.
        later = ET.fromstring(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))  # noqa: S314 (libvirt wrote it)
        for disk in _disks(connection, later, unread):
            if disk.path not in {known.path for known in disks.values()}:
                name = disk.target + NEXT_START
                disks[name] = replace(disk, target=name, only_in="pending")
    recording = _recording_chains(domain)
    snapshots: list[SnapshotFacts] = []
    checkpoints: dict[str, list[str]] = {}
    known = {disk.path for disk in disks.values()}
    beside = sections.beside_its_disks(domain, root, known, unread, snapshots, checkpoints)
    return GuestFacts(
        kind="domain", uid=domain.UUIDString(), name=domain.name(), state=STATES.get(domain.state()[0], "unknown"),
        disks=tuple(
            replace(disk, records_chain=disk.target.removesuffix(NEXT_START) in recording)
            for disk in (*disks.values(), *beside)
        ),
        io_weight=number(root, "blkiotune/weight") or None, io_limits=_limits(root),
        unread=tuple(dict.fromkeys(unread)), snapshots=tuple(snapshots),
        checkpoints=None if any(line.startswith("its checkpoints ") for line in unread) else checkpoints,
    )  # fmt: skip


def _limits(root: ET.Element) -> dict[str, dict[str, int]]:
    """What limits the disks; a limit of 0 is none."""
    found = {}
    for disk in root.findall("devices/disk"):
        limits = {name: value for name in LIMITS if (value := number(disk, f"iotune/{name}"))}
        if limits:
            found[_target(disk)] = limits
    return found


def _recording_chains(domain: Any) -> set[str]:
    """The targets of disks whose definition itself says what their images stand on, instead of leaving it to headers.

    Of a running domain libvirt shows what it has found out; only the definition counts.
    """
    if not domain.isPersistent():
        return set()
    root = ET.fromstring(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))  # noqa: S314 (libvirt wrote it)
    return {_target(disk) for disk in root.findall("devices/disk") if disk.find("backingStore/source") is not None}


def _disks(connection: Any, root: ET.Element, unread: list[str]) -> Iterator[DiskFacts]:
    """The disks of a definition; what they name and nobody can tell where it is goes to ``unread``."""
    for disk in root.findall("devices/disk"):
        driver, source, kind = disk.find("driver"), disk.find("source"), disk.get("type", "")
        settings = {} if driver is None else driver.attrib
        path, volume = _source(connection, kind, source)
        if kind == "volume" and source is not None and not path:
            unread.append(f"{_target(disk)}: volume {source.get('volume')} of the pool {source.get('pool')}")
        yield DiskFacts(
            target=_target(disk), device=disk.get("device", "disk"), path=path, volume=volume,
            format=settings.get("type", ""), cache=settings.get("cache", ""), discard=settings.get("discard", ""),
            readonly=disk.find("readonly") is not None,
        )  # fmt: skip


def _target(disk: ET.Element) -> str:
    return attribute(disk, "target", "dev") or "?"


def disk_paths(connection: Any, xml: str) -> dict[str, str]:
    """The file that each disk of a definition leads to, by the disk's target; empty where it is no file of ours."""
    root = ET.fromstring(xml)  # noqa: S314 (libvirt wrote it)
    return {disk.target: disk.path for disk in _disks(connection, root, [])}


def chain_of(disk: ET.Element, first: str) -> list[str]:
    """The paths that a running domain's disk goes through, from above; empty for what is no path.

    Args:
        first: of the disk's own image.
    """
    found, below = [first], disk.find("backingStore")
    while below is not None and (source := below.find("source")) is not None:
        found.append(file_of(source))
        below = below.find("backingStore")
    return found


def keeps_names(domain: Any) -> str:
    """What libvirt keeps beside a definition that names its images, and what to do about it; empty for nothing."""
    name = domain.name()
    if domain.hasManagedSaveImage():
        return f"{name} was saved with its memory (virsh managedsave); start it and shut it down first"
    if domain.snapshotNum():
        return f"{name} has snapshots in libvirt, which name the file; delete them first"
    if domain.listAllCheckpoints():
        return f"{name} has checkpoints in libvirt, which name the file; delete them first"
    return ""


def backs_up(domain: Any) -> bool:
    """Whether libvirt makes a backup of a domain now."""
    try:
        domain.backupGetXMLDesc()
    except libvirt.libvirtError:
        return False
    return True


def _source(connection: Any, kind: str, source: ET.Element | None) -> tuple[str, str]:
    """The path that a disk leads to, and what its storage calls it."""
    if source is None:
        return "", ""
    if kind == "volume":
        pool, volume = source.get("pool", ""), source.get("volume", "")
        return _volume_path(connection, pool, volume), f"{pool}/{volume}"
    if kind == "network":
        return "", f"{source.get('protocol', '')}:{source.get('name', '')}"
    return file_of(source), ""


def _volume_path(connection: Any, pool_name: str, name: str) -> str:
    """A volume's path. Of a pool that is not active no volumes are listed, but those of a folder lie in it."""
    try:
        pool = connection.storagePoolLookupByName(pool_name)
        if pool.isActive():
            return str(pool.storageVolLookupByName(name).path())
        root = ET.fromstring(pool.XMLDesc())  # noqa: S314 (libvirt wrote it)
    except libvirt.libvirtError:
        return ""
    folder = root.findtext("target/path") if root.get("type") in FOLDER_POOLS else None
    return f"{folder.rstrip('/')}/{name}" if folder and "/" not in name else ""
