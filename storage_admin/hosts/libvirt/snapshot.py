"""Snapshots of one domain: ``snapshot URI``.

The request: ``uid``, and ``do``: ``list``; ``create`` (``name``, ``description``, ``disks``: targets, ``quiesce``), a
snapshot of the disks alone whose overlays libvirt names, of a domain that is off an internal one; ``delete`` (``name``,
and ``created``, by which another one of that name is told from it), by which libvirt merges what was written since;
``revert`` (the same), of a domain that is off.
"""

from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from storage_admin.hosts.libvirt import helper, sections
from storage_admin.hosts.libvirt.disks import ContradictedError
from storage_admin.hosts.libvirt.elements import file_of


def _list(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    domain = connection.lookupByUUIDString(request["uid"])
    return {"snapshots": list(_snapshots(domain)), "libvirt": connection.getLibVersion()}


def _snapshots(domain: Any) -> Iterator[dict[str, Any]]:
    for snapshot in domain.listAllSnapshots():
        root = ET.fromstring(snapshot.getXMLDesc())  # noqa: S314 (libvirt wrote it)
        yield {
            "name": snapshot.getName(), "created": sections.created(root),
            "description": root.findtext("description") or "", "state": root.findtext("state") or "",
            "parent": root.findtext("parent/name") or "", "current": bool(snapshot.isCurrent()),
            "disks": list(_disks(root)),
        }  # fmt: skip


def _disks(root: ET.Element) -> Iterator[dict[str, str]]:
    """What a snapshot has of each disk: ``external``, the overlay that was made; ``internal``, the image it is in."""
    then = {
        target.get("dev"): disk.find("source")
        for disk in root.findall("domain/devices/disk")
        if (target := disk.find("target")) is not None
    }
    for disk in root.findall("disks/disk"):
        if (how := disk.get("snapshot", "")) in {"external", "internal"}:
            source = disk.find("source") if how == "external" else then.get(disk.get("name"))
            yield {"target": disk.get("name", ""), "how": how, "path": file_of(source)}


def _create(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    domain = connection.lookupByUUIDString(request["uid"])
    active = bool(domain.isActive())
    root = ET.Element("domainsnapshot")
    ET.SubElement(root, "name").text = request["name"]
    ET.SubElement(root, "description").text = request["description"]
    disks = ET.SubElement(root, "disks")
    definition = ET.fromstring(domain.XMLDesc())  # noqa: S314 (libvirt wrote it)
    for target in definition.findall("devices/disk/target"):
        how = "no" if target.get("dev") not in request["disks"] else "external" if active else "internal"
        ET.SubElement(disks, "disk", {"name": target.get("dev", ""), "snapshot": how})
    flags = libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
    flags |= libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY if active else 0
    flags |= libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_QUIESCE if active and request["quiesce"] else 0
    domain.snapshotCreateXML(ET.tostring(root, encoding="unicode"), flags)
    return _list(connection, request)


def _delete(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    domain = connection.lookupByUUIDString(request["uid"])
    try:
        snapshot = domain.snapshotLookupByName(request["name"])
        if _is_meant(snapshot, request):
            snapshot.delete()
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN_SNAPSHOT:
            raise
    return _list(connection, request)


def _revert(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    domain = connection.lookupByUUIDString(request["uid"])
    if domain.isActive():
        raise ContradictedError(f"{domain.name()} is running")
    if domain.hasManagedSaveImage():  # its memory would not fit to the disks any more
        raise ContradictedError(f"{domain.name()} was saved with its memory (virsh managedsave)")
    snapshot = domain.snapshotLookupByName(request["name"])
    if not _is_meant(snapshot, request):
        raise ContradictedError(f"the snapshot {request['name']} of {domain.name()} is a later one of that name")
    domain.revertToSnapshot(snapshot, 0)
    return _list(connection, request)


def _is_meant(snapshot: Any, request: dict[str, Any]) -> bool:
    created = sections.created(ET.fromstring(snapshot.getXMLDesc()))  # noqa: S314 (libvirt wrote it)
    return request["created"] in {None, created}


_DOES = {"list": _list, "create": _create, "delete": _delete, "revert": _revert}


if __name__ == "__main__":
    helper.answer(lambda connection, request: _DOES[request["do"]](connection, request))
