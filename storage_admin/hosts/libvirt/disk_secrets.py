"""The secrets by which libvirt opens encrypted disks: ``disk_secrets URI``.

The request: ``path`` of an image, ``set`` (a passphrase as base64; null to read), ``was`` (the one that a secret has to
have for that, null for any) and ``define`` (make a secret where no guest's disk names one). The answer: ``secrets``,
each with ``guest`` (empty for one that no guest names), ``uuid``, ``value`` (base64; null where libvirt does not tell
it) and ``left``: why it was not set. A secret that another disk names as well is never set.

Format: libvirt, formatsecret and formatstorageencryption.
"""

import base64
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any
from xml.sax.saxutils import escape

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.elements import file_of

_NEW = """<secret ephemeral='no' private='no'>
  <description>Passphrase of a disk image</description>
  <usage type='volume'><volume>{path}</volume></usage>
</secret>"""


def _answer(connection: Any, request: dict[str, Any]) -> dict[str, Any]:
    path, new, was = str(request["path"]), _raw(request["set"]), _raw(request["was"])
    named = list(_named(connection))
    found = {uuid: guest for uuid, source, guest in named if source == path}
    if not found and request["define"] and new is not None:
        made = _for_path(connection, path)
        made.setValue(new)
        return {"secrets": [_told(made, "", "")]}
    told = []
    for uuid, guest in found.items():
        secret, left = connection.secretLookupByUUIDString(uuid), ""
        others = {source for one, source, _ in named if one == uuid and source != path}
        value = _value(secret)
        if others:
            left = f"it also opens {', '.join(sorted(others))[:200]}"
        elif new is not None and value is not None and was is not None and value != was:
            left = "its value is another one than the passphrase that was entered"
        elif new is not None:
            secret.setValue(new)
        told.append(_told(secret, guest, left))
    return {"secrets": told}


def _raw(given: str | None) -> bytes | None:
    return None if given is None else base64.b64decode(given)


def _told(secret: Any, guest: str, left: str) -> dict[str, Any]:
    value = _value(secret)
    encoded = None if value is None else base64.b64encode(value).decode("ascii")
    return {"guest": guest, "uuid": secret.UUIDString(), "value": encoded, "left": left}


def _named(connection: Any) -> Iterator[tuple[str, str, str]]:
    """The secrets that guests' disks name: uuid, the disk's source, the guest."""
    for domain in connection.listAllDomains():
        for xml in {domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE), domain.XMLDesc()}:
            for disk in ET.fromstring(xml).iterfind("devices/disk"):  # noqa: S314 (libvirt wrote it)
                source = disk.find("source")
                if source is None:
                    continue
                place = file_of(source) or source.get("name") or source.get("volume") or ""
                # Either place is allowed.
                for secret in (*disk.iterfind("encryption/secret"), *source.iterfind("encryption/secret")):
                    if uuid := secret.get("uuid") or _by_usage(connection, secret.get("usage") or ""):
                        yield uuid, place, domain.name()


def _by_usage(connection: Any, usage: str) -> str:
    """The uuid of the secret for that; empty where there is none."""
    try:
        return str(connection.secretLookupByUsage(libvirt.VIR_SECRET_USAGE_TYPE_VOLUME, usage).UUIDString())
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_NO_SECRET:
            raise
        return ""


def _for_path(connection: Any, path: str) -> Any:
    """A new secret for an image. One that is there already opens something else, and stays as it is."""
    return connection.secretDefineXML(_NEW.format(path=escape(path)))


def _value(secret: Any) -> bytes | None:
    try:
        return bytes(secret.value())
    except libvirt.libvirtError:  # it is private, or has none
        return None


if __name__ == "__main__":
    helper.answer(_answer)
