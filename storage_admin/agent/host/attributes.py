"""What a file is beside its content: owner, mode, extended attributes (ACLs and SELinux labels are some), flags.

Who may read a file, by its mode, its POSIX ACL and the folders on the way: what an overlay's owner gets to see of
its bases must be no more than that.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import stat
import struct
from dataclasses import dataclass

from storage_admin.agent.protocol import HostError

# linux/fs.h
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
IMMUTABLE, APPEND_ONLY = 0x10, 0x20
#: Flags that a copy takes over: secure deletion, undelete, compress, synchronous, no dump, no atime, no copy on write.
_COPIED_FLAGS = 0x1 | 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x800000

#: Attributes that describe who uses the file now, or the hash of its bytes: wrong on any other file.
_NOT_COPIED = ("trusted.libvirt.security.", "security.ima", "security.evm")


def told_flags(fd: int) -> int:
    """The file's ``chattr`` flags; raises OSError, also on a filesystem without any."""
    buffer = array.array("l", [0])
    fcntl.ioctl(fd, _FS_IOC_GETFLAGS, buffer)
    return buffer[0] & 0xFFFFFFFF


def flags(fd: int) -> int:
    """The file's ``chattr`` flags; 0 on a filesystem without any."""
    try:
        return told_flags(fd)
    except OSError as error:
        if error.errno in {errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            return 0
        raise


def has_capabilities(fd: int) -> bool:
    """Whether the file has capabilities (setcap(8)); the kernel takes them away with the first byte that is changed."""
    try:
        return bool(os.getxattr(fd, "security.capability"))
    except OSError:  # none, or a filesystem without any
        return False


def copy_flags(source: int, target: int) -> None:
    """Give an empty file the flags that have to be there before its first byte (no copy on write, compression)."""
    wanted = flags(source) & _COPIED_FLAGS
    present = flags(target)
    if wanted == present & _COPIED_FLAGS:
        return
    fcntl.ioctl(target, _FS_IOC_SETFLAGS, array.array("l", [present & ~_COPIED_FLAGS | wanted]))


def copy(source: int, target: int) -> None:
    """Give a file the owner, group, mode and extended attributes of another one, and read them back.

    Args:
        source: descriptor of the file to take them from.
        target: descriptor of the file to give them to.

    Raises:
        HostError: they could not be set, or read back otherwise.
    """
    status = os.fstat(source)
    wanted = _extended(source)
    try:
        os.fchown(target, status.st_uid, status.st_gid)
        for name in _extended(target).keys() - wanted.keys():
            os.removexattr(target, name)
        for name, value in wanted.items():
            os.setxattr(target, name, value)
        # Last: a change of owner takes set-id bits away, an ACL rewrites the group's bits.
        os.fchmod(target, stat.S_IMODE(status.st_mode))
    except OSError as error:
        raise HostError(f"the image's owner, mode or attributes could not be copied: {error.strerror}") from error
    if difference := differences(source, target):
        raise HostError(f"the {difference} of the image could not be copied exactly")


def cover(fd: int) -> None:
    """Give a file that was dressed (:func:`copy`) to this user alone again, whatever its access control list says."""
    os.fchown(fd, os.geteuid(), os.getegid())
    os.fchmod(fd, 0o600)


def differences(source: int, target: int) -> str:
    """What of two files' attributes differs, in words; empty where nothing does."""
    old, new = os.fstat(source), os.fstat(target)
    different = []
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        different.append("owner")
    if stat.S_IMODE(old.st_mode) != stat.S_IMODE(new.st_mode):
        different.append("mode")
    if _extended(source) != _extended(target):
        different.append("extended attributes")
    return " and ".join(different)


def _extended(fd: int) -> dict[str, bytes]:
    try:
        names = os.listxattr(fd)
        return {name: os.getxattr(fd, name) for name in names if not name.startswith(_NOT_COPIED)}
    except OSError as error:
        if error.errno in {errno.ENOTSUP, errno.ENOSYS}:
            return {}
        raise


READ, ENTER = 4, 1
ACL = "system.posix_acl_access"
#: linux/posix_acl_xattr.h: a version, then entries of tag, permissions and id, little-endian.
_ACL_VERSION, _ACL_HEAD, _ACL_ENTRY = 2, struct.Struct("<I"), struct.Struct("<HHI")
_USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x02, 0x04, 0x08, 0x10, 0x20


@dataclass(frozen=True)
class Who:
    """A user with the groups that he is in, as far as files tell: the host's user database is not asked, which may be
    a server's.
    """

    uid: int
    groups: frozenset[int]

    @classmethod
    def owns(cls, file: os.stat_result, folder: os.stat_result) -> Who:
        """A file's owner. Its group is one of his, unless the folder gives its own one to whatever is made in it."""
        given = folder.st_mode & stat.S_ISGID and folder.st_gid == file.st_gid
        return cls(file.st_uid, frozenset() if given else frozenset([file.st_gid]))

    @classmethod
    def keeps(cls, folder: os.stat_result) -> Who:
        """A folder's owner."""
        return cls(folder.st_uid, frozenset([folder.st_gid]))


@dataclass(frozen=True)
class Rights:
    """What a file or folder says of who may use it; ``acl`` is its extended attribute, empty where it has none."""

    uid: int
    gid: int
    mode: int
    acl: bytes = b""

    @classmethod
    def of(cls, place: int | bytes) -> Rights:
        """Those of a descriptor, or of a path; raises OSError."""
        status = os.stat(place)
        return cls(status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode), acl_of(place))

    def allow(self, who: Who, wanted: int) -> bool:
        """Whether they let a user read (:data:`READ`) or pass (:data:`ENTER`); an owner can always help himself."""
        if who.uid in (0, self.uid):
            return True
        if len(self.acl) >= _ACL_HEAD.size and _ACL_HEAD.unpack_from(self.acl)[0] == _ACL_VERSION:
            return self._by_acl(who, wanted)
        return bool((self.mode >> 3 if self.gid in who.groups else self.mode) & wanted)

    def _by_acl(self, who: Who, wanted: int) -> bool:
        """The order of acl(5): the user by name, then any group that grants it, then the others."""
        end = len(self.acl) - (len(self.acl) - _ACL_HEAD.size) % _ACL_ENTRY.size
        entries = list(_ACL_ENTRY.iter_unpack(self.acl[_ACL_HEAD.size : end]))
        mask = next((rights for tag, rights, _ in entries if tag == _MASK), 7)
        for tag, rights, number in entries:
            if tag == _USER and number == who.uid:
                return bool(rights & mask & wanted)
        groups = [
            rights
            for tag, rights, number in entries
            if (tag == _GROUP_OBJ and self.gid in who.groups) or (tag == _GROUP and number in who.groups)
        ]
        if groups:
            return any(rights & mask & wanted for rights in groups)
        return any(rights & wanted for tag, rights, _ in entries if tag == _OTHER)


def acl_of(place: int | bytes) -> bytes:
    """A file's POSIX ACL as the kernel gives it; empty where it has none."""
    try:
        return os.getxattr(place, ACL)
    except OSError:  # none, or a filesystem without any: the mode alone decides
        return b""


def closed_folder(who: Who, path: bytes) -> bytes | None:
    """The first folder on the way to a file that a user may not pass; ``None`` where he gets there.

    Args:
        path: absolute and real: without symbolic links.
    """
    for folder in (path[:at] or b"/" for at, letter in enumerate(path) if letter == ord("/")):
        try:
            if not Rights.of(folder).allow(who, ENTER):
                return folder
        except OSError:
            return folder
    return None


def may_read(who: Who, place: int | bytes) -> bool:
    """Whether a user may open that file for reading, by its own rights and those of the folders on its way.

    Args:
        place: a descriptor, or a path.

    Raises:
        OSError: it cannot be looked at.
    """
    rights = Rights.of(place)
    if who.uid in (0, rights.uid):
        return True
    real = os.readlink(b"/proc/self/fd/%d" % place) if isinstance(place, int) else os.path.realpath(place)
    return rights.allow(who, READ) and closed_folder(who, real) is None
