"""Starts one domain of this machine; how that went is one JSON document on standard output.

``python -m storage_admin.hosts.libvirt_start UUID``: the only place that opens libvirt for writing. It starts a domain
and does nothing else. A process of its own, like ``libvirt_query``.
"""

import json
import sys

import libvirt

from storage_admin.hosts.libvirt_query import URI


def main(uid: str) -> None:
    libvirt.registerErrorHandler(lambda *_: None, None)  # its default prints to standard error
    try:
        json.dump({"outcome": _start(uid)}, sys.stdout)
    except libvirt.libvirtError as error:
        json.dump({"error": str(error)}, sys.stdout)


def _start(uid: str) -> str:
    domain = libvirt.open(URI).lookupByUUIDString(uid)
    try:
        domain.create()
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID and domain.isActive():
            return "running already"
        raise
    return "started"


if __name__ == "__main__":
    main(sys.argv[1])
