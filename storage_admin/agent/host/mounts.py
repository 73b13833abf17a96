"""Which filesystem a folder is on, and a key that is the same on every host that shows the same folder."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: Filesystems that one machine alone has: on disks of its own, in its memory, or made up by its kernel. Any other one
#: may be mounted elsewhere, too, until an admin says by whom. So may what only shows folders (aufs, ecryptfs,
#: mergerfs and the like), as these may lie on a server; but the folder that an overlay writes to is its own alone.
LOCAL = frozenset(
    {
        "adfs", "affs", "apfs", "bcachefs", "befs", "bfs", "btrfs", "cramfs", "efs", "erofs", "exfat", "ext2", "ext3",
        "ext4", "f2fs", "fuse.exfat", "fuse.fuse-ext2", "fuse.fuse2fs", "fuse.ntfs", "fuse.ntfs-3g", "fuse.shfs",
        "fuseblk", "hfs", "hfsplus", "hpfs", "iso9660", "jffs2", "jfs", "minix", "msdos", "nilfs2", "ntfs", "ntfs3",
        "omfs", "overlay", "overlayfs", "qnx4", "qnx6", "ramfs", "reiser4", "reiserfs", "romfs", "rootfs", "simfs",
        "squashfs", "sysv", "tmpfs", "ubifs", "udf", "ufs", "v7", "vfat", "xfs", "zfs", "zonefs",
        "autofs", "binder", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "cpuset", "debugfs", "devpts",
        "devtmpfs", "dlmfs", "efivarfs", "functionfs", "fuse.lxcfs", "fusectl", "gadgetfs", "hugetlbfs", "mqueue",
        "nfsd", "nsfs", "ocfs2_dlmfs", "openpromfs", "proc", "pstore", "resctrl", "rpc_pipefs", "securityfs",
        "selinuxfs", "smackfs", "spufs", "sysfs", "tracefs", "usbfs", "xenfs",
    }
)  # fmt: skip
#: Filesystems of the kernel whose server may be away.
_NETWORK = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "cvfs", "fhgfs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs",
        "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs",
        "vmhgfs", "wekafs",
    }
)  # fmt: skip
#: Those that lie on a block device which several machines have: their name is the UUID, not the mount's source.
_CLUSTER = frozenset({"gfs2", "ocfs2", "vmfs"})
#: The configuration of Proxmox VE, a database of the node's own.
_PMXCFS = b"/etc/pve"
_QUIET = frozenset(name.encode() for name in LOCAL - {"autofs"})

#: So many links does the kernel follow on the way to a file.
_MOST_LINKS = 40
_MOST_PLAIN = 4096
_ESCAPED = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: ``root`` is the folder of the filesystem that is seen at ``point``.

    Args:
        options: of the filesystem; ``flags`` are those of this mount of it.
        exported: this machine is the server of what is seen there: others may have it mounted by NFS.
    """

    id: int
    device: int
    root: bytes
    point: bytes
    filesystem: str
    source: bytes
    options: bytes = b""
    flags: bytes = b""
    exported: bool = False

    @property
    def described(self) -> str:
        """Its filesystem; of NFS with the version, which decides what its files can have."""
        version = re.search(rb"(?:^|,)vers=([0-9.]+)", self.options)
        if self.filesystem in {"nfs", "nfs4"} and version is not None:
            return f"nfs {version[1].decode()}"
        return self.filesystem

    @property
    def is_network(self) -> bool:
        """Whether other machines may have it mounted."""
        return self.exported or self.filesystem not in LOCAL

    def inside(self, path: bytes) -> bytes:
        """The path within the filesystem of what is seen at an absolute path below the mount."""
        below = path if self.point == b"/" else path[len(self.point) :]
        return b"/".join(part for part in (self.root + b"/" + below).split(b"/") if part)

    @property
    def locks_alone(self) -> bool:
        """Whether locks on its files are this machine's own, and no other client of the server hears of them."""
        told = {b"nolock", b"local_lock=all", b"local_lock=posix"}.intersection(self.options.split(b","))
        return self.filesystem in {"nfs", "nfs4"} and bool(told)

    @property
    def is_from_here(self) -> bool:
        """Whether this machine itself is the server, by an address that every machine has."""
        return b",addr=127." in self.options or b",addr=::1," in self.options + b","

    @property
    def may_wait(self) -> bool:
        """Whether its mere path may start a mount, a process or a long wait."""
        if self.filesystem.partition(".")[0] == "fuse":  # a process answers, wherever it gets that from
            return self.filesystem not in LOCAL and self.point != _PMXCFS
        return self.filesystem in _NETWORK or self.filesystem == "autofs"

    @property
    def is_named_by_source(self) -> bool:
        """Whether what another machine has mounted from a source of that name is the same filesystem."""
        if self.filesystem in LOCAL or self.filesystem in _CLUSTER:
            return False
        return self.filesystem in _NETWORK or not self.source.startswith(b"/dev/")


def unescape(raw: bytes) -> bytes:
    """A name as the kernel writes it in /proc, with its octal escapes resolved."""
    return _ESCAPED.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), raw)


def is_quiet(line: bytes) -> bool:
    """Whether a line of mountinfo is surely none of a mount that may make one wait; quicker told than by parsing it."""
    return line.partition(b" - ")[2].partition(b" ")[0] in _QUIET


def parse(mountinfo: bytes) -> list[Mount]:
    """The mounts of /proc/self/mountinfo (proc(5)), in their order; lines that do not fit are left out."""
    mounts = []
    for line in mountinfo.splitlines():
        first, separator, last = line.partition(b" - ")
        fields, more = first.split(b" "), last.split(b" ")
        if not separator or len(fields) < 6 or len(more) < 2:
            continue
        major, _, minor = fields[2].partition(b":")
        device = os.makedev(int(major), int(minor))
        filesystem = more[0].decode("ascii", "backslashreplace")
        source, options = map(unescape, [*more, b""][1:3])
        root, point, flags = map(unescape, fields[3:6])
        mounts.append(Mount(int(fields[0]), device, root, point, filesystem, source, options, flags))
    return mounts


def mounted(pid: str = "self") -> list[Mount]:
    """What is mounted as a process sees it; raises OSError."""
    with open(f"/proc/{pid}/mountinfo", "rb") as file:
        return parse(file.read())


def exported(etab: str = "/var/lib/nfs/etab") -> list[bytes]:
    """The folders that the kernel's NFS server gives to others, as exportfs has written them down; none without one."""
    try:
        with open(etab, "rb") as file:
            return [unescape(line.partition(b"\t")[0]) for line in file if line.startswith(b"/")]
    except OSError:
        return []


def opened(pid: str, descriptor: int | str) -> tuple[int, int | None]:
    """The mount that a process's open file was reached through, as the kernel numbers them (-1 where it does not say),
    and the file's number within its filesystem, which kernels before 5.14 do not say.

    Nothing is asked of the filesystem for that.

    Raises:
        OSError: it is not open any more, or another user's.
    """
    mount, inode = -1, None
    with open(f"/proc/{pid}/fdinfo/{descriptor}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                mount = int(line[7:])
            elif line.startswith(b"ino:"):
                inode = int(line[4:])
                break
    return mount, inode


class Mounts:
    """What is mounted on this machine, read once.

    Args:
        mounts: as :func:`parse` gives them.
        exports: folders that this machine exports by NFS.
    """

    def __init__(self, mounts: list[Mount], exports: Sequence[bytes] = ()) -> None:
        self._by_id = {mount.id: mount for mount in mounts}
        self._by_point = {mount.point: mount for mount in mounts}
        self._waits = any(mount.may_wait for mount in mounts)
        self._trusted: set[int] = set()
        #: Folders on the way to what was looked at that are no links: most images of a pool stand on a few bases.
        self._plain: set[bytes] = set()
        self._uuids: dict[int, str] | None = None
        found = [(self.of_path(path), path) for path in exports]
        #: Device, and path within the filesystem: an export may be a bind mount of what is used here by another name.
        self._exports = [(mount.device, _whole(mount, path)) for mount, path in found if mount is not None]

    @classmethod
    def of_this_machine(cls) -> Mounts:
        """The mounts that this process sees."""
        return cls(mounted(), exported())

    def of_descriptor(self, fd: int) -> Mount | None:
        """The mount that an open file was reached through; ``None`` where it came after the list was read."""
        mount = self._by_id.get(opened("self", fd)[0])
        if mount is None or not self._exports:
            return mount
        inside = _whole(mount, os.readlink(b"/proc/self/fd/%d" % fd))
        near = any(
            device == mount.device and (inside.startswith(path) or path.startswith(inside))
            for device, path in self._exports
        )
        return replace(mount, exported=True) if near else mount

    def of_path(self, path: bytes) -> Mount | None:
        """The mount that an absolute, normalised path leads to, by its words alone; nothing is touched."""
        while path:
            if path in self._by_point:
                return self._by_point[path]
            path = path.rpartition(b"/")[0]
        return self._by_point.get(b"/")

    def is_mount_point(self, path: bytes) -> bool:
        """Whether something is mounted at an absolute path, or where that leads to."""
        path = os.path.normpath(path)
        if path in self._by_point or self.may_wait(path):
            return path in self._by_point
        return os.path.realpath(path) in self._by_point

    def shared_below(self, paths: Sequence[bytes]) -> list[bytes]:
        """Where network filesystems are mounted below these folders."""
        tops = tuple(os.path.normpath(path).rstrip(b"/") + b"/" for path in paths)
        return sorted(
            mount.point for mount in self._by_id.values() if mount.is_network and mount.point.startswith(tops)
        )

    def trust(self, mount: Mount | None) -> None:
        """Look at paths on this filesystem from now on: a pool lies on it, so it is read anyway.

        Wherever it is mounted: a folder of the pool may be a bind mount of another one.
        """
        if mount is not None:
            self._trusted.add(mount.device)

    @property
    def waits(self) -> bool:
        """Whether there is a filesystem at all that could make one wait; what the system mounts in /proc is none."""
        return any(mount.may_wait and not mount.point.startswith(b"/proc/") for mount in self._by_id.values())

    def may_wait(self, path: bytes) -> bool:
        """Whether merely looking at a path could hang or mount something that no pool lies on."""
        if not self._waits:
            return False
        mount = self.of_path(path)
        return mount is not None and mount.may_wait and mount.device not in self._trusted

    def may_wait_there(self, path: bytes) -> bool:
        """As :meth:`may_wait`, of all that the kernel would come by on its way there: links may lead anywhere.

        Args:
            path: absolute. What lies below a mount that may make one wait is told by words alone.
        """
        at, names, links = b"", deque(path.split(b"/")), 0
        while names and self._waits and links <= _MOST_LINKS:
            name = names.popleft()
            if name in (b"", b".", b".."):
                at = at.rpartition(b"/")[0] if name == b".." else at
                continue
            below = at + b"/" + name
            if below in self._plain:
                at = below
                continue
            if self.may_wait(below):
                return self.may_wait(os.path.normpath(b"/".join([below, *names])))
            try:
                target = os.readlink(below)
            except (OSError, ValueError):
                at = below  # a file or folder, or nothing
                if names and len(self._plain) < _MOST_PLAIN:
                    self._plain.add(below)
                continue
            at, links = b"" if target.startswith(b"/") else at, links + 1
            names.extendleft(reversed(target.split(b"/")))
        return False

    def keys(self, mount: Mount, path: bytes, machine: str) -> tuple[str, str]:
        """The names of a filesystem and of a folder in it, equal wherever the same one is mounted.

        Args:
            mount: that the folder is on.
            path: the folder's absolute real path.
            machine: this machine's id, for filesystems that nobody else can see.

        Returns:
            ``fs_key`` and ``shared_key``.
        """
        if mount.is_named_by_source:
            kind = "nfs" if mount.filesystem == "nfs4" else mount.filesystem
            key = f"{kind}:{_text(mount.source.rstrip(b'/'))}"
            if machine and mount.is_from_here:
                key = f"{kind}:{machine}:{_text(mount.source.rstrip(b'/'))}"
        elif mount.filesystem not in LOCAL:
            key = f"{mount.filesystem}:{self._name(mount)}"
        else:
            key = f"fs:{machine}:{self._name(mount)}"
        return key, f"{key}{':' if mount.filesystem in LOCAL else ''}/{_text(mount.inside(path))}"

    def space_key(self, mount: Mount) -> str:
        """A name of what a mount's files share their space with: a ZFS pool, else the filesystem of all subvolumes."""
        if mount.filesystem == "zfs":
            return "zfs " + _text(mount.source.partition(b"/")[0])
        return self._name(mount) if mount.filesystem in LOCAL else _text(mount.source)

    def _name(self, mount: Mount) -> str:
        """A UUID, a ZFS data set, or at worst the device's numbers, which hold until the next start only."""
        if self._uuids is None:
            self._uuids = _uuids()
        uuid = self._uuids.get(mount.device)
        if uuid is None and mount.source.startswith(b"/dev/"):
            with contextlib.suppress(OSError):  # the device's node is not visible here: its numbers name it
                uuid = self._uuids.get(os.stat(mount.source).st_rdev)
        if uuid is None and mount.filesystem == "zfs":
            uuid = "zfs " + _text(mount.source)
        return uuid or f"{os.major(mount.device)}:{os.minor(mount.device)}"


def _uuids() -> dict[int, str]:
    folder, found = "/dev/disk/by-uuid", {}
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        with contextlib.suppress(OSError):  # a link to a device that has just gone
            found[os.stat(f"{folder}/{name}").st_rdev] = name
    return found


def _whole(mount: Mount, path: bytes) -> bytes:
    """A path within its filesystem, such that what lies below it begins with it."""
    return (b"/" + mount.inside(path)).rstrip(b"/") + b"/"


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")
