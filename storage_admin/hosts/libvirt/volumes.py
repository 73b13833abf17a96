"""The volumes of some of libvirt's pools: ``volumes URI``, with the pools' names as a JSON list on standard
input; one JSON document a pool, as each is read.

libvirt looks at each volume anew when it is asked about it. It is not asked to look for new ones: a refresh that fails
would make the pool inactive.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from storage_admin.hosts.libvirt import helper
from storage_admin.hosts.libvirt.elements import attribute, number

#: Volumes that hold others, and no image.
FOLDERS = frozenset({"dir", "netdir"})
#: What libvirt says of a volume that is gone by now.
_GONE = frozenset({libvirt.VIR_ERR_NO_STORAGE_VOL})


def main(uri: str) -> None:
    helper.prepare()
    names = json.load(sys.stdin)
    try:
        connection = libvirt.openReadOnly(uri)
    except libvirt.libvirtError as error:
        helper.say({"error": str(error)})
        return
    for name in names:
        try:
            helper.say({"pool": name, "volumes": list(_volumes(connection, name))})
        except libvirt.libvirtError as error:
            helper.say({"pool": name, "error": str(error)})


def _volumes(connection: Any, name: str) -> Iterator[dict[str, Any]]:
    for volume in connection.storagePoolLookupByName(name).listAllVolumes():
        try:
            root = ET.fromstring(volume.XMLDesc())  # noqa: S314 (libvirt wrote it)
        except libvirt.libvirtError as error:
            if error.get_error_code() in _GONE:
                continue
            yield _unreadable(volume, str(error))
        else:
            if root.get("type") not in FOLDERS:
                yield _volume(root)


def _unreadable(volume: Any, why: str) -> dict[str, Any]:
    return {"name": volume.name(), "path": volume.path(), "unreadable": why}


def _volume(root: ET.Element) -> dict[str, Any]:
    return {
        "name": root.findtext("name") or "",
        "path": root.findtext("target/path") or root.findtext("key") or "",
        "type": root.get("type", ""),
        "capacity": number(root, "capacity"),
        "allocation": number(root, "allocation"),
        "physical": number(root, "physical"),
        "format": attribute(root, "target/format", "type"),
        "encrypted": root.find("target/encryption") is not None,
        "compat": root.findtext("target/compat") or "",
        "cluster_size": number(root, "target/clusterSize"),
        "backing_path": root.findtext("backingStore/path") or "",
        "backing_format": attribute(root, "backingStore/format", "type"),
        "mtime": root.findtext("target/timestamps/mtime") or "",
        "ctime": root.findtext("target/timestamps/ctime") or "",
    }


if __name__ == "__main__":
    main(sys.argv[1])
