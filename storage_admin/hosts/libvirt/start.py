"""Starts one domain and does nothing else: ``start URI UUID``; how that went is one JSON document."""

import sys

import libvirt

from storage_admin.hosts.libvirt import helper


def main(uri: str, uid: str) -> None:
    helper.answer(lambda: {"outcome": _start(uri, uid)})


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
