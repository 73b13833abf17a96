"""Leads disks of one domain to other files: ``repoint URI``.

The request: ``uid``, ``edits`` (the fields of :class:`disks.Edit`), ``until`` (seconds since the epoch: nothing is
defined later than that), ``write`` (else it only looks whether it could) and ``forward`` (refuse a domain that runs, or
of which libvirt keeps what names the old file). Only the definition is changed.
"""

from dataclasses import asdict
from typing import Any

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.disks import ContradictedError, Edit, edited
from storage_admin.hosts.libvirt.domains import disk_paths, keeps_names


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
        helper.refuse_late(request)
        connection.defineXML(new)
        if request["forward"] and domain.isActive():
            connection.defineXML(xml)  # it began to start before, with the old definition
            raise ContradictedError(f"{name} runs")
    return {"name": name, "disks": [asdict(disk) for disk in changed]}


if __name__ == "__main__":
    helper.answer(_repoint)
