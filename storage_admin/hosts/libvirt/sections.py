"""Files that a domain of libvirt needs beside its disks: of its snapshots, checkpoints and saved state, its NVRAM.

None of them is told by the definition's disks, so that an image which only they name would look as if nobody needed it.
Run by the programs that ask libvirt.
"""

from collections.abc import Collection, Iterator
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from storage_admin.hosts.guest_facts import DiskFacts, SnapshotFacts
from storage_admin.hosts.libvirt.elements import attribute, file_of

#: Where libvirt's documents name files: (the element's place, its attribute, what the disk is called).
_DISKS = ("disks/disk", "domain/devices/disk", "inactiveDomain/devices/disk", "devices/disk")
#: The namespace of arguments that go to qemu as they are (libvirt, "qemu:commandline").
_QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"
#: What a driver that keeps no such things answers, and what one that was removed meanwhile does.
_NONE = frozenset({
    libvirt.VIR_ERR_NO_SUPPORT, libvirt.VIR_ERR_CONFIG_UNSUPPORTED, libvirt.VIR_ERR_OPERATION_INVALID,
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED, libvirt.VIR_ERR_NO_DOMAIN_SNAPSHOT,
    libvirt.VIR_ERR_NO_DOMAIN_CHECKPOINT, libvirt.VIR_ERR_NO_DOMAIN,
})  # fmt: skip


def beside_its_disks(
    domain: Any,
    root: ET.Element,
    known: Collection[str],
    unread: list[str],
    snapshots: list[SnapshotFacts],
    checkpoints: dict[str, list[str]],
) -> list[DiskFacts]:
    """The files that only these sections name, each once.

    Args:
        root: the domain's definition.
        known: paths of its disks.
        snapshots: gets those that libvirt keeps.
        checkpoints: gets the names of the bitmaps that libvirt's checkpoints have, by disk.
        unread: gets what names files in a way that nobody can tell, and what libvirt does not tell.

    Raises:
        libvirt.libvirtError: libvirt does not answer.
    """
    told, found = set(known), []
    for disk in (*_firmware(root), *_filesystems(root), *_sections(domain, unread, snapshots, checkpoints)):
        if disk.path and disk.path not in told:
            told.add(disk.path)
            found.append(disk)
    unread += _arguments(root)
    return found


def _firmware(root: ET.Element) -> Iterator[DiskFacts]:
    nvram = root.find("os/nvram")
    if nvram is not None:
        path = (nvram.text or "").strip() or attribute(nvram, "source", "file")
        yield DiskFacts("nvram", device="nvram", path=path)


def _filesystems(root: ET.Element) -> Iterator[DiskFacts]:
    """Of containers (LXC), whose root is an image file."""
    for number, one in enumerate(root.findall("devices/filesystem")):
        source = one.find("source")
        if source is not None and one.get("type") in {"file", "block"}:
            yield DiskFacts(f"fs{number}", device="fs", path=file_of(source))


def _sections(
    domain: Any, unread: list[str], snapshots: list[SnapshotFacts], checkpoints: dict[str, list[str]]
) -> Iterator[DiskFacts]:
    for what, list_them in (("snapshot", "listAllSnapshots"), ("checkpoint", "listAllCheckpoints")):
        try:
            for one in getattr(domain, list_them)():
                name, xml = one.getName(), one.getXMLDesc()
                if what == "snapshot":
                    snapshots.append(_snapshot(name, xml))
                else:
                    _note_bitmaps(name, xml, checkpoints)
                yield from _named(xml, f"the {what} {name}")
        except libvirt.libvirtError as error:
            _note(error, f"its {what}s", unread)
    try:
        if domain.hasManagedSaveImage():
            yield from _named(domain.managedSaveGetXMLDesc(), "the saved state")
    except libvirt.libvirtError as error:
        _note(error, "its saved state", unread)


def _note_bitmaps(checkpoint: str, xml: str, checkpoints: dict[str, list[str]]) -> None:
    root = ET.fromstring(xml)  # noqa: S314 (libvirt wrote it)
    for disk in root.findall("disks/disk[@checkpoint='bitmap']"):
        checkpoints.setdefault(disk.get("name", ""), []).append(disk.get("bitmap") or checkpoint)


def created(root: ET.Element) -> int | None:
    """When a snapshot was made, in seconds since 1970; ``None`` where it does not tell."""
    text = root.findtext("creationTime") or ""
    return int(text) if text.isdecimal() and len(text) < 12 else None


def _snapshot(name: str, xml: str) -> SnapshotFacts:
    root = ET.fromstring(xml)  # noqa: S314 (libvirt wrote it)
    external = root.findall("disks/disk[@snapshot='external']")
    files = [source.get("file", "") for disk in external if (source := disk.find("source")) is not None]
    return SnapshotFacts(name[:200], created(root), bool(external), tuple(filter(None, files)))


def _note(error: libvirt.libvirtError, what: str, unread: list[str]) -> None:
    if error.get_error_code() not in _NONE:
        unread.append(f"{what} could not be read: {error.get_error_message()}")


def _named(xml: str, section: str) -> Iterator[DiskFacts]:
    root = ET.fromstring(xml)  # noqa: S314 (libvirt wrote it)
    for place in _DISKS:
        for disk in root.findall(place):
            name = disk.get("name", "") if disk.find("target") is None else attribute(disk, "target", "dev")
            path, form = file_of(disk.find("source")), attribute(disk, "driver", "type")
            yield DiskFacts(name or "disk", device="disk", path=path, format=form, only_in=section[:100])
    memory = root.find("memory")
    if memory is not None:
        yield DiskFacts("memory", device="memory", path=memory.get("file", ""), only_in=section[:100])


def _arguments(root: ET.Element) -> list[str]:
    """Arguments that go to qemu as they are, and may name any file."""
    given = [one.get("value", "") for one in root.findall(f"{_QEMU}commandline/{_QEMU}arg")]
    return [f"qemu:arg {value}"[:1000] for value in given if "/" in value]
