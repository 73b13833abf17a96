"""The states of a host's domains, as one JSON document: ``states URI``.

It is what is asked every few seconds while jobs wait for guests: one call to libvirt, however many domains there are.
"""

from typing import Any

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.domains import STATES

#: Why a disk cannot be written or read.
ERRORS = {libvirt.VIR_DOMAIN_DISK_ERROR_NO_SPACE: "no space left"}


def _all(connection: Any) -> dict[str, Any]:
    told = connection.getAllDomainStats(libvirt.VIR_DOMAIN_STATS_STATE)
    return {"states": _states(told), "stopped": [_stopped(domain) for domain, stats in told if _is_stopped(stats)]}


def states(connection: Any) -> dict[str, str]:
    """Every domain's state by its uid."""
    return _states(connection.getAllDomainStats(libvirt.VIR_DOMAIN_STATS_STATE))


def _states(told: Any) -> dict[str, str]:
    return {domain.UUIDString(): STATES.get(stats.get("state.state", -1), "unknown") for domain, stats in told}


def _is_stopped(stats: dict[str, Any]) -> bool:
    """Whether QEMU has paused a domain because of an I/O error."""
    found = stats.get("state.state"), stats.get("state.reason")
    return found == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR)


def _stopped(domain: Any) -> dict[str, Any]:
    try:
        errors = domain.diskErrors() or {}
    except libvirt.libvirtError:
        errors = {}  # it goes on, or has ended, in this moment
    why = {disk: ERRORS.get(code, "I/O error") for disk, code in errors.items()}
    return {"uid": domain.UUIDString(), "name": domain.name(), "disks": why}


if __name__ == "__main__":
    helper.tell(_all)
