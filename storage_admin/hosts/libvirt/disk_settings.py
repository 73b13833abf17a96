"""Reads and sets how a disk of one domain is driven: ``disk_settings URI``.

The request: ``uid``, ``disk`` (its target), ``set``: settings by name (:data:`NAMES`), empty
for what the definition shall not say, and ``bus``; ``write`` (else it only looks) and ``until`` (seconds since the
epoch: nothing is defined later than that). Only the definition is changed: QEMU takes none of these while a guest runs.
"""

import string
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.disks import ContradictedError, parse
from storage_admin.hosts.libvirt.elements import disk_of

#: Attributes of a disk's ``<driver>``.
NAMES = ("cache", "io", "discard", "detect_zeroes", "iothread")
#: How targets are called at each bus that a disk is moved to.
PREFIXES = {"virtio": "vd", "scsi": "sd", "sata": "sd", "usb": "sd", "ide": "hd"}
#: What only virtio knows of a driver, and what it does not know of a disk.
_OF_VIRTIO = (
    "iothread", "queues", "queue_size", "iommu", "ats", "packed", "page_per_vq", "ioeventfd", "event_idx",
)  # fmt: skip
_NOT_OF_VIRTIO = ("wwn", "vendor", "product")


def _set(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    domain = connection.lookupByUUIDString(request["uid"])
    # Else a password of its screen would be gone from the definition.
    flags = libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE
    root = parse(domain.XMLDesc(flags))
    disk = _disk(root, request["disk"], domain.name())
    before, live = _read(disk), None
    if domain.isActive():
        live = _read(_disk(ET.fromstring(domain.XMLDesc()), request["disk"], domain.name()))  # noqa: S314 (libvirt's)
    driver = disk.find("driver")
    if driver is None:
        driver = ET.Element("driver", {"name": "qemu"})
        disk.insert(0, driver)
    wanted = dict(request["set"])
    bus = wanted.pop("bus", "")
    for name, value in wanted.items():
        if value:
            driver.set(name, value)
        else:
            driver.attrib.pop(name, None)
    first = _first(root)
    if bus and bus != before["bus"]:
        _move(root, disk, driver, bus)
    name = _target(disk).get("dev", "")
    _make_threads(root, driver.get("iothread", ""))
    if request["write"] and _read(disk) != before:
        helper.refuse_late(request)
        connection.defineXML(ET.tostring(root, encoding="unicode"))
        disk = _disk(ET.fromstring(domain.XMLDesc(flags)), name, domain.name())  # noqa: S314 (libvirt's)
    threads = [one.get("iothread", "") for one in root.iterfind("devices/disk/driver")]
    return {
        "threads": max([int(one) for one in threads if one.isdecimal()], default=0),
        "before": before, "after": _read(disk), "live": live, "disk": name,
        "kept": bool(domain.snapshotNum() or domain.hasManagedSaveImage()), "boots_another": _first(root) != first,
    }  # fmt: skip


def _disk(root: ET.Element, wanted: str, name: str) -> ET.Element:
    disk = disk_of(root, wanted)
    if disk is None:
        raise ContradictedError(f"{name} has no disk {wanted}")
    return disk


def _read(disk: ET.Element) -> dict[str, str]:
    driver = disk.find("driver")
    settings = {} if driver is None else driver.attrib
    return {"bus": _target(disk).get("bus", "")} | {name: settings.get(name, "") for name in NAMES}


def _target(disk: ET.Element) -> ET.Element:
    found = disk.find("target")
    if found is None:
        raise ContradictedError("the disk has no target")
    return found


def _move(root: ET.Element, disk: ET.Element, driver: ET.Element, bus: str) -> None:
    """Gives a disk a free name at another bus, and an address there: libvirt's choice, or the next of virtio-scsi."""
    if disk.get("device", "disk") != "disk":
        raise ContradictedError("only disks get another bus, and this is none")
    target = _target(disk)
    taken = {_target(one).get("dev") for one in root.findall("devices/disk") if one is not disk}
    names = [PREFIXES[bus] + letter for letter in string.ascii_lowercase]
    free = next((name for name in names if name not in taken), None)
    if free is None:
        raise ContradictedError(f"no name is free at the bus {bus}")
    target.attrib.update(dev=free, bus=bus)
    if bus == "virtio":
        for name in ("rotation_rate", "removable"):
            target.attrib.pop(name, None)
        for element in [one for one in disk if one.tag in _NOT_OF_VIRTIO]:
            disk.remove(element)
    else:
        disk.attrib.pop("model", None)
        for name in _OF_VIRTIO:
            driver.attrib.pop(name, None)
    for old in disk.findall("address"):
        disk.remove(old)
    if bus == "scsi":
        disk.append(_address(root))


def _first(root: ET.Element) -> str | None:
    """What the firmware boots first, as libvirt sorts disks (virDomainDiskInsert): by their names at each bus.

    Returns:
        ``None`` where devices have a boot order of their own.
    """
    if root.find("devices/*/boot") is not None:
        return None
    order: list[tuple[str, int, ET.Element]] = []
    for disk in root.findall("devices/disk"):
        bus, number = _target(disk).get("bus", ""), 0
        for letter in _target(disk).get("dev", "")[2:]:
            number = number * 26 + ord(letter) - ord("a") + 1
        place = None
        for at in range(len(order) - 1, -1, -1):
            if order[at][0] == bus and order[at][1] > number:
                place = at
            elif order[at][0] == bus and place is None:
                place = at + 1
        order.insert(len(order) if place is None else place, (bus, number, disk))
    first = next((disk for *_, disk in order if disk.get("device", "disk") == "disk"), None)
    source = None if first is None else first.find("source")
    return "" if source is None else str(sorted(source.attrib.items()))


def _address(root: ET.Element) -> ET.Element:
    """The next free place at a virtio-scsi controller, which is made where there is none."""
    devices = root.find("devices")
    assert devices is not None  # noqa: S101 - the disk is in it
    known = devices.findall("controller[@type='scsi']")
    found = next((one.get("index", "0") for one in known if one.get("model") == "virtio-scsi"), None)
    if found is None:
        found = str(max([int(one.get("index", "0")) for one in known], default=-1) + 1)
        ET.SubElement(devices, "controller", {"type": "scsi", "index": found, "model": "virtio-scsi"})
    used = {one.get("unit") for one in devices.findall(f"*/address[@type='drive'][@controller='{found}']")}
    unit = next(str(number) for number in range(1 << 14) if str(number) not in used)
    return ET.Element(
        "address", {"type": "drive", "controller": found, "bus": "0", "target": "0", "unit": unit}
    )  # fmt: skip


def _make_threads(root: ET.Element, wanted: str) -> None:
    """As many I/O threads as the highest number that a disk has; fewer are never made of what there is."""
    if not wanted.isdecimal():
        return
    threads = root.find("iothreads")
    if threads is None:
        threads = ET.Element("iothreads")
        threads.text = "0"
        vcpu = root.find("vcpu")
        root.insert(list(root).index(vcpu) + 1 if vcpu is not None else 0, threads)
    threads.text = str(max(int(threads.text or 0), int(wanted)))


if __name__ == "__main__":
    helper.answer(_set)
