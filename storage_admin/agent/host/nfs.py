"""What the kernel tells of a mount of NFS, and of a folder that this machine exports. Nothing is asked of a server."""

from __future__ import annotations

import ipaddress
import os
import re
from typing import Any

from storage_admin.agent.host.mounts import Mount, unescape

#: Bits of ``caps`` in mountstats (NFS_CAP_ALLOCATE, NFS_CAP_DEALLOCATE of linux/nfs_fs_sb.h). A client of 4.2 has them
#: set until its server has once answered that it cannot do that.
_ALLOCATE, _DEALLOCATE = 1 << 20, 1 << 21
_CAPS = re.compile(rb"^\s*caps:\s*caps=0x([0-9a-f]+)", re.MULTILINE)


def facts(mount: Mount, folder: int) -> dict[str, Any] | None:
    """What a pool's folder says of its storage beyond its size; ``None`` where NFS has no part in it.

    Args:
        mount: that it lies on, as :meth:`Mounts.of_descriptor` gives it.
        folder: descriptor of the folder.

    Returns:
        ``version`` of the protocol, null for the server's own folder; ``addresses`` of the server; ``fsid``, the number
        that the server gives the filesystem, null where that is not known; ``dev`` and ``inode`` of the folder;
        ``soft``, errors after a while instead of waiting; ``writable``, whether it was mounted so; ``locks``, whether
        they reach other machines; ``holes`` and ``reserves``, whether parts of a file can be freed and space be set
        aside, null where nobody has tried since it was mounted; ``root_writes``, whether root may make files there.
    """
    status = os.fstat(folder)
    told = {"dev": str(status.st_dev), "inode": status.st_ino, "writable": not _is_set(mount, b"ro")}
    if mount.exported:
        return told | {
            "version": None, "addresses": _own_addresses(), "fsid": None, "soft": False, "locks": True, "holes": True,
            "reserves": True, "root_writes": True,
        }  # fmt: skip
    if mount.filesystem not in {"nfs", "nfs4"}:
        return None
    version, address = _option(mount, b"vers"), _option(mount, b"addr")
    holes, reserves = abilities(_read("/proc/self/mountstats"), mount.point, version)
    return told | {
        "version": version, "fsid": fsid(_read("/proc/fs/nfsfs/volumes"), mount.device),
        "addresses": _own_addresses() if mount.is_from_here else [address] if address else [],
        "soft": _is_set(mount, b"soft") or _is_set(mount, b"softerr"), "locks": not mount.locks_alone, "holes": holes,
        "reserves": reserves, "root_writes": os.access(f"/proc/self/fd/{folder}", os.W_OK),
    }  # fmt: skip


def abilities(mountstats: bytes, point: bytes, version: str) -> tuple[bool | None, bool | None]:
    """Whether a mount's files can have holes punched, and space reserved: only 4.2 can, if its server does.

    Args:
        mountstats: /proc/self/mountstats.
        point: where it is mounted.
    """
    if tuple(map(int, re.findall(r"\d+", version))) < (4, 2):
        return False, False
    for block in re.split(rb"^device ", mountstats, flags=re.MULTILINE):
        if unescape(block.partition(b" mounted on ")[2].partition(b" with fstype ")[0]) == point:
            found = _CAPS.search(block)
            caps = int(found[1], 16) if found else 0
            return _has_done(block, b"DEALLOCATE", caps & _DEALLOCATE), _has_done(block, b"ALLOCATE", caps & _ALLOCATE)
    return None, None


def _has_done(block: bytes, operation: bytes, may: int) -> bool | None:
    counts = re.search(rb"^\s*" + operation + rb": ([0-9 ]+)$", block, re.MULTILINE)
    if counts is None:
        return None
    numbers = [int(number) for number in counts[1].split()]
    errors = numbers[8] if len(numbers) > 8 else 0
    return False if not may else True if numbers[0] > errors else None


def fsid(volumes: bytes, device: int) -> str | None:
    """The number that a server gives a filesystem, in one form for all versions; ``None`` where none is told.

    Linux makes it of the filesystem's UUID unless the export names one (``fsid=``): over 4 the UUID itself, over 3 its
    halves in one. It is no proof: different servers may be set to the same number, and one filesystem may have two.

    Args:
        volumes: /proc/fs/nfsfs/volumes.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}".encode()
    for line in volumes.splitlines():
        fields = line.split()
        if len(fields) > 4 and fields[3] == wanted:
            major, minor = (int(half, 16) for half in fields[4].split(b":"))
            return f"{int.from_bytes((major ^ minor).to_bytes(8, 'little'), 'big') if minor else major:x}"
    return None


def _own_addresses() -> list[str]:
    """By which other machines can reach this one; IPv4 and IPv6."""
    four = re.findall(rb"\|-- ([0-9.]+)\n\s+/32 host LOCAL", _read("/proc/net/fib_trie"))
    found = {address.decode() for address in four}
    for line in _read("/proc/net/if_inet6").decode().splitlines():
        digits, _index, _length, scope, *_rest = line.split()
        if scope == "00":  # of the whole net, not of one wire
            found.add(str(ipaddress.IPv6Address(int(digits, 16))))  # as in a mount's options
    return sorted(address for address in found if not address.startswith("127.") and address != "::1")


def _option(mount: Mount, name: bytes) -> str:
    found = re.search(rb"(?:^|,)" + name + rb"=([^,]*)", mount.options)
    return found[1].decode("ascii", "replace") if found else ""


def _is_set(mount: Mount, name: bytes) -> bool:
    return name in mount.options.split(b",") or name in mount.flags.split(b",")


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
