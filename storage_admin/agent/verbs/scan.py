"""The verb ``scan``: every disk image of some storage pools, read once, without a process per image.

And what guests' disks outside of every pool stand on: a base in a pool would look as if nobody needed it. And what
LVM, ZFS and Ceph say of their volumes.
"""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from storage_admin.agent import protocol
from storage_admin.agent.folders import image_folders, scratch
from storage_admin.agent.folders.pools import held, is_absolute, open_root
from storage_admin.agent.formats import Facts, Reader, UnreadableError, guess, read_as
from storage_admin.agent.host import facts, in_use, lvm, rbd, special_mounts, zfs
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import HOST, POOL, SEEN, VOLUMES, HostError, RefusedError, Request, b64, unb64
from storage_admin.agent.scan.pool_scan import PoolScan
from storage_admin.agent.scan.records import FINGERPRINT_SIZE, Recorder, absolute, backing_unsafe

_LARGEST = 4 * 1024 * 1024
_NOT_READ = "no hypervisor of this host names it, and it is in no folder of images"
KINDS = ("dir", "libvirt", "proxmox")
#: Who has volumes that are no files: each with the tool that says whether it is installed, and its name in sentences.
BACKENDS: tuple[tuple[str, str, str, Callable[[AgentIO, str], dict[str, Any]]], ...] = (
    ("lvm", "vgs", "LVM", lvm.read),
    ("zfs", "zpool", "ZFS", zfs.read),
    ("rbd", "rbd", "Ceph", rbd.read),
)


@dataclass(frozen=True)
class Pool:
    """One pool of the request; ``known`` are the fingerprints of the images that the controller has."""

    id: int
    path: bytes
    kind: str
    known: set[bytes] = field(repr=False)


@dataclass(frozen=True)
class ScanArgs:
    """The request's arguments, checked."""

    pools: list[Pool]
    named: frozenset[bytes]
    probe: list[bytes]
    etc_pve: str
    programs: Any


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Walk the pools and tell the host, every image that is new or changed, each pool, volumes, and what is in use.

    Args:
        request: ``pools`` (``id``, ``path_b64``, ``kind`` of dir, libvirt or proxmox, ``known_b64``: the 16-byte
            fingerprints of the known images, joined), ``named_b64`` (paths that guests name: listed with any
            extension), ``probe_b64`` (paths whose existence is asked), ``etc_pve`` (Proxmox VE's folder),
            ``programs`` (as the host's event said the last time).
        io: the controller.

    Returns:
        ``images``: how many were found, ``changed``: how many of them were told.

    Raises:
        RefusedError: ``invalid``.
        StoppedError: the controller stopped the work.
        HostError: a tool of the host does not answer as expected.
    """
    args = _parse(request.args)
    image_folders.refuse_elsewhere(args.etc_pve, "/etc/pve")
    host = facts.host_event(args.etc_pve, known=args.programs)
    io.emit(HOST, **host)
    mounts = Mounts.of_this_machine()
    unmounted = facts.unmounted(args.etc_pve, mounts)
    silent = special_mounts.trusted(
        [pool.path for pool in args.pools], mounts, io.check
    )  # a base may lie in a later pool
    recorder = Recorder(mounts)
    machine = host["machine_id"] or host["hostname"]
    files, images, changed = _Files(), 0, 0
    roots = _roots([pool for pool in args.pools if pool.path not in silent])
    for pool in args.pools:
        nested = {place: kind for place, (number, kind) in roots.items() if number != pool.id}
        own, others = _named(pool, args.pools, args.named)
        scan = PoolScan(pool.id, pool.path, pool.kind, pool.known, own, recorder, io, images, nested, others)
        if pool.path in silent:
            event = scan.without_answer()
        elif place := unmounted.get(pool.path.rstrip(b"/")):
            event = scan.without_mount(place)
        else:
            event = scan.run(mounts, machine)
        io.emit(POOL, **event)
        images, changed = scan.images, changed + scan.changed
        files.add(scan)
    io.progress("checking which images are in use", images, images)
    for told in volumes(io, args.etc_pve):
        io.emit(VOLUMES, **told)
    used = in_use.holds(files.inodes, files.aliases, io.check)
    prefixes = tuple(_prefix(pool) for pool in args.pools)
    elsewhere = [path for path in args.named if path.startswith(b"/") and not path.startswith(prefixes)]
    io.emit(
        SEEN,
        probe=[_existence(path, mounts) for path in args.probe],
        busy=list(used.holds),
        busy_complete=used.complete,
        outside=list(bases_outside(elsewhere, files.inodes, mounts)),
    )
    return {"images": images, "changed": changed}


def look(request: Request, io: AgentIO) -> dict[str, Any]:
    """Look at a few images again, while somebody waits: what changed of them, who has them open, the space beside them.

    Args:
        request: ``pools`` (as of :func:`run`; ``known_b64`` of the images that are asked about), ``named_b64``: these
            images' paths.
        io: the controller; it gets ``image``, ``pool`` and ``seen`` events as of a scan. What a pool's event says of
            other files in it is nothing.

    Returns:
        ``images``: how many of them are there, ``changed``: how many of these were told.

    Raises:
        RefusedError, StoppedError: as :func:`run`.
    """
    args = _parse(request.args)
    mounts = Mounts.of_this_machine()
    silent = special_mounts.trusted([pool.path for pool in args.pools], mounts, io.check)
    recorder, machine = Recorder(mounts), protocol.machine_id() or socket.gethostname()
    files, images, changed = _Files(), 0, 0
    for pool in args.pools:
        own, _others = _named(pool, args.pools, args.named)
        scan = PoolScan(pool.id, pool.path, pool.kind, pool.known, own, recorder, io, images)
        away = pool.path in silent
        io.emit(POOL, **(scan.without_answer() if away else scan.run(mounts, machine, walk=False)))
        images, changed = scan.images, changed + scan.changed
        files.add(scan)
    used = in_use.holds(files.inodes, files.aliases, io.check)
    io.emit(SEEN, busy=list(used.holds))
    return {"images": images, "changed": changed}


def volumes(io: AgentIO, etc_pve: str = "/etc/pve") -> Iterator[dict[str, Any]]:
    """What each of :data:`BACKENDS` says of volumes that are no files, where it is installed. They are only read.

    Returns:
        ``backend``; ``why``: a sentence where it does not answer, else empty, with what its own ``read`` returns.

    Raises:
        StoppedError: the controller stopped the work.
    """
    for name, tool, title, ask in BACKENDS:
        told: dict[str, Any] = {"backend": name, "why": ""}
        try:
            tools.find(tool)
            told |= ask(io, etc_pve)
        except RefusedError:
            continue
        except HostError as error:
            told["why"] = f"{title} does not answer: {error.detail}."
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            told["why"] = f"The answer of {title} is not understood: {error!r}."
        yield told


@dataclass
class _Files:
    """The images' inodes by device, and where that is not the device of the superblock, the latter to the former."""

    inodes: dict[int, set[int]] = field(default_factory=dict)
    aliases: dict[int, int] = field(default_factory=dict)

    def add(self, scan: PoolScan) -> None:
        if scan.device is None:
            return
        self.inodes.setdefault(scan.device, set()).update(scan.inodes)
        if scan.mount is not None and scan.mount.device != scan.device:
            self.aliases[scan.mount.device] = scan.device


def _roots(pools: list[Pool]) -> dict[tuple[int, int], tuple[int, str]]:
    """Each pool's folder by device and inode, with the pool's id and kind."""
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for pool in pools:
        try:
            with held(open_root(pool.path)) as root:
                status = os.fstat(root)
        except (OSError, RefusedError):
            continue  # its own turn tells
        found.setdefault((status.st_dev, status.st_ino), (pool.id, pool.kind))
    return found


def _named(pool: Pool, pools: list[Pool], named: frozenset[bytes]) -> tuple[frozenset[bytes], frozenset[bytes]]:
    """The paths that guests name in this pool, and those in pools below it: each belongs to the deepest."""
    inside = {path for path in named if path.startswith(_prefix(pool))}
    deeper = [_prefix(other) for other in pools if _prefix(other).startswith(_prefix(pool)) and other.id != pool.id]
    others = frozenset(path for path in inside if any(path.startswith(prefix) for prefix in deeper))
    return frozenset(inside - others), others


def _prefix(pool: Pool) -> bytes:
    return pool.path.rstrip(b"/") + b"/"


def _existence(path: bytes, mounts: Mounts) -> list[int] | bool | None:
    """Device and inode; ``False`` where there is nothing; ``None`` where it cannot be told."""
    if not is_absolute(path) or mounts.may_wait_there(path):
        return None
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    return [status.st_dev, status.st_ino]


def _parse(args: dict[str, Any]) -> ScanArgs:
    unknown = set(args) - {"pools", "named_b64", "probe_b64", "etc_pve", "programs"}
    if unknown:
        raise RefusedError("invalid", f"scan knows no argument {', '.join(sorted(unknown))}")
    try:
        pools = [_parse_pool(fields) for fields in args["pools"]]
        named = frozenset(_plain(unb64(path)) for path in args.get("named_b64", ()))
        named = frozenset(path for path in named if not scratch.holds(path))
        probe = [unb64(path) for path in args.get("probe_b64", ())]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError("invalid", f"scan's arguments are not as they should be: {error!r}") from error
    return ScanArgs(pools, named, probe, str(args.get("etc_pve", "/etc/pve")), args.get("programs"))


def _plain(path: bytes) -> bytes:
    """A path without empty parts: with them, a file that the walk comes by as well would be told as two images."""
    parts = [part for part in path.split(b"/") if part not in {b"", b"."}]
    return (b"/" if path.startswith(b"/") else b"") + b"/".join(parts)


def _parse_pool(fields: dict[str, Any]) -> Pool:
    path, known, kind = unb64(fields["path_b64"]), unb64(fields.get("known_b64", "")), fields["kind"]
    number = fields["id"]
    if not is_absolute(path) or kind not in KINDS or not isinstance(number, int):
        raise ValueError(f"pool {number!r} of kind {kind!r} at {path!r}")
    if len(known) % FINGERPRINT_SIZE:
        raise ValueError(f"fingerprints of pool {number} take {len(known)} bytes")
    size = FINGERPRINT_SIZE
    return Pool(number, path, kind, {known[start : start + size] for start in range(0, len(known), size)})


def bases_outside(named: Iterable[bytes], files: dict[int, set[int]], mounts: Mounts) -> Iterator[dict[str, Any]]:
    """The disks among these that have a base, or may have one.

    Only the header of the disk itself is read, which the hypervisor names; what that in turn names is not opened.

    Args:
        named: absolute paths that guests name, outside of the pools.
        files: inodes of the pools' images by device.

    Returns:
        For each ``path_b64``; ``base``: device and inode where it is an image of a pool; ``why``: a sentence about
        what cannot be told, else empty. Disks that stand on nothing are left out.
    """
    recorder = Recorder(mounts)
    for path in sorted(named):
        if mounts.may_wait_there(path):
            yield _disk_row(path, "it lies on a filesystem that is not scanned")
            continue
        try:
            facts = _disk_facts(path)
        except FileNotFoundError:
            continue
        except RefusedError:
            yield _disk_row(path, _NOT_READ)
            continue
        except OSError as error:
            yield _disk_row(path, f"it cannot be read: {error.strerror}")
            continue
        if facts is not None and facts.backing_file is not None:
            yield from _base_of_disk(path, facts.backing_file, files, recorder)


@lru_cache(maxsize=1)
def _definitions() -> bytes:
    """What libvirt and Proxmox VE have written down of their guests, where only root writes."""
    found = []
    for place in ("/etc/libvirt/*/*.xml", "/run/libvirt/*/*.xml", "/etc/pve/nodes/*/*/*.conf"):
        for name in glob.glob(place):
            with contextlib.suppress(OSError), open(name, "rb") as file:
                found.append(file.read(_LARGEST))
    return b"\n".join(found)


def _open_disk(path: bytes) -> int | None:
    """A disk, open; ``None`` where it is neither a file nor a volume: already to open a device may do something.

    Raises:
        RefusedError: it is not read, or as :func:`image_folders.reach`.
        OSError: it is not there, or cannot be opened.
    """
    folder = image_folders.reach(os.path.dirname(path))
    name, flags = os.path.basename(path), os.O_PATH | os.O_CLOEXEC
    # Only looked at; whatever gets its name from now on is another file.
    with held(folder.fd), held(os.open(name, flags, dir_fd=folder.fd)) as seen:
        status = os.fstat(seen)
        if stat.S_ISREG(status.st_mode):
            _refuse_hidden(path, folder, status)
        elif not stat.S_ISBLK(status.st_mode):
            return None
        return os.open(f"/proc/self/fd/{seen}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _refuse_hidden(path: bytes, folder: image_folders.Reached, status: os.stat_result) -> None:
    """Refuse a file that is in no folder of images, and that no hypervisor here gives a guest.

    What a request calls a guest's disk may be any file of root's.
    """
    if image_folders.is_listed(folder.real) and not image_folders.forbidden(folder.real):
        itself = os.stat(os.path.basename(path), dir_fd=folder.fd, follow_symlinks=False)
        readable = os.path.samestat(itself, status)  # no link led there
    else:
        # As it stands in a definition; the library that knows how loads all of HTTP.
        readable = path.replace(b"&", b"&amp;").replace(b">", b"&gt;").replace(b"<", b"&lt;") in _definitions()
    if not readable:
        raise RefusedError("folder_not_listed", _NOT_READ)


def _base_of_disk(path: bytes, name: bytes, files: dict[int, set[int]], recorder: Recorder) -> Iterator[dict[str, Any]]:
    if backing_unsafe(name) is not None:
        yield _disk_row(path, "its backing file is not named by a plain path")
        return
    below = absolute(os.path.dirname(path), name)
    found = recorder.look(below)
    if found is not None and found.st_ino in files.get(found.st_dev, ()):
        yield _disk_row(path, "", [found.st_dev, found.st_ino])
    elif found is not None:
        yield _disk_row(path, "its backing file is outside every pool as well; register the folder of the backing file")


def _disk_row(path: bytes, why: str, base: list[int] | None = None) -> dict[str, Any]:
    return {"path_b64": b64(path), "base": base, "why": why}


def _disk_facts(path: bytes) -> Facts | None:
    """What the header of a disk says; ``None`` for a damaged one, on which no guest could start, or for none."""
    fd = _open_disk(path)
    if fd is None:
        return None
    with held(fd), contextlib.suppress(UnreadableError):
        reader = Reader(fd, os.lseek(fd, 0, os.SEEK_END))
        return read_as(reader, guess(reader, path))
    return None
