"""Proxmox VE's configuration files, read as Proxmox VE reads them, and then those lines too that it passes over.

Written after PVE::QemuServer (``parse_vm_config``), PVE::LXC::Config (``parse_pct_config``) and
PVE::JSONSchema (``parse_property_string``). What Proxmox VE would not understand is told as a line that was not read,
and where it names a volume all the same, also as a disk that only such a line names: the image is no orphan.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, unb64
from storage_admin.hosts.names import shown
from storage_admin.hosts.proxmox import drives, guests, storages, volumes
from storage_admin.hosts.proxmox.drives import CONTAINER, VM
from storage_admin.hosts.proxmox.guests import (
    FLEECING,
    HIDDEN,
    NOW,
    PENDING,
    SNAPSHOT,
    ProxmoxGuest,
    Section,
)
from storage_admin.hosts.proxmox.known import is_known, is_understood
from storage_admin.hosts.proxmox.reader import ProxmoxFacts
from storage_admin.hosts.proxmox.storages import StorageFacts

_KINDS = {"qemu-server": VM, "lxc": CONTAINER}
_GUEST_FILE = re.compile(r"nodes/([^/]+)/(qemu-server|lxc)/(\d+)\.conf", re.ASCII)
_SNAPSHOT = re.compile(r"\[([a-z][a-z0-9_-]+)\]\s*", re.IGNORECASE | re.ASCII)
_SPECIAL = re.compile(r"\[special:(cloudinit|fleecing)\]\s*", re.IGNORECASE | re.ASCII)
_PENDING = {
    VM: re.compile(r"\[PENDING\]\s*", re.IGNORECASE),
    CONTAINER: re.compile(r"\[pve:pending\]\s*", re.IGNORECASE),
}
#: A line of a section: its key, and its value.
LINE = {
    VM: re.compile(r"([a-z][a-z_-]*\d*):\s*(.+?)\s*", re.ASCII),
    CONTAINER: re.compile(r"([a-z][a-z_]*\d*):\s*(.+?)\s*", re.ASCII),
}
#: What a container passes to LXC as it is.
LXC = re.compile(r"(lxc\.[a-z0-9_.-]+)(?::|\s*=)\s*(.*?)\s*", re.ASCII)
_CLUSTER = re.compile(r"^\s*cluster_name:\s*(\S+)\s*$", re.MULTILINE)
#: The section of what cloud-init was last given: nothing in it is a disk.
_CLOUDINIT = (HIDDEN, "cloudinit")
#: Keys that name nothing, and stand in no list of options and in no answer of the API.
BESIDE = frozenset({"description", "snapstate", "delete"})


def read(answer: Mapping[str, Any]) -> ProxmoxFacts:
    """What the agent's verb ``pve`` brought.

    Args:
        answer: its result.

    Returns:
        The guests of all nodes; whether they run is known of those of the node that the agent ran on.

    Raises:
        HostError: the agent's answer is none.
    """
    try:
        files = {str(one["name"]): unb64(str(one["content_b64"])) for one in answer["files"]}
        failed = {str(one["name"]): str(one["why"]) for one in answer["failed"]}
        node, running = str(answer["node"]), dict(answer["running"])
    except (KeyError, TypeError, ValueError) as error:
        raise HostError(_("The agent's answer about Proxmox VE cannot be read.")) from error
    return of_files(files, node=node, running=running, failed=failed)


def of_files(
    files: Mapping[str, bytes],
    *,
    node: str,
    running: Mapping[str, Mapping[str, bool | None]] | None = None,
    failed: Mapping[str, str] | None = None,
) -> ProxmoxFacts:
    """The facts that files below ``/etc/pve`` tell.

    Args:
        files: their content by name, such as ``nodes/pve1/qemu-server/100.conf``.
        node: the one that the files were read on.
        running: by kind and number, whether guests of that node run.
        failed: why a file could not be read, by name.
    """
    found, unread = storages.parse_file(_text(files.get("storage.cfg", b"")))
    here = tuple(one if one.on(node) else storages.with_status(one, {"enabled": 0}) for one in found)
    cluster = _CLUSTER.search(_text(files.get("corosync.conf", b"")))
    unknown = [f"/etc/pve/{name} could not be read: {why}." for name, why in (failed or {}).items()]
    unknown += [f"/etc/pve/storage.cfg has a line that could not be parsed: {shown(line)}" for line in unread]
    by_name = {one.name: one for one in found}
    return ProxmoxFacts(
        node=node,
        cluster=cluster[1] if cluster else "",
        storages=here,
        configured=tuple(one for one in here if one is not storages.LOCAL),
        guests=tuple(_guests(files, by_name, node, running or {})),
        unknown=tuple(unknown),
    )


def _guests(
    files: Mapping[str, bytes],
    by_name: Mapping[str, StorageFacts],
    here: str,
    running: Mapping[str, Mapping[str, bool | None]],
) -> Iterable[ProxmoxGuest]:
    for name, content in sorted(files.items()):
        found = _GUEST_FILE.fullmatch(name)
        if found is None:
            continue
        node, kind, vmid = found[1], _KINDS[found[2]], int(found[3])
        runs = running.get(kind, {}).get(str(vmid)) if node == here else None
        read_file = _GuestFile(kind, by_name, _text(content))
        digest = hashlib.sha1(content, usedforsecurity=False).hexdigest()  # as Proxmox VE compares it before it writes
        yield guests.build(
            kind, node, vmid, read_file.sections, by_name,
            state=guests.UNKNOWN if runs is None else guests.RUNNING if runs else guests.OFF,
            digest=digest,
            unread=map(shown, read_file.unread),
        )  # fmt: skip


class _GuestFile:
    """A guest's file as it is read, line by line, and the section that the lines belong to.

    Args:
        kind: ``vm`` or ``container``.
        by_name: the storages; what begins with one of their names is a volume, in whatever line it stands.
    """

    def __init__(self, kind: str, by_name: Mapping[str, StorageFacts], text: str) -> None:
        self._kind = kind
        self._storages = by_name
        self.sections: list[Section] = []
        self.unread: list[str] = []
        self._section = (NOW, "")
        self._values: dict[str, str] = {}
        self._passed_over = False
        #: Values that Proxmox VE passes over, and that name volumes all the same.
        self._hidden: list[tuple[str, str]] = []
        for line in text.split("\n"):
            if line.strip():
                self._line(line)
        self._end()

    def _end(self) -> None:
        """Ends the section."""
        kind, name = self._section
        if self._section != _CLOUDINIT:
            self.sections.append(Section(kind, self._values, name))
        self.sections += [Section(HIDDEN, {key: value}) for key, value in self._hidden]
        self._values, self._hidden = {}, []

    def _line(self, line: str) -> None:
        if line.startswith("[") and self._heading(line):
            return
        if self._passed_over:
            self._not_read(line)
        elif line.startswith("#"):
            return
        elif self._section[0] == FLEECING or self._section == _CLOUDINIT:
            self._special(line)
        else:
            self._option(line)

    def _heading(self, line: str) -> bool:
        found = self._which(line)
        if found is None:
            # Proxmox VE passes over what follows in a VM's file; in a container's only over the heading itself.
            self.unread.append(line)
            self._passed_over = self._kind == VM
            return True
        self._end()
        self._section, self._passed_over = found, False
        return True

    def _which(self, line: str) -> tuple[str, str] | None:
        if _PENDING[self._kind].fullmatch(line):
            return PENDING, ""
        special = _SPECIAL.fullmatch(line) if self._kind == VM else None
        if special is not None:
            return (FLEECING, "") if special[1].lower() == "fleecing" else _CLOUDINIT
        snapshot = _SNAPSHOT.fullmatch(line)
        return (SNAPSHOT, snapshot[1]) if snapshot is not None else None

    def _special(self, line: str) -> None:
        """What backups keep there, by ids; what cloud-init was last given says nothing about disks."""
        found = LINE[VM].fullmatch(line)
        if self._section[0] != FLEECING:
            return
        if found is not None and found[1] == "fleecing-images":
            self._values[found[1]] = found[2]
        else:
            self._not_read(line)

    def _option(self, line: str) -> None:
        raw = LXC.fullmatch(line) if self._kind == CONTAINER else None
        found = LINE[self._kind].fullmatch(line)
        if raw is not None:
            if "/" in raw[2]:
                self.unread.append(line)
        elif found is None:
            if line.partition(":")[0] not in BESIDE:
                self._not_read(line)
        elif found[1] == "delete" and self._section[0] == PENDING:
            self._values["delete"] = found[2]
        elif found[1] not in BESIDE:
            self._value(line, found[1], found[2])

    def _value(self, line: str, key: str, value: str) -> None:
        if self._kind == VM and key == "cdrom":
            key = "ide2"
        if not is_known(key, self._kind):
            self._not_read(line, key, value)
            return
        if drives.is_drive(key, self._kind):
            drive = drives.parsed(value)
            # Of a container's line Proxmox VE keeps what it does not understand.
            if drive is None or (self._kind == VM and not is_understood(key, drive)):
                self._not_read(line, key, value)
                return
        if key in self._values:
            self._not_read(f"{key}: {self._values[key]}", key, self._values[key])
        self._values[key] = value

    def _not_read(self, line: str, key: str = "", value: str = "") -> None:
        """Notes a line, and the volume that it names where one can be made out."""
        self.unread.append(line)
        if not key:
            key, __, value = line.partition(":")
        drive = drives.parsed(value.strip())
        parts = volumes.split(drive.volume) if drive else None
        if drive is not None and ((parts and parts[0] in self._storages) or drive.volume.startswith("/")):
            self._hidden.append((shown(key.strip())[:40], str(drive)))


def _text(content: bytes) -> str:
    """As the names of files are: whatever is not UTF-8 stays what it is in a path."""
    return content.decode("utf-8", "surrogateescape")
