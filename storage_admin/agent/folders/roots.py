"""The folder of a storage pool: reached from ``/`` down, and known again.

Its path is an admin's word, but whoever owns a folder on the way can put a link there. So each name is opened in the
folder above, and a link is followed only where nobody but root can have made it. And a folder is told by its inode and
its filesystem from another one that has taken its place.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.host.mounts import Mount, Mounts
from storage_admin.agent.protocol import RefusedError, display, unb64

_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40
#: Filesystems whose folders keep their inode's number for good; and until the machine starts again.
_LASTING = frozenset(
    {"btrfs", "ceph", "ext2", "ext3", "ext4", "f2fs", "gfs2", "jfs", "nfs", "nfs4", "ocfs2", "xfs", "zfs"}
)
_PASSING = frozenset({"overlay", "tmpfs"})


@dataclass(frozen=True)
class Reached:
    """A folder that a path leads to: its descriptor (``O_PATH``), its path without links, and all folders to it."""

    fd: int
    real: bytes
    ids: tuple[tuple[int, int], ...]


def reach(path: bytes) -> Reached:
    """Go down to a folder; the caller closes the descriptor.

    Args:
        path: absolute, without ``..``.

    Raises:
        RefusedError: ``pool_changed``, where a link that others than root may have made stands in the way.
        OSError: a folder is missing, or is none.
    """
    steps = [_Step(os.open("/", _LOOK | os.O_DIRECTORY), b"", True)]
    try:
        names, links = deque(_parts(path)), 0
        while names:
            name = names.popleft()
            if name == b"..":
                if len(steps) > 1:
                    os.close(steps.pop().fd)
                continue
            below = _below(steps[-1], name)
            if isinstance(below, _Step):
                steps.append(below)
                continue
            links += 1
            if not below.is_roots or links > _MOST_LINKS:
                raise RefusedError(
                    "pool_changed",
                    f"{display(name)} in the path {display(path)} is a symbolic link that users other than root "
                    "could have created; restore the folder, or register the folder that the link leads to",
                )
            if below.target.startswith(b"/"):
                while len(steps) > 1:
                    os.close(steps.pop().fd)
            names.extendleft(reversed(_parts(below.target)))
        ids = tuple((status.st_dev, status.st_ino) for status in (os.fstat(step.fd) for step in steps))
        return Reached(os.dup(steps[-1].fd), b"/" + b"/".join(step.name for step in steps[1:]), ids)
    finally:
        for step in steps:
            os.close(step.fd)


def real_path(path: bytes) -> bytes:
    """Where a folder is, as :func:`reach` goes."""
    found = reach(path)
    os.close(found.fd)
    return found.real


@dataclass(frozen=True)
class _Step:
    """A folder on the way; ``only_root``: nobody else can have put it there, or on the way to it."""

    fd: int
    name: bytes
    only_root: bool

    @property
    def takes_links(self) -> bool:
        """Whether a link in it that is root's was made by root. In a sticky folder it may be another name of one."""
        return self.only_root and is_roots_folder(os.fstat(self.fd))


@dataclass(frozen=True)
class _Link:
    """A symbolic link on the way."""

    target: bytes
    is_roots: bool


def _below(above: _Step, name: bytes) -> _Step | _Link:
    try:
        # As a folder first: that is what starts an automount.
        fd = os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=above.fd)
    except OSError as error:
        if error.errno not in {errno.ENOTDIR, errno.ELOOP}:
            raise
        fd = os.open(name, _LOOK, dir_fd=above.fd)
        mode = os.fstat(fd).st_mode
        # A folder by now, where somebody exchanges it with a link: then that is what is gone into.
        if not stat.S_ISDIR(mode):
            try:
                if not stat.S_ISLNK(mode):
                    raise
                is_roots = above.takes_links and os.fstat(fd).st_uid in {0, os.geteuid()}
                return _Link(os.readlink(b"", dir_fd=fd), is_roots)
            finally:
                os.close(fd)
    return _Step(fd, name, above.only_root and (is_roots_folder(os.fstat(fd)) or is_sticky(os.fstat(fd))))


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]


def is_roots_folder(status: os.stat_result) -> bool:
    """Whether only root can put names into a folder, or exchange them."""
    return is_roots(status) and stat.S_ISDIR(status.st_mode)


def is_sticky(status: os.stat_result) -> bool:
    """Whether a folder is root's, and nobody can take or exchange another user's names in it, as in ``/tmp``."""
    return status.st_uid == 0 and stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)


def is_roots(status: os.stat_result) -> bool:
    """Whether a file belongs to root, and only root may write to it."""
    return status.st_uid in {0, os.geteuid()} and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


# The same folder as before


@dataclass(frozen=True)
class Identity:
    """Which folder one is.

    Args:
        inode: its number.
        filesystem: its filesystem's UUID or server, else its device's numbers.
        boot: this start of the machine.
        lasts: whether both stay the same when the machine starts again.
    """

    inode: int
    filesystem: str
    boot: str
    lasts: bool

    @classmethod
    def parse(cls, fields: Any) -> Identity | None:
        """As it travels; ``None`` where it is none."""
        try:
            return cls(int(fields["inode"]), str(fields["filesystem"]), str(fields["boot"]), bool(fields["lasts"]))
        except (KeyError, TypeError, ValueError):
            return None

    def may_be(self, other: Identity) -> bool:
        """Whether two looks can have been at the same folder."""
        if self.boot != other.boot and not (self.lasts and other.lasts):
            return True
        return (self.inode, self.filesystem) == (other.inode, other.filesystem)


def identity(fd: int) -> Identity | None:
    """Which folder an open one is; ``None`` on a filesystem that gives its folders new numbers as it likes."""
    mounts = Mounts.of_this_machine()
    mount = mounts.of_descriptor(fd)
    if mount is None or mount.filesystem not in _LASTING | _PASSING:
        return None
    name = mounts.keys(mount, mount.point, "")[0]
    lasts = mount.filesystem in _LASTING and not name.endswith(_numbers(mount))
    return Identity(os.fstat(fd).st_ino, name, boot_id(), lasts)


def _numbers(mount: Mount) -> str:
    return f":{os.major(mount.device)}:{os.minor(mount.device)}"


def boot_id() -> str:
    """This start of the machine, as the kernel names it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


_expected: dict[bytes, Identity] = {}


def expect(given: dict[str, Any]) -> None:
    """From now on, these paths have to lead to these folders.

    Args:
        given: as in :class:`storage_admin.agent.protocol.Request`.
    """
    _expected.clear()
    for path, fields in given.items():
        found = Identity.parse(fields)
        try:
            if found is not None:
                _expected[unb64(path)] = found
        except ValueError:
            continue


def is_as_expected(path: bytes, fd: int) -> bool:
    """Whether the folder that a pool's path leads to is the one that was confirmed; true where none was."""
    wanted = _expected.get(path)
    now = identity(fd) if wanted is not None else None
    return wanted is None or now is None or wanted.may_be(now)


def is_unmounted(path: bytes, fd: int) -> bool:
    """Whether a folder that is not the one that was confirmed is a mount point without its mount."""
    wanted, now = _expected.get(path), identity(fd)
    return wanted is not None and now is not None and now.filesystem != wanted.filesystem and not os.listdir(fd)
