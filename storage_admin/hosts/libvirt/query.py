"""What libvirt knows of its pools and domains, as one JSON document: ``query URI``."""

from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.domains import all_domains


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
    host, folder = root.find("source/host"), root.find("source/dir")
    form = root.find("source/format")
    return {
        "name": root.findtext("name") or "",
        "type": root.get("type", ""),
        "path": root.findtext("target/path") or "",
        "active": active,
        "capacity_bytes": _number(root, "capacity") if active else None,
        "available_bytes": _number(root, "available") if active else None,
        "source_host": "" if host is None else host.get("name", ""),
        "source_folder": "" if folder is None else folder.get("path", ""),
        "source_format": "" if form is None else form.get("type", ""),
        "source_name": root.findtext("source/name") or "",
    }


def _number(root: ET.Element, place: str) -> int:
    return int((root.findtext(place) or "0").strip())


if __name__ == "__main__":
    helper.tell(_all)
