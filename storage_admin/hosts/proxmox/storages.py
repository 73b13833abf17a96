"""Storages of Proxmox VE: what their definitions say, and what a node says of their space."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

#: Whose volumes are files below a folder.
FOLDERS = frozenset({"btrfs", "cephfs", "cifs", "dir", "glusterfs", "nfs"})
#: Mounted by Proxmox VE itself, below ``/mnt/pve`` unless a path is given.
_MOUNTED = frozenset({"cephfs", "cifs", "glusterfs", "nfs"})
#: Shared by their kind, whatever their definition says (PVE::Storage::Plugin, ``@SHARED_STORAGE``).
_SHARED = frozenset({"iscsi", "nfs", "cifs", "rbd", "cephfs", "iscsidirect", "zfs", "drbd", "pbs", "esxi"})
#: What the storage pools of the dashboard are called, by Proxmox VE's own type.
_KINDS = {"lvm": "lvm", "lvmthin": "lvmthin", "zfspool": "zfs", "nfs": "nfs", "rbd": "rbd"}
#: What may be in one whose definition does not say so.
_BOTH, _IMAGES = ("images", "rootdir"), ("images",)
_CONTENT = {
    "btrfs": _BOTH, "dir": _BOTH, "lvmthin": _BOTH, "zfspool": _BOTH, "cifs": _IMAGES, "glusterfs": _IMAGES,
    "lvm": _IMAGES, "nfs": _IMAGES, "rbd": _IMAGES,
}  # fmt: skip
_HEADING = re.compile(r"(\S+):\s*(\S+)\s*", re.ASCII)


@dataclass(frozen=True)
class StorageFacts:
    """A storage as one node has it.

    Args:
        type: in Proxmox VE's words.
        path: of the folder; of ZFS the mount point of its containers' filesystems; empty for the rest.
        group: volume group of LVM, pool of ZFS and RBD (with its namespace, if it has one).
        thin_pool: in that volume group.
        content: what may be in it: ``images``, ``rootdir``, ``iso``, ...
        server, export: of what comes over the network.
        subfolders: by content, where the definition says otherwise than Proxmox VE's own.
        nodes: that have it; empty for all.
        shared: the same on all its nodes.
        enabled: not switched off, and for this node.
        active: reachable just now; ``None`` where nobody was asked.
        total_bytes, used_bytes, available_bytes: ``None`` where the node does not know, as of one that is not active.
        is_mountpoint: it has to be a mount point, else the folder is not the storage.
        volume_chains: snapshots of its qcow2 volumes are files or volumes of their own, below the disk.
    """

    name: str
    type: str
    path: str = ""
    group: str = ""
    thin_pool: str = ""
    content: tuple[str, ...] = ()
    server: str = ""
    export: str = ""
    subfolders: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    shared: bool = False
    enabled: bool = True
    active: bool | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    available_bytes: int | None = None
    is_mountpoint: bool = False
    volume_chains: bool = False

    @property
    def reserved_bytes(self) -> int | None:
        """What its filesystem keeps for root: neither used nor available; ``None`` where the node does not tell."""
        if self.total_bytes is None or self.used_bytes is None or self.available_bytes is None:
            return None
        return max(self.total_bytes - self.used_bytes - self.available_bytes, 0)

    @property
    def is_folder(self) -> bool:
        """Whether its volumes are files, which the agent can read and rewrite."""
        return self.type in FOLDERS

    @property
    def kind(self) -> str:
        """As the dashboard's pools have it: ``dir``, ``nfs``, ``lvm``, ``lvmthin``, ``zfs``, ``rbd`` or ``other``."""
        return _KINDS.get(self.type, "dir" if self.is_folder else "other")

    @property
    def place(self) -> str:
        """Where its volumes are, if in no folder: a group, or a thin pool in one."""
        return f"{self.group}/{self.thin_pool}" if self.thin_pool else self.group or self.name

    @property
    def holds_images(self) -> bool:
        """Whether disks of guests may be in it."""
        return not {"images", "rootdir"}.isdisjoint(self.content)

    def on(self, node: str) -> bool:
        """Whether that node has it."""
        return not self.nodes or node in self.nodes


LOCAL = StorageFacts(
    "local", "dir", "/var/lib/vz", content=("backup", "images", "iso", "rootdir", "snippets", "vztmpl")
)  # fmt: skip


def of_definition(settings: Mapping[str, Any]) -> StorageFacts:
    """A storage from its definition, as ``/storage`` lists it and storage.cfg has it."""
    kind, name = _text(settings, "type"), _text(settings, "storage")
    path = _text(settings, "path")
    if not path and name == "local":
        path = "/var/lib/vz"
    if not path and kind in _MOUNTED:
        path = f"/mnt/pve/{name}"
    if kind == "zfspool":
        path = _text(settings, "mountpoint") or "/" + _text(settings, "pool")
    group = _text(settings, "vgname") or _text(settings, "pool")
    if kind == "rbd":
        group = "/".join(filter(None, (group or "rbd", _text(settings, "namespace"))))
    return StorageFacts(
        name=name,
        type=kind,
        path=path.rstrip("/") or path,
        group=group,
        thin_pool=_text(settings, "thinpool"),
        content=_words(settings, "content") or _CONTENT.get(kind, ()),
        server=_text(settings, "server") or _text(settings, "portal"),
        export=_text(settings, "export") or _text(settings, "share"),
        subfolders=_subfolders(_text(settings, "content-dirs")),
        nodes=_words(settings, "nodes"),
        shared=kind in _SHARED or _flag(settings.get("shared")),
        enabled=not _flag(settings.get("disable")),
        is_mountpoint=_text(settings, "is_mountpoint").lower() not in ("", "0", "no", "off", "false"),
        volume_chains=_flag(settings.get("snapshot-as-volume-chain")),
    )


def with_status(storage: StorageFacts, status: Mapping[str, Any]) -> StorageFacts:
    """The same with what a node says of it (``/nodes/{node}/storage``)."""
    active = _flag(status.get("active"))
    sizes = [integer(status.get(key)) if active else None for key in ("total", "used", "avail")]
    return replace(
        storage,
        type=storage.type or _text(status, "type"),
        content=storage.content or _words(status, "content"),
        shared=storage.shared or _flag(status.get("shared")),
        enabled=_flag(status.get("enabled", 1)),
        active=active,
        total_bytes=sizes[0],
        used_bytes=sizes[1],
        available_bytes=sizes[2],
    )


def parse_file(text: str) -> tuple[tuple[StorageFacts, ...], tuple[str, ...]]:
    """The storages of ``/etc/pve/storage.cfg``, and the lines of it that were not understood.

    ``local`` is always there and always the same, whatever the file says (PVE::Storage::Plugin, ``parse_config``).
    """
    unread: list[str] = []
    found = {one.name: one for one in (of_definition(settings) for settings in _sections(text, unread))}
    local = found.get("local")
    usual = local is not None and (local.type, local.path) == (LOCAL.type, LOCAL.path)
    found["local"] = replace(local, nodes=()) if local is not None and usual else LOCAL
    return tuple(found.values()), tuple(unread)


def _sections(text: str, unread: list[str]) -> Iterator[dict[str, str]]:
    settings: dict[str, str] | None = None
    for line in text.split("\n"):
        heading = _HEADING.fullmatch(line)
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if heading is not None and not line[:1].isspace():
            if settings is not None:
                yield settings
            settings = {"type": heading[1], "storage": heading[2]}
        elif line[:1].isspace() and settings is not None:
            key, _, value = line.strip().partition(" ")
            # A flag such as ``disable`` or ``sparse`` may stand alone.
            settings[key] = value.strip() or "1"
        else:
            unread.append(line)
    if settings is not None:
        yield settings


def _subfolders(text: str) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in re.split(r"[,; ]", text))
    return {
        content: folder.strip("/")
        for content, equals, folder in pairs
        if equals and folder.strip("/") and ".." not in folder.split("/")
    }


def _text(settings: Mapping[str, Any], key: str) -> str:
    value = settings.get(key)
    return "" if value is None else str(value)


def _words(settings: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(sorted(filter(None, re.split(r"[,; ]+", _text(settings, key)))))


def _flag(value: Any) -> bool:
    return str(value).lower() in ("1", "on", "yes", "true")


def integer(value: Any) -> int | None:
    """A number of an answer: an integer, seldom as text or with a fraction; ``None`` where it is none."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"\d{1,30}", value, re.ASCII) else None
    # JSON's infinities and nonsense below zero are no sizes.
    return int(value) if isinstance(value, int | float) and 0 <= value < math.inf else None
