"""What libvirt knows, as one JSON document on standard output.

It runs as a process of its own (``python -m storage_admin.hosts.libvirt_query URI``), because a libvirtd that hangs
would hang the thread that asks it, and a thread cannot be given up.
"""

import json
import sys
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

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

#: Pool types whose volumes are files in one folder.
FOLDER_POOLS = {"dir": "dir", "fs": "dir", "netfs": "nfs"}


def main(uri: str) -> None:
    libvirt.registerErrorHandler(lambda *_: None, None)  # its default prints to standard error
    try:
        connection = libvirt.openReadOnly(uri)
        answer: dict[str, Any] = {"pools": _pools(connection), "domains": _domains(connection)}
    except libvirt.libvirtError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


def _pools(connection: Any) -> list[dict[str, Any]]:
    pools = []
    for pool in connection.listAllStoragePools():
        try:
            root = ET.fromstring(pool.XMLDesc())  # noqa: S314 (libvirt wrote it)
        except libvirt.libvirtError:
            continue  # removed since it was listed
        kind = FOLDER_POOLS.get(root.get("type", ""))
        path = root.findtext("target/path")
        if kind and path:
            pools.append({"name": pool.name(), "kind": kind, "path": path, "active": bool(pool.isActive())})
    return pools


def _domains(connection: Any) -> list[dict[str, Any]]:
    domains = []
    for domain in connection.listAllDomains():
        try:
            domains.append(_domain(connection, domain))
        except libvirt.libvirtError as error:
            if error.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
                raise
    return domains


def _domain(connection: Any, domain: Any) -> dict[str, Any]:
    disks = {disk["target"]: disk for disk in _disks(connection, domain.XMLDesc())}
    if domain.isPersistent() and domain.isActive():
        # What the guest will have at its next start belongs to it as well.
        for disk in _disks(connection, domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)):
            if disk["path"] not in {known["path"] for known in disks.values()}:
                disks[disk["target"] + " (next start)"] = disk | {"target": disk["target"] + " (next start)"}
    recording = _recording_chains(domain)
    for disk in disks.values():
        disk["records_chain"] = disk["target"].removesuffix(" (next start)") in recording
    return {
        "uid": domain.UUIDString(),
        "name": domain.name(),
        "state": STATES.get(domain.state()[0], "unknown"),
        "disks": list(disks.values()),
    }


def _recording_chains(domain: Any) -> set[str]:
    """The targets of disks whose definition itself says what their images stand on, instead of leaving it to headers.

    Of a running domain libvirt shows what it has found out; only the definition counts.
    """
    if not domain.isPersistent():
        return set()
    root = ET.fromstring(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))  # noqa: S314 (libvirt wrote it)
    return {
        target.get("dev", "?")
        for disk in root.findall("devices/disk")
        if disk.find("backingStore/source") is not None and (target := disk.find("target")) is not None
    }


def _disks(connection: Any, xml: str) -> list[dict[str, Any]]:
    root = ET.fromstring(xml)  # noqa: S314 (libvirt wrote it)
    disks = []
    for disk in root.findall("devices/disk"):
        driver, target, source = disk.find("driver"), disk.find("target"), disk.find("source")
        disks.append(
            {
                "target": target.get("dev", "?") if target is not None else "?",
                "device": disk.get("device", "disk"),
                "path": _source_path(connection, disk.get("type", ""), source),
                "format": driver.get("type", "") if driver is not None else "",
                "cache": driver.get("cache", "") if driver is not None else "",
                "discard": driver.get("discard", "") if driver is not None else "",
                "readonly": disk.find("readonly") is not None,
            }
        )
    return disks


def disk_paths(connection: Any, xml: str) -> dict[str, str]:
    """The file that each disk of a definition leads to, by the disk's target; empty where it is no file of ours."""
    return {disk["target"]: disk["path"] for disk in _disks(connection, xml)}


def _source_path(connection: Any, kind: str, source: Any) -> str:
    if source is None:
        return ""
    if kind == "volume":
        try:
            pool = connection.storagePoolLookupByName(source.get("pool", ""))
            return str(pool.storageVolLookupByName(source.get("volume", "")).path())
        except libvirt.libvirtError:
            return ""
    return str(source.get("file") or source.get("dev") or "")


if __name__ == "__main__":
    main(sys.argv[1])
