"""Reads and sets how a disk of one domain is driven: ``disk_settings URI``; how that went is one JSON document.

The request is JSON on standard input: ``uid``, ``disk`` (its target), ``set``: settings by name (:data:`NAMES`), empty
for what the definition shall not say; ``write`` (else it only looks) and ``until`` (seconds since the epoch: nothing is
defined later than that). Only the definition is changed: QEMU takes none of these while a guest runs.
"""

import json
import sys
import time
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.disks import ContradictedError, parse

#: Attributes of a disk's ``<driver>``.
NAMES = ("cache", "io", "discard", "detect_zeroes", "iothread")


def main(uri: str) -> None:
    helper.answer(lambda: _answer(uri, json.load(sys.stdin)))


def _answer(uri: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _set(libvirt.open(uri).lookupByUUIDString(request["uid"]), request)
    except ContradictedError as error:
        return {"contradiction": str(error)}


def _set(domain: Any, request: dict[str, Any]) -> dict[str, Any]:
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
    for name, value in request["set"].items():
        if value:
            driver.set(name, value)
        else:
            driver.attrib.pop(name, None)
    _make_threads(root, driver.get("iothread", ""))
    if request["write"] and _read(disk) != before:
        if time.time() > request["until"]:
            raise ContradictedError("libvirt took too long to respond")
        domain.connect().defineXML(ET.tostring(root, encoding="unicode"))
        disk = _disk(ET.fromstring(domain.XMLDesc(flags)), request["disk"], domain.name())  # noqa: S314 (libvirt's)
    target = disk.find("target")
    threads = [one.get("iothread", "") for one in root.iterfind("devices/disk/driver")]
    return {
        "threads": max([int(one) for one in threads if one.isdecimal()], default=0),
        "before": before, "after": _read(disk), "live": live,
        "bus": "" if target is None else target.get("bus", ""),
    }  # fmt: skip


def _disk(root: ET.Element, wanted: str, name: str) -> ET.Element:
    for disk in root.findall("devices/disk"):
        target = disk.find("target")
        if target is not None and target.get("dev") == wanted:
            return disk
    raise ContradictedError(f"{name} has no disk {wanted}")


def _read(disk: ET.Element) -> dict[str, str]:
    driver = disk.find("driver")
    settings = {} if driver is None else driver.attrib
    return {name: settings.get(name, "") for name in NAMES}


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
    main(sys.argv[1])
