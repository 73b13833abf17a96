"""Starts one domain; how that went is one JSON document on standard output.

``python -m storage_admin.hosts.libvirt_start URI UUID``. It starts a domain and does nothing else. A
process of its own, like ``libvirt_query``.
"""

import json
import sys

import libvirt


def main(uri: str, uid: str) -> None:
    libvirt.registerErrorHandler(lambda *_: None, None)  # its default prints to standard error
    try:
        json.dump({"outcome": _start(uri, uid)}, sys.stdout)
    except libvirt.libvirtError as error:
        json.dump({"error": str(error)}, sys.stdout)


def _start(uri: str, uid: str) -> str:
    domain = libvirt.open(uri).lookupByUUIDString(uid)
    try:
        domain.create()
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID and domain.isActive():
            return "running already"
        raise
    return "started"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
