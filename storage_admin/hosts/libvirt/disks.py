"""A domain's definition with one of its disks led to another file, and back again. XML in, XML out."""

import io
import re
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from storage_admin.hosts.libvirt.elements import attribute

#: Children of a driver that say something about qcow2 alone.
OF_QCOW2 = ("metadata_cache",)


@dataclass(frozen=True)
class Edit:
    """What is to become of one disk.

    Args:
        target: the disk as the guest knows it (``vda``).
        path: the file that it leads to now.
        new_path, new_format: the file that it is to lead to, and libvirt's name for its format.
        expect: the whole ``<disk>`` as it is expected to be, else empty.
        put: the whole ``<disk>`` that takes its place where it is as expected, else empty.
    """

    target: str
    path: str
    new_path: str
    new_format: str
    expect: str = ""
    put: str = ""


@dataclass(frozen=True)
class Edited:
    """One disk that was changed: its ``<disk>`` before and after."""

    target: str
    before: str
    after: str


class ContradictedError(Exception):
    """The definition is not what it was taken for; the argument says in what."""


def parse(xml: str) -> ET.Element:
    """A definition; the prefixes of its namespaces stay what they are."""
    for _, (prefix, uri) in ET.iterparse(io.StringIO(xml), events=["start-ns"]):  # noqa: S314 (libvirt wrote it)
        if prefix and not re.fullmatch(r"ns\d+", prefix):
            ET.register_namespace(prefix, uri)
    return ET.fromstring(xml)  # noqa: S314 (libvirt wrote it)


def canonical(element: ET.Element | str) -> str:
    """An element as text that is equal where its meaning is: order of attributes and blanks do not count."""
    text = element if isinstance(element, str) else ET.tostring(element, encoding="unicode")
    return ET.canonicalize(text, strip_text=True)


def edited(xml: str, edits: list[Edit], paths: dict[str, str]) -> tuple[str, list[Edited]]:
    """A definition with its disks changed.

    Args:
        paths: the file that each disk leads to, by target, as far as libvirt tells.

    Returns:
        The definition, and the disks that were changed. A disk that leads to its new file already is left as it is.

    Raises:
        ContradictedError: a disk is not there, or leads to neither file.
    """
    root = parse(xml)
    devices = root.find("devices")
    disks = {} if devices is None else {_target(disk): disk for disk in devices.findall("disk")}
    done = []
    for edit in edits:
        disk = disks.get(edit.target)
        if devices is None or disk is None:
            raise ContradictedError(f"it no longer has a disk {edit.target}")
        led_to = paths.get(edit.target, "")
        if led_to == edit.new_path:
            continue
        if led_to != edit.path:
            raise ContradictedError(f"its disk {edit.target} now uses {led_to or 'no file'}")
        before = canonical(disk)
        if edit.put and before == canonical(edit.expect):
            new = ET.fromstring(edit.put)  # noqa: S314 (libvirt wrote it, and we kept it)
            devices[list(devices).index(disk)] = new
        else:
            new = disk
            _lead_to(disk, edit.new_path, edit.new_format)
        done.append(Edited(edit.target, before, canonical(new)))
    return ET.tostring(root, encoding="unicode"), done


def _target(disk: ET.Element) -> str:
    return attribute(disk, "target", "dev") or "?"


def _lead_to(disk: ET.Element, path: str, form: str) -> None:
    source, driver = disk.find("source"), disk.find("driver")
    if source is None:
        raise ContradictedError(f"its disk {_target(disk)} has no source")
    kind, named = ("block", "dev") if path.startswith("/dev/") else ("file", "file")
    disk.set("type", kind)
    for name in ("pool", "volume", "mode", "dev", "file"):
        source.attrib.pop(name, None)
    source.set(named, path)
    if driver is None:
        driver = ET.Element("driver", {"name": "qemu"})
        disk.insert(0, driver)
    driver.set("type", form)
    if form != "qcow2":
        for child in [child for child in driver if child.tag in OF_QCOW2]:
            driver.remove(child)
    # What the image that was there stood on says nothing of the new one, which stands alone or has a header.
    for recorded in disk.findall("backingStore"):
        disk.remove(recorded)
