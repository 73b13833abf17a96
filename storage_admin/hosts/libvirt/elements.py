"""What libvirt's documents say at a place. Pure: no libvirt, no host."""

from xml.etree import ElementTree as ET


def attribute(root: ET.Element, place: str, name: str) -> str:
    """An attribute of the first element at a place; empty where there is none."""
    found = root.find(place)
    return "" if found is None else found.get(name, "")


def number(root: ET.Element, place: str) -> int | None:
    """The number that an element holds; ``None`` where there is none."""
    text = (root.findtext(place) or "").strip()
    return int(text) if text.isdecimal() else None


def file_of(source: ET.Element | None) -> str:
    """The file or device that a ``<source>`` names; empty where it names none."""
    return "" if source is None else source.get("file") or source.get("dev") or ""


def disk_of(root: ET.Element, target: str) -> ET.Element | None:
    """The disk of a definition that has that target."""
    return next((one for one in root.findall("devices/disk") if attribute(one, "target", "dev") == target), None)
