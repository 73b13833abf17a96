"""Leads disks of one domain to other files; how that went is one JSON document.

``repoint URI``, with the request as JSON on standard input: ``uid``, ``edits`` (the fields of
:class:`disks.Edit`), ``until`` (seconds since the epoch: nothing is defined later than that), ``write`` (else
it only looks whether it could) and ``forward`` (refuse a domain that runs, or of which libvirt keeps what names the old
file). Only the definition is changed.
"""

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.disks import ContradictedError, Edit, edited
from storage_admin.hosts.libvirt.domains import disk_paths, keeps_names


def main(uri: str) -> None:
    helper.answer(lambda: _answer(uri, json.load(sys.stdin)))


def _answer(uri: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _repoint(libvirt.open(uri), request)
    except ContradictedError as error:
        return {"contradiction": str(error)}


def _repoint(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    domain = connection.lookupByUUIDString(request["uid"])
    name = domain.name()
    if domain.isActive() and request["forward"]:
        raise ContradictedError(f"{name} runs")
    # Else a password of its screen would be gone from the definition.
    xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE | libvirt.VIR_DOMAIN_XML_SECURE)
    edits = [Edit(**fields) for fields in request["edits"]]
    new, changed = edited(xml, edits, disk_paths(connection, xml))
    if changed and request["forward"] and (why := keeps_names(domain)):
        raise ContradictedError(why)
    if changed and request["write"]:
        if time.time() > request["until"]:
            raise ContradictedError("libvirt took too long to respond")
        connection.defineXML(new)
    return {"name": name, "disks": [asdict(disk) for disk in changed]}


if __name__ == "__main__":
    main(sys.argv[1])
