"""The secrets by which libvirt opens encrypted disks: ``disk_secrets URI``, with the request as JSON on standard input.

The request: ``path`` of an image, ``set`` (a passphrase as base64; null to read) and ``define`` (make a secret where no
guest's disk names one). The answer: ``secrets``, each with ``guest`` (empty for one that no guest names), ``uuid`` and
``value`` (base64; null where libvirt does not tell it).

Format: libvirt, formatsecret and formatstorageencryption.
"""

import base64
import json
import sys
import xml.etree.ElementTree as ET
from typing import Any
from xml.sax.saxutils import escape

import libvirt

from storage_admin.hosts.libvirt import helper

_NEW = """<secret ephemeral='no' private='no'>
  <description>Passphrase of a disk image</description>
  <usage type='volume'><volume>{path}</volume></usage>
</secret>"""


def main(uri: str) -> None:
    helper.answer(lambda: _answer(libvirt.open(uri), json.load(sys.stdin)))


def _answer(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    path = str(request["path"])
    found = dict(_named(connection, path))
    if not found and request["define"]:
        found = {_for_path(connection, path): ""}
    told = []
    for uuid, guest in found.items():
        secret = connection.secretLookupByUUIDString(uuid)
        if request["set"] is not None:
            secret.setValue(base64.b64decode(request["set"]))
        told.append({"guest": guest, "uuid": uuid, "value": _value(secret)})
    return {"secrets": told}


def _named(connection: Any, path: str) -> list[tuple[str, str]]:
    """The secrets that guests' disks on that image name, each with its guest."""
    found = []
    for domain in connection.listAllDomains():
        xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
        for disk in ET.fromstring(xml).iterfind("devices/disk"):  # noqa: S314 (libvirt wrote it)
            source = disk.find("source")
            if source is None or source.get("file") != path:
                continue
            # Either place is allowed.
            for secret in (*disk.iterfind("encryption/secret"), *source.iterfind("encryption/secret")):
                uuid = secret.get("uuid")
                if uuid is None:
                    by_usage = connection.secretLookupByUsage(libvirt.VIR_SECRET_USAGE_TYPE_VOLUME, secret.get("usage"))
                    uuid = by_usage.UUIDString()
                found.append((uuid, domain.name()))
    return found


def _for_path(connection: Any, path: str) -> str:
    try:
        secret = connection.secretLookupByUsage(libvirt.VIR_SECRET_USAGE_TYPE_VOLUME, path)
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_SECRET:
            raise
        secret = connection.secretDefineXML(_NEW.format(path=escape(path)))
    return str(secret.UUIDString())


def _value(secret: Any) -> str | None:
    try:
        return base64.b64encode(secret.value()).decode("ascii")
    except libvirt.libvirtError:  # it is private, or has none
        return None


if __name__ == "__main__":
    main(sys.argv[1])
