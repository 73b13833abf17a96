"""The states of a host's domains, as one JSON document: ``states URI``.

It is what is asked every few seconds while jobs wait for guests: one call to libvirt, however many domains there are.
"""

import sys
from typing import Any

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.domains import STATES


def main(uri: str) -> None:
    helper.answer(lambda: {"states": states(libvirt.openReadOnly(uri))})


def states(connection: Any) -> dict[str, str]:
    """Every domain's state by its uid."""
    told = connection.getAllDomainStats(libvirt.VIR_DOMAIN_STATS_STATE)
    return {domain.UUIDString(): STATES.get(stats.get("state.state", -1), "unknown") for domain, stats in told}


if __name__ == "__main__":
    main(sys.argv[1])
