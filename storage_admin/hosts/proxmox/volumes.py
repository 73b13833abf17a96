"""Volume ids of Proxmox VE, and the paths that they stand for.

Read from PVE::Storage::Plugin (``parse_volname``, ``parse_name_dir``, ``filesystem_path``) and the plugins for btrfs,
LVM, ZFS and RBD of pve-storage 9.1.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from storage_admin.hosts.proxmox.storages import StorageFacts

_ID = re.compile(r"([A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]):(.+)", re.ASCII)
_NAME = re.compile(r"(base-)?[^/\s]+\.(raw|qcow2|vmdk|subvol)")
#: A guest's number. Python reads none of over 4300 digits, and one line must not end the reading of all guests.
_VMID = r"(\d{1,18})"
_LINKED = re.compile(rf"{_VMID}/([^/\s]+)/{_VMID}/([^/\s]+)", re.ASCII)
_OWN = re.compile(rf"{_VMID}/([^/\s]+)", re.ASCII)
_BLOCK_NAME = re.compile(rf"(?:(base(?:vol)?-{_VMID}-[^/\s]+)/)?((?:vm|base|basevol|subvol)-{_VMID}-[^/\s]+)", re.ASCII)

#: Content that is one file below its folder, by the first part of a volume's name.
_FILES = {
    "iso": re.compile(r"[^/]+\.(?:iso|img)", re.IGNORECASE),
    "vztmpl": re.compile(r"[^/]+\.tar(?:\.(?:gz|xz|zst|bz2))?", re.IGNORECASE),
    "backup": re.compile(r"[^/]+\.(?:tgz|(?:tar|vma)(?:\.\w+)?)"),
    "snippets": re.compile(r"[^/]+"),
    "import": re.compile(r"[^/]+\.(?:ova|ovf|qcow2|raw|vmdk)"),
}
_FOLDERS = {
    "images": "images", "rootdir": "private", "iso": "template/iso", "vztmpl": "template/cache", "backup": "dump",
    "snippets": "snippets", "import": "import",
}  # fmt: skip


@dataclass(frozen=True)
class Volume:
    """What a volume id says.

    Args:
        content: ``images``, ``iso``, ``vztmpl``, ``backup``, ``snippets`` or ``import``.
        vmid: the guest that owns it; ``None`` for content of nobody's.
        base: name of the image that a linked clone stands on, and its owner in ``base_vmid``.
        format: by the name, which is what Proxmox VE goes by; empty where the name says none.
    """

    storage: str
    content: str
    name: str
    vmid: int | None = None
    base: str = ""
    base_vmid: int | None = None
    format: str = ""


def split(volume_id: str) -> tuple[str, str] | None:
    """Storage and name of a volume id; ``None`` where it is none, such as a path."""
    found = _ID.fullmatch(volume_id)
    return (found[1], found[2]) if found else None


def parse(volume_id: str, storage: StorageFacts) -> Volume | None:
    """What a volume id of that storage says; ``None`` where Proxmox VE would not understand it either."""
    parts = split(volume_id)
    if parts is None or parts[0] != storage.name:
        return None
    return _in_folder(*parts) if storage.is_folder else _on_block(*parts, storage.type)


def _in_folder(storage: str, name: str) -> Volume | None:
    linked, own = _LINKED.fullmatch(name), _OWN.fullmatch(name)
    if linked and _format(linked[2]) and _format(linked[4]):
        return Volume(
            storage, "images", linked[4], int(linked[3]), linked[2], int(linked[1]), _format(linked[4])
        )  # fmt: skip
    if own and _format(own[2]):
        return Volume(storage, "images", own[2], int(own[1]), format=_format(own[2]))
    content, _, rest = name.partition("/")
    if content in _FILES and _FILES[content].fullmatch(rest) and rest not in (".", ".."):
        return Volume(storage, content, rest, format="raw" if content != "import" else rest.rpartition(".")[2])
    return None


def _format(name: str) -> str:
    """By the ending; empty for what is no volume, such as the files of a chain of snapshots."""
    found = _NAME.fullmatch(name)
    return "" if found is None or (name.startswith("snap-") and found[2] == "qcow2") else found[2]


def _on_block(storage: str, name: str, kind: str) -> Volume | None:
    found = _BLOCK_NAME.fullmatch(name)
    if found is None:
        return None
    form = "raw"
    if found[3].startswith(("subvol-", "basevol-")):
        form = "subvol"
    elif kind == "lvm" and found[3].endswith(".qcow2"):
        form = "qcow2"
    return Volume(storage, "images", found[3], int(found[4]), found[1] or "", int(found[2]) if found[2] else None, form)


def find(volume_id: str, storages: Mapping[str, StorageFacts]) -> tuple[StorageFacts | None, Volume | None]:
    """The storage of a volume id, and what the id says; ``None`` for what is not known, or not understood.

    Args:
        storages: by name.
    """
    parts = split(volume_id)
    storage = storages.get(parts[0]) if parts else None
    return storage, parse(volume_id, storage) if storage else None


def path(volume_id: str, storages: Mapping[str, StorageFacts]) -> str:
    """The absolute path of a volume's file, folder or device.

    Args:
        volume_id: or an absolute path, which stays as it is.
        storages: by name.

    Returns:
        Empty for what is on the network alone (RBD, iSCSI), and for what is not understood.
    """
    if volume_id.startswith("/"):
        return volume_id
    storage, volume = find(volume_id, storages)
    if storage is None or volume is None:
        return ""
    if storage.is_folder:
        return _file(volume, storage)
    return _device(volume, storage)


def place(volume_id: str, storages: Mapping[str, StorageFacts]) -> str:
    """Where a volume is, as one word: its path, or for what is on the network alone ``TYPE:POOL/NAME``, as qemu has it.

    Returns:
        Empty for what is not understood.
    """
    if found := path(volume_id, storages):
        return found
    storage, volume = find(volume_id, storages)
    if storage is None or volume is None or storage.is_folder:
        return ""
    return f"{storage.type}:{storage.group or storage.name}/{volume.name}"


def base_id(volume_id: str, storage: StorageFacts) -> str:
    """The id of the image that a linked clone stands on; empty for what is none."""
    volume = parse(volume_id, storage)
    if volume is None or not volume.base:
        return ""
    return f"{storage.name}:{volume.base_vmid}/{volume.base}" if storage.is_folder else f"{storage.name}:{volume.base}"


def snapshot_id(volume_id: str, snapshot: str, storages: Mapping[str, StorageFacts]) -> str:
    """What Proxmox VE calls the file or volume that is a snapshot of a disk; empty where it keeps it in the disk.

    Read from ``get_snap_name`` of PVE::Storage::Plugin and of the plugin for LVM (pve-storage 9.1).
    """
    storage, volume = find(volume_id, storages)
    if storage is None or volume is None or not storage.volume_chains or volume.content != "images":
        return ""
    if volume.format != "qcow2":
        return ""
    if storage.is_folder:
        return f"{storage.name}:{volume.vmid}/snap-{snapshot}-{volume.name}"
    return f"{storage.name}:snap_{volume.name.removesuffix('.qcow2')}_{snapshot}.qcow2"


def snapshot_path(volume_id: str, snapshot: str, storages: Mapping[str, StorageFacts]) -> str:
    """The path of a disk's snapshot where that is a file or volume of its own; else empty."""
    named = snapshot_id(volume_id, snapshot, storages)
    disk = path(volume_id, storages)
    return f"{disk.rpartition('/')[0]}/{named.partition(':')[2].rpartition('/')[2]}" if named and disk else ""


def _file(volume: Volume, storage: StorageFacts) -> str:
    if not storage.path:
        return ""
    folder = f"{storage.path}/{storage.subfolders.get(volume.content, _FOLDERS[volume.content])}"
    if volume.content != "images":
        return f"{folder}/{volume.name}"
    if storage.type == "btrfs" and volume.format == "raw":
        return f"{folder}/{volume.vmid}/{volume.name.removesuffix('.raw')}/disk.raw"
    return f"{folder}/{volume.vmid}/{volume.name}"


def _device(volume: Volume, storage: StorageFacts) -> str:
    if storage.type in ("lvm", "lvmthin") and storage.group:
        return f"/dev/{storage.group}/{volume.name}"
    if storage.type == "zfspool" and storage.group:
        if volume.format == "subvol":
            return f"{storage.path or '/' + storage.group}/{volume.name}"
        return f"/dev/zvol/{storage.group}/{volume.name}"
    return ""


def own_id(volume_id: str) -> str:
    """The id of the same volume without the image that it stands on: what a linked clone is called once it is flat."""
    parts = split(volume_id)
    linked = _LINKED.fullmatch(parts[1]) if parts else None
    block = _BLOCK_NAME.fullmatch(parts[1]) if parts else None
    if parts and block and block[1]:
        return f"{parts[0]}:{block[3]}"
    if parts is None or linked is None:
        return volume_id
    return f"{parts[0]}:{linked[3]}/{linked[4]}"
