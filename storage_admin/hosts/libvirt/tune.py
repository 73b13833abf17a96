"""Sets, and reads again, what a domain may take of the disks: ``tune URI``.

The request: ``uid``, ``weight`` and ``limits`` (by disk target) or null, ``live`` and
``config`` (where to set them), ``until`` (seconds since the epoch: nothing is set later than that). The running domain
comes first: what its host cannot do never gets into the definition, with which the guest would not start any more.
"""

from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.disks import ContradictedError
from storage_admin.hosts.libvirt.elements import attribute
from storage_admin.hosts.libvirt.limits import merged

LIVE, CONFIG = libvirt.VIR_DOMAIN_AFFECT_LIVE, libvirt.VIR_DOMAIN_AFFECT_CONFIG
_FLAGS = {"live": LIVE, "config": CONFIG}
_DEFINITION = {"live": 0, "config": libvirt.VIR_DOMAIN_XML_INACTIVE}


def _tune(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    domain = connection.lookupByUUIDString(request["uid"])
    scopes = [scope for scope, there in (("live", domain.isActive()), ("config", domain.isPersistent())) if there]
    chosen = [scope for scope in scopes if request[scope]]
    before = {scope: _read(domain, scope) for scope in scopes}
    can_weigh = _can_weigh(connection)
    _check(domain.name(), request, chosen, before)
    if request["weight"] is not None:
        _check_weights(domain.name(), before, can_weigh)
    failed = _set(domain, request, chosen, before)
    return {
        "before": before,
        "now": {scope: _read(domain, scope) for scope in scopes},
        "set": chosen,
        "failed": failed,
        "can_weigh": can_weigh,
    }


def _check(name: str, request: dict[str, Any], chosen: list[str], before: dict[str, dict[str, Any]]) -> None:
    """Everything that can be seen before anything is set."""
    if not chosen:
        raise ContradictedError(f"{name} is not running" if request["live"] else f"{name} has no definition to change")
    for scope in chosen:
        missing = sorted(set(request["limits"] or {}) - before[scope]["disks"].keys())
        if missing:
            where = "now" if scope == "live" else "at its next start"
            raise ContradictedError(f"{name} has no disk {', '.join(missing)} {where}")
    helper.refuse_late(request)


def _check_weights(name: str, before: dict[str, dict[str, Any]], can_weigh: bool | None) -> None:
    why = before["live"]["cannot_weigh"] if "live" in before else ""
    if why or can_weigh is False:
        raise ContradictedError(
            f"the host of {name} does not support I/O weights{f' ({why})' if why else ''}: with a weight in its "
            "definition, the guest would no longer start"
        )


def _set(domain: Any, request: dict[str, Any], chosen: list[str], before: dict[str, dict[str, Any]]) -> str:
    """Sets it; what libvirt says against it where it stops, else nothing."""
    for scope in chosen:
        flags = _FLAGS[scope]
        try:
            if request["weight"] is not None:
                domain.setBlkioParameters({"weight": request["weight"]}, flags)
            for target, limits in (request["limits"] or {}).items():
                parameters = merged(before[scope]["disks"][target], limits)
                if parameters:
                    domain.setBlockIoTune(target, parameters, flags)
        except libvirt.libvirtError as error:
            return str(error)
    return ""


def _read(domain: Any, scope: str) -> dict[str, Any]:
    """What is set of a running domain, or in its definition."""
    flags, weight, cannot_weigh = _FLAGS[scope], 0, ""
    root = ET.fromstring(domain.XMLDesc(_DEFINITION[scope]))  # noqa: S314 (libvirt wrote it)
    try:
        weight = int(domain.blkioParameters(flags).get("weight", 0))
    except libvirt.libvirtError as error:
        cannot_weigh = str(error)
    if root.find("blkiotune/weight") is None:
        weight = 0  # a running guest without one has the kernel's default
    disks: dict[str, dict[str, int | str]] = {}
    for disk in root.findall("devices/disk"):
        name = attribute(disk, "target", "dev")
        try:
            disks[name] = {key: value for key, value in domain.blockIoTune(name, flags).items() if value}
        except libvirt.libvirtError:
            continue  # an empty drive of a running guest has nothing to be limited
    return {"weight": weight or None, "cannot_weigh": cannot_weigh, "disks": disks}


def _can_weigh(connection: Any) -> bool | None:
    """Whether the host weighs its guests, by one that runs; ``None`` where none does."""
    for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
        try:
            domain.blkioParameters(LIVE)
        except libvirt.libvirtError:
            if helper.runs(domain):
                return False
        else:
            return True
    return None


if __name__ == "__main__":
    helper.answer(_tune)
