"""One domain at this moment, and what its guest agent is asked: ``guest URI``.

The request: ``uid``, and ``do``: ``look``, ``look with agent``, ``trim``, or ``grow`` (with
``disk`` and ``size_bytes``). The agent is asked by ``virDomainQemuAgentCommand``, as libvirt's own calls say neither
what it can do nor what it has trimmed; libvirt notes that in the domain's log (``custom-ga-command``), and nothing else
comes of it.
"""

import json
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as ET

import libvirt
import libvirt_qemu

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.domains import STATES, backs_up, chain_of, disk_paths
from storage_admin.hosts.libvirt.elements import attribute

#: Seconds that an agent may take to say what it can do, and to trim.
_ASK_SECONDS, _TRIM_SECONDS = 3, 3600
_AGENT = "org.qemu.guest_agent.0"
_QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"


def _answer(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    domain, wish = connection.lookupByUUIDString(request["uid"]), request["do"]
    if wish == "grow":
        return _grow(domain, request["disk"], request["size_bytes"])
    return _trim(domain) if wish == "trim" else look(domain, agent=wish == "look with agent")


def look(domain: Any, *, agent: bool = False) -> dict[str, Any]:
    """A domain as it is, as :class:`live_facts.GuestNow` has it."""
    xml = domain.XMLDesc()
    root = ET.fromstring(xml)  # noqa: S314 (libvirt wrote it)
    told = _agent(domain, root, ask=agent)
    paths = disk_paths(domain.connect(), xml)
    return {
        "state": STATES.get(domain.state()[0], "unknown"),
        "machine": attribute(root, "os/type", "machine"),
        "agent": told,
        "disks": [_disk(domain, root, disk, paths) for disk in root.findall("devices/disk") if _is_written(disk)],
        "filesystems": list(_filesystems(domain)) if told["answers"] else [],
        "snapshots": domain.snapshotListNames(),
        "checkpoints": [one.getName() for one in domain.listAllCheckpoints()],
        "backs_up": backs_up(domain),
        "saved": bool(domain.hasManagedSaveImage()),
        "run": max(domain.ID(), 0),
        "cpu_ns": domain.info()[4],
    }


def _is_written(disk: ET.Element) -> bool:
    return disk.get("device", "disk") == "disk" and disk.find("readonly") is None


def _agent(domain: Any, root: ET.Element, *, ask: bool) -> dict[str, Any]:
    line = root.find(f"devices/channel/target[@name='{_AGENT}']")
    found: dict[str, Any] = {"configured": line is not None, "answers": None, "commands": None, "said": ""}
    if line is None or not ask or not domain.isActive():
        return found
    if line.get("state") == "disconnected":
        return found | {"answers": False, "said": "it is not connected"}
    try:
        told = _ask(domain, "guest-info", _ASK_SECONDS)
        commands = [str(one["name"]) for one in told["supported_commands"] if one["enabled"] is True]
    except libvirt.libvirtError as error:
        return found | {"answers": False, "said": str(error)}
    except (ValueError, TypeError, KeyError):  # it says what the guest wants
        return found | {"answers": False, "said": "it sent an unexpected response"}
    return found | {"answers": True, "commands": commands}


def _ask(domain: Any, command: str, seconds: int) -> Any:
    return json.loads(libvirt_qemu.qemuAgentCommand(domain, json.dumps({"execute": command}), seconds, 0))["return"]


def _disk(domain: Any, root: ET.Element, disk: ET.Element, paths: dict[str, str]) -> dict[str, Any]:
    name, driver = attribute(disk, "target", "dev"), disk.find("driver")
    settings = {} if driver is None else driver.attrib
    try:
        virtual, allocated, _physical = domain.blockInfo(name)
    except libvirt.libvirtError:
        virtual = allocated = None
    if settings.get("type") == "raw":
        allocated = None  # libvirt gives its length, whatever it occupies
    return {
        "target": name, "bus": attribute(disk, "target", "bus"), "kind": disk.get("type", ""),
        "format": settings.get("type", ""), "chain": chain_of(disk, paths.get(name, "")),
        "discard": settings.get("discard", ""), "detect_zeroes": settings.get("detect_zeroes", ""),
        "keeps_clusters": settings.get("discard_no_unref") == "on",
        "granularity": _granularity(root, disk), "allocated_bytes": allocated,
        "virtual_bytes": virtual,
    }  # fmt: skip


def _granularity(root: ET.Element, disk: ET.Element) -> int | None:
    """In bytes; before libvirt 10.2, which has an element for it, as an override of QEMU's own property."""
    text, alias = attribute(disk, "blockio", "discard_granularity"), attribute(disk, "alias", "name")
    for device in root.iterfind(f"{_QEMU}override/{_QEMU}device"):
        if alias and device.get("alias") == alias:
            for one in device.iterfind(f"{_QEMU}frontend/{_QEMU}property[@name='discard_granularity']"):
                text = one.get("value", "")
    return int(text) if text.isdecimal() else None


def _filesystems(domain: Any) -> Iterator[dict[str, Any]]:
    try:
        told = domain.guestInfo(libvirt.VIR_DOMAIN_GUEST_INFO_FILESYSTEM)
    except libvirt.libvirtError:
        return  # its agent does not tell
    for number in range(told.get("fs.count", 0)):
        one = f"fs.{number}."
        disks = [told.get(f"{one}disk.{disk}.alias") for disk in range(told.get(f"{one}disk.count", 0))]
        yield {
            "path": told.get(f"{one}mountpoint", ""), "type": told.get(f"{one}fstype", ""),
            "used_bytes": told.get(f"{one}used-bytes"), "total_bytes": told.get(f"{one}total-bytes"),
            "disks": [alias for alias in disks if alias],
        }  # fmt: skip


def _grow(domain: Any, disk: str, size: int) -> dict[str, Any]:
    now = domain.blockInfo(disk)[0]
    if now > size:
        return {"error": f"{disk} has {now} bytes already"}
    if now < size:
        domain.blockResize(disk, size, libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES)
    return {"virtual_bytes": domain.blockInfo(disk)[0]}


def _trim(domain: Any) -> dict[str, Any]:
    return {"trimmed": _ask(domain, "guest-fstrim", _TRIM_SECONDS)["paths"]}


if __name__ == "__main__":
    helper.answer(_answer)
