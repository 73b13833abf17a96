"""The states of a host's domains, as one JSON document on standard output.

It is what is asked every few seconds while jobs wait for guests: one call to libvirt, however many domains there are.
It runs as a process of its own (``python -m storage_admin.hosts.libvirt_states URI``), like ``libvirt_query``.
"""

import json
import sys
from typing import Any

import libvirt

from storage_admin.hosts.libvirt_query import STATES


def main(uri: str) -> None:
    libvirt.registerErrorHandler(lambda *_: None, None)  # its default prints to standard error
    try:
        connection = libvirt.openReadOnly(uri)
        told = connection.getAllDomainStats(libvirt.VIR_DOMAIN_STATS_STATE)
        answer: dict[str, Any] = {
            "states": {
                domain.UUIDString(): STATES.get(stats.get("state.state", -1), "unknown") for domain, stats in told
            }
        }
    except libvirt.libvirtError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
