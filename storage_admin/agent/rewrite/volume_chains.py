"""Snapshots of Proxmox VE that are files below their disk (a storage with ``snapshot-as-volume-chain``).

``vm-100-disk-0.qcow2`` stands on ``snap-NEW-vm-100-disk-0.qcow2``, and that on ``snap-OLD-vm-100-disk-0.qcow2``, in the
folder that has the guest's number for a name (PVE::Storage::Plugin of pve-storage 9.1, ``get_snap_name`` and
``parse_snap_name``). Proxmox VE finds a snapshot by walking that chain: one that is made shorter behind its back has
lost its snapshots. Only names and headers tell, as the storage's own file list does not show such files.

Whom a job would give the content of bases: an overlay can name anybody's image, and root can read it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from storage_admin.agent.host import attributes
from storage_admin.agent.protocol import RefusedError
from storage_admin.agent.rewrite.chain import Link

CODE = "in_snapshot_chain"
#: Where Proxmox VE shows its configuration.
ETC_PVE = "/etc/pve"

_SNAPSHOT, _ENDING = b"snap-", b".qcow2"
_NUMBER = re.compile(rb"[1-9][0-9]{0,8}")
#: What Proxmox VE itself calls a VM's disk; others may be called anything.
_OWN = re.compile(rb"(?:vm|base)-([1-9][0-9]{0,8})-.+")
_MOST = 8 * 1024 * 1024


def readings(path: bytes) -> list[tuple[bytes, bytes]]:
    """What a file's path may mean as a snapshot's: its name and that of the disk, the likeliest first; else nothing.

    Both may hold dashes: ``snap-a-vm-1-vm-100-disk-0.qcow2`` is the snapshot ``a-vm-1`` of ``vm-100-disk-0.qcow2``, and
    in the folder ``100`` maybe ``a-vm-1-vm`` of ``100-disk-0.qcow2``. Elsewhere only a VM's own name is one.
    """
    folder, name = os.path.split(path)
    if not name.startswith(_SNAPSHOT) or not name.endswith(_ENDING):
        return []
    number, rest = os.path.basename(folder), name[len(_SNAPSHOT) :]
    found = [(rest[:at], rest[at + 1 :]) for at in range(1, len(rest)) if rest[at : at + 1] == b"-"]
    owns = {disk: own[1] for _, disk in found if (own := _OWN.fullmatch(disk)) is not None}
    if not _NUMBER.fullmatch(number):
        return [one for one in reversed(found) if one[1] in owns]
    found = [one for one in reversed(found) if one[1] != _ENDING]
    return sorted(found, key=lambda one: owns.get(one[1]) != number)


def snapshot_below(path: bytes, below: bytes) -> bytes:
    """The snapshot that an image stands on in such a chain; empty where its base is none of its own snapshots.

    Args:
        path: the image's.
        below: of its immediate base.
    """
    if os.path.basename(os.path.dirname(path)) != os.path.basename(os.path.dirname(below)):
        return b""
    name = os.path.basename(path)
    disks = {disk for _, disk in readings(path)} if name.startswith(_SNAPSHOT) else {name}
    return next((snapshot for snapshot, disk in readings(below) if disk in disks), b"")


def guest_number(path: bytes) -> str:
    """The number of the VM whose disk or snapshot a file is: that of its folder, else by its name; else empty."""
    number = os.path.basename(os.path.dirname(path))
    if not _NUMBER.fullmatch(number):
        names = [disk for _, disk in readings(path)] or [os.path.basename(path)]
        found = next((own for own in map(_OWN.fullmatch, names) if own), None)
        number = found[1] if found else b""
    return number.decode("ascii")


def refuse_rewriting(links: Sequence[Link], *, stays: int) -> None:
    """Refuse to put another file in the place of a snapshot's, or to take a disk out of its chain.

    Args:
        links: the image and its ancestors.
        stays: how many of the ancestors the new file will have below it, counted from the end.

    Raises:
        RefusedError: ``in_snapshot_chain``.
    """
    image = links[0]
    path = image.planned.path
    snapshot = next(iter(readings(path)), (b"", b""))[0]
    if not snapshot and len(links) > 1 and stays < len(links) - 1:
        snapshot = snapshot_below(path, links[1].planned.path)
    if snapshot:
        raise RefusedError(CODE, why_not(image.shown, os.fsdecode(snapshot), guest_number(path)))


def why_not(shown: str, snapshot: str, number: str) -> str:
    """A sentence for a refusal.

    Args:
        shown: the image's path or name.
        number: the guest's.
    """
    shown_snapshot = snapshot.encode("utf-8", "replace").decode()
    guest = number or "VMID"
    return (
        f"{shown} is the snapshot {shown_snapshot} of VM {guest}, which Proxmox VE keeps as a file in the backing "
        "chain of the disk. After a change, Proxmox VE could no longer find the snapshot. To merge it, delete the "
        f"snapshot in Proxmox VE (qm delsnapshot {guest} {shown_snapshot}, DELETE "
        f"/nodes/{{node}}/qemu/{guest}/snapshot/{shown_snapshot})."
    )


def refuse_named(path: bytes) -> None:
    """Refuse to take away a file that a snapshot of a VM is said to be, in or out of its disk's chain.

    A deletion that was cut off leaves the file of a snapshot that its VM has still.

    Raises:
        RefusedError: ``in_snapshot_chain``; ``guests_unknown``, where the VM's file is there and cannot be read.
    """
    number = guest_number(path)
    snapshots = {snapshot for snapshot, _ in readings(path)}
    if not snapshots or not number:
        return
    for lines in _configurations(number):
        for snapshot in snapshots:
            if b"[" + snapshot + b"]" in lines:
                raise RefusedError(CODE, why_not(os.fsdecode(path), os.fsdecode(snapshot), number))


def _configurations(number: str) -> list[set[bytes]]:
    """The lines of the VM's file, on whatever node it is."""
    nodes, found = os.path.join(ETC_PVE, "nodes"), list[set[bytes]]()
    try:
        names = sorted(os.listdir(nodes))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(nodes, error) from error
    for node in names:
        path = os.path.join(nodes, node, "qemu-server", number + ".conf")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                found.append({line.strip() for line in file.read(_MOST).splitlines()})
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _unreadable(path, error) from error
    return found


def _unreadable(path: str, error: OSError) -> RefusedError:
    why = error.strerror or "it cannot be read"
    return RefusedError("guests_unknown", f"who has the snapshot is not known: {path} cannot be read: {why}")


def refuse_foreign(image: Link, taken: Sequence[Link], *folders: int) -> None:
    """Refuse to write out of an image what its owner may not read.

    Root's overlays may stand on anything, unless the folder is somebody else's who may read them: he chooses what the
    names in it lead to. So is the folder that the content comes into.

    Args:
        image: whose content is written; what is made is owned and may be read as it is.
        taken: the bases whose content moves along.
        folders: descriptors of those that the content comes into, beside the image's own.

    Raises:
        RefusedError: ``foreign_base``; as :meth:`Link.folder`.
    """
    if not taken:
        return
    with image.folder() as folder:
        places = [os.fstat(fd) for fd in (folder, *folders)]
    readers = [attributes.Who.owns(os.fstat(image.fd), places[0])]
    rights = attributes.Rights.of(image.fd)
    readers += [keeper for keeper in map(attributes.Who.keeps, places) if rights.allow(keeper, attributes.READ)]
    for base in taken:
        for who in readers:
            if not base.planned.for_all and not attributes.may_read(who, base.fd):
                raise RefusedError(
                    "foreign_base",
                    f"user {who.uid} may not read {base.shown}, but could read its content in {image.shown} after "
                    "the job; give the user read access, or have an admin allow this for the pool",
                )
