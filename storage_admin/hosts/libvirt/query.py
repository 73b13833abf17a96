"""What libvirt knows of its pools and domains, as one JSON document: ``query URI``."""

from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.domains import all_domains
from storage_admin.hosts.libvirt.elements import attribute, number


def _all(connection: Any) -> dict[str, Any]:
    return {
        "pools": _pools(connection),
        "domains": [asdict(domain) for domain in all_domains(connection)],
        "about": {
            "hostname": connection.getHostname(),
            "driver": connection.getType(),
            "hypervisor_version": _version(connection.getVersion()),
            "libvirt_version": _version(connection.getLibVersion()),
        },
    }


def _version(number: int) -> str:
    """libvirt gives versions as one number: 9,002,001 is 9.2.1."""
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def _pools(connection: Any) -> list[dict[str, Any]]:
    pools = []
    for pool in connection.listAllStoragePools():
        try:
            root = ET.fromstring(pool.XMLDesc())  # noqa: S314 (libvirt wrote it)
            pools.append(_pool(root, active=bool(pool.isActive())))
        except libvirt.libvirtError:
            continue  # removed since it was listed
    return sorted(pools, key=lambda pool: str(pool["name"]))  # libvirt's own order is another one each time


def _pool(root: ET.Element, *, active: bool) -> dict[str, Any]:
    return {
        "name": root.findtext("name") or "",
        "type": root.get("type", ""),
        "path": root.findtext("target/path") or "",
        "active": active,
        "capacity_bytes": (number(root, "capacity") or 0) if active else None,
        "available_bytes": (number(root, "available") or 0) if active else None,
        "source_host": attribute(root, "source/host", "name"),
        "source_folder": attribute(root, "source/dir", "path"),
        "source_format": attribute(root, "source/format", "type"),
        "source_name": root.findtext("source/name") or "",
    }


if __name__ == "__main__":
    helper.tell(_all)
