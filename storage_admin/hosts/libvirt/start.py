"""Starts one domain and does nothing else: ``start URI``; the request has its ``uid``."""

from typing import Any

import libvirt

from storage_admin.hosts.libvirt import helper


def _start(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    domain = connection.lookupByUUIDString(request["uid"])
    try:
        domain.create()
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_OPERATION_INVALID and domain.isActive():
            return {"outcome": "running already"}
        raise
    return {"outcome": "started"}


if __name__ == "__main__":
    helper.answer(_start)
