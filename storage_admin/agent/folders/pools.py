"""What a file, a path and a job may be called, and how a file in a storage pool is reached without ever leaving it.

Of names the dashboard asks here as well; the agent asks again, for itself.

The pool's own path is the admin's word: it has to lead to a folder that root has listed, and to the same one as ever
(:func:`open_root`): it is told by its inode and its filesystem from another one that has taken its place
(:class:`Identity`). Everything below it was named by strangers: each component is opened by its name in the folder
above, and a symbolic link ends the walk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.folders import image_folders
from storage_admin.agent.host import nfs
from storage_admin.agent.host.mounts import Mount, Mounts
from storage_admin.agent.protocol import RefusedError, display, read_text, unb64

#: Bytes of a name in a folder (NAME_MAX).
LONGEST = 255
#: A job's id, as it stands in the names of its own files (``.sa-<job>.new``).
JOB = "[0-9a-zA-Z]{1,40}"
_JOB = re.compile(JOB)
#: What the name of a new image ends in: a file's name is what tools and people take its format from.
ENDINGS = {
    "qcow2": (".qcow2",), "raw": (".raw", ".img"), "vmdk": (".vmdk",), "vdi": (".vdi",), "vhdx": (".vhdx",),
    "vpc": (".vhd", ".vpc"),
}  # fmt: skip


def is_job(text: str) -> bool:
    """Whether it can be a job's id."""
    return _JOB.fullmatch(text) is not None


def is_ours(name: bytes | str) -> bool:
    """Whether a file's name is one of those that jobs give to files of their own."""
    return name.startswith(".sa-") if isinstance(name, str) else name.startswith(b".sa-")


def is_absolute(path: bytes) -> bool:
    """Whether the path is absolute, and one that a file can have."""
    return path.startswith(b"/") and b"\0" not in path


def fits_in_folder(name: bytes) -> bool:
    """Whether it is the name of one file in a folder by its length, and leads to no other folder below."""
    return 0 < len(name) <= LONGEST and b"/" not in name


def is_possible(name: bytes) -> bool:
    """Whether a file can have the name."""
    return fits_in_folder(name) and b"\0" not in name and name not in {b".", b".."}


def wrong_name(name: bytes) -> str:
    """Why no new image can be called that, in a few words; empty where it can, as far as its format is not looked at.

    What is no name because of NUL or ``..`` is refused with its path (:func:`components`).
    """
    if not fits_in_folder(name) or is_ours(name) or b"\n" in name:
        return f"the target needs a name of 1 to {LONGEST} bytes that is not reserved for files of jobs (.sa-…)"
    return ""


def wrong_name_for(name: bytes, form: str) -> str:
    """Why a new image of a format cannot have a name, in a few words; empty where it can."""
    if name.startswith(b"."):
        return "a name that begins with a dot hides the file; choose another name"
    endings = ENDINGS[form]
    if not any(name.lower().endswith(ending.encode()) and len(name) > len(ending) for ending in endings):
        return f"the name of a {form} image must end in {' or '.join(endings)}"
    return ""


_UNMOUNTED = (
    "The folder is empty and on another filesystem than before. Mount the pool again. "
    "Its images are shown as last seen."
)
#: Filesystems whose folders keep their inode's number for good; and until the machine starts again.
_LASTING = frozenset(
    {"btrfs", "ceph", "ext2", "ext3", "ext4", "f2fs", "gfs2", "jfs", "nfs", "nfs4", "ocfs2", "xfs", "zfs"}
)
_PASSING = frozenset({"overlay", "tmpfs"})
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_root(pool_path: bytes) -> int:
    """Open the folder of a storage pool, the one place where a path of a request begins; the caller closes it.

    Args:
        pool_path: its absolute path.

    Raises:
        RefusedError: ``folder_not_listed``, where root has not said that images are there; ``pool_changed``, where a
            link or another folder has taken its place; ``outside_pool``, where it is no absolute path.
        OSError: a folder is missing, is a mount point without its mount, or may not be read.
    """
    if not is_absolute(pool_path) or b".." in pool_path.split(b"/"):
        raise RefusedError("outside_pool", f"{display(pool_path)} is not an absolute path")
    found = image_folders.reach(pool_path)
    try:
        image_folders.check(found)
        folder = os.open(b".", _FOLDER, dir_fd=found.fd)
    finally:
        os.close(found.fd)
    if not is_as_expected(pool_path, folder):
        unmounted = is_unmounted(pool_path, folder)
        os.close(folder)
        if unmounted:
            raise FileNotFoundError(errno.ENOENT, _UNMOUNTED)
        raise RefusedError(
            "pool_changed",
            f"{display(pool_path)} is not the folder that was registered; restore or mount that folder, or have an "
            "admin confirm this one on the page of the pool",
        )
    return folder


def components(pool_path: bytes, path: bytes) -> list[bytes]:
    """The names that lead from a pool to a file in it; lexical, nothing is opened.

    Args:
        pool_path: absolute path of the pool's folder.
        path: absolute path of the file.

    Raises:
        RefusedError: ``outside_pool``, where the path is not beneath the pool or has ``..`` in it.
    """
    if not is_absolute(pool_path) or not is_absolute(path):
        raise RefusedError("outside_pool", f"{display(path)} is not an absolute path")
    above = [part for part in pool_path.split(b"/") if part not in (b"", b".")]
    names = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in names or b".." in above or names[: len(above)] != above or len(names) == len(above):
        raise RefusedError("outside_pool", f"{display(path)} is not in the storage pool {display(pool_path)}")
    return names[len(above) :]


def open_parent(pool_path: bytes, path: bytes) -> tuple[int, bytes]:
    """A descriptor of the folder that holds a file, and the file's name in it; the caller closes the descriptor.

    Args:
        pool_path: absolute path of the pool's folder.
        path: absolute path of a file beneath it.

    Raises:
        RefusedError: ``outside_pool``, where the path leaves the pool or a folder on the way is a symbolic link.
        OSError: a folder is missing or may not be read.
    """
    names = components(pool_path, path)
    folder = open_root(pool_path)
    for name in names[:-1]:
        try:
            below = _open(folder, name, _FOLDER, path)
        finally:
            os.close(folder)
        folder = below
    return folder, names[-1]


def open_beneath(pool_path: bytes, path: bytes) -> int:
    """Open a file of a pool to read it; no component beneath the pool's own path is followed through a symbolic link.

    Args:
        pool_path: absolute path of the pool's folder.
        path: absolute path of the file, beneath the pool.

    Returns:
        The descriptor. The caller checks by ``fstat`` that it is a regular file, and closes it.

    Raises:
        RefusedError: ``outside_pool``, where the path leaves the pool, a component is a symbolic link, or it is no
            regular file.
        OSError: as :func:`os.open`.
    """
    folder, name = open_parent(pool_path, path)
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            # Already to open a device or a pipe may do something to who stands behind it.
            raise RefusedError("outside_pool", f"{display(path)} is not a regular file")
        return _open(folder, name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, path)
    finally:
        os.close(folder)


@contextlib.contextmanager
def held(fd: int) -> Iterator[int]:
    """A descriptor that is closed in the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def _open(folder: int, name: bytes, flags: int, path: bytes) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        # O_DIRECTORY|O_NOFOLLOW on a link answers ENOTDIR, as on a file, without O_DIRECTORY it is ELOOP. What is
        # neither was a link a moment ago: somebody exchanges them.
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and not _is_file(folder, name)):
            raise RefusedError("outside_pool", f"{display(name)} in {display(path)} is a symbolic link") from error
        raise


def _is_file(folder: int, name: bytes) -> bool:
    return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def place(root: int, mounts: Mounts, machine: str) -> tuple[Mount | None, dict[str, Any]]:
    """What a pool's event says of its folder.

    Args:
        root: the open folder.
        mounts: of this machine; learns that this filesystem is read anyway.
        machine: this machine's id, for the keys of its own filesystems.

    Returns:
        The mount that it lies on, where that is known, and the fields; sizes are in bytes.
    """
    space, mount, found = os.fstatvfs(root), mounts.of_descriptor(root), identity(root)
    mounts.trust(mount)
    told: dict[str, Any] = {
        "dev": os.fstat(root).st_dev,
        "root": None if found is None else vars(found),
        "capacity_bytes": space.f_blocks * space.f_frsize,
        "available_bytes": space.f_bavail * space.f_frsize,
        # Free, but kept for root, as ext4 does: `df` counts it neither as used nor as available.
        "reserved_bytes": max(space.f_bfree - space.f_bavail, 0) * space.f_frsize,
    }
    if mount is not None:
        real = os.readlink(b"/proc/self/fd/%d" % root)
        fs_key, shared_key = mounts.keys(mount, real, machine)
        told.update(
            filesystem=mount.described,
            mount_source=mount.source.decode("utf-8", "backslashreplace"),
            network=mount.is_network,
            shared_key=shared_key,
            fs_key=fs_key,
        )
        if mount.is_network and (facts := nfs.facts(mount, root)) is not None:
            told["mount"] = facts | {"shared_key": shared_key, "fs_key": fs_key}
    return mount, told


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
    lasts = mount.filesystem in _LASTING and not name.endswith(f":{os.major(mount.device)}:{os.minor(mount.device)}")
    return Identity(os.fstat(fd).st_ino, name, read_text("/proc/sys/kernel/random/boot_id"), lasts)


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
