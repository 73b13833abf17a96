"""What a file is beside its content: owner, mode, extended attributes (ACLs and SELinux labels are some), flags."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import stat

from storage_admin.agent.protocol import HostError

# linux/fs.h
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
IMMUTABLE, APPEND_ONLY = 0x10, 0x20
#: Flags that a copy takes over: secure deletion, undelete, compress, synchronous, no dump, no atime, no copy on write.
_COPIED_FLAGS = 0x1 | 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x800000

#: Attributes that describe who uses the file now, or the hash of its bytes: wrong on any other file.
_NOT_COPIED = ("trusted.libvirt.security.", "security.ima", "security.evm")


def flags(fd: int) -> int:
    """The file's ``chattr`` flags; 0 on a filesystem without any."""
    buffer = array.array("l", [0])
    try:
        fcntl.ioctl(fd, _FS_IOC_GETFLAGS, buffer)
    except OSError as error:
        if error.errno in {errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            return 0
        raise
    return buffer[0] & 0xFFFFFFFF


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
        raise HostError(f"the copied {difference} of the image reads back otherwise")


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
