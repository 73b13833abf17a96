"""How names move in a folder without taking one away from a stranger's file: renameat2(2), which Python does not know.

Filesystems without that call, as NFS, get the nearest thing: there it takes two steps, and what stands under a name is
looked at afterwards. A server may have done what it answers an error to (the answer was lost, and the request was sent
again): then the inode tells.
"""

from __future__ import annotations

import ctypes
import errno
import os

from storage_admin.agent.swap.outcome import stat_in, unlink

_LIBC = ctypes.CDLL(None, use_errno=True)
# linux/fs.h
_NOREPLACE, _EXCHANGE = 1, 2
#: A filesystem that cannot, as NFS; a kernel or a C library (glibc 2.28) that does not know the call.
_CANNOT = frozenset({errno.EINVAL, errno.ENOSYS})


def move(folder: int, old: bytes, new: bytes) -> bool:
    """Rename a file within a folder; whatever ``old`` leads to in that very moment has the name ``new`` then.

    Returns:
        Whether this can be done there.

    Raises:
        FileExistsError: there is something of that name.
        OSError: the host failed, or does not allow it.
    """
    return _rename(folder, old, new, _NOREPLACE)


def exchange(folder: int, one: bytes, other: bytes) -> bool:
    """Two files of a folder get each other's name in one step, whichever files these are in that very moment.

    Returns:
        Whether this can be done there.

    Raises:
        FileNotFoundError: there is no file of one of the names.
        OSError: the host failed, or does not allow it.
    """
    return _rename(folder, one, other, _EXCHANGE)


def _rename(folder: int, old: bytes, new: bytes, flag: int) -> bool:
    call = getattr(_LIBC, "renameat2", None)
    if call is None:
        return False
    if call(folder, old, folder, new, flag) == 0:
        os.fsync(folder)
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code))


def take(folder: int, name: bytes, hidden: bytes) -> None:
    """Give whatever has a name one of a job's own names instead, which nothing has: afterwards it can be looked at.

    Raises:
        FileNotFoundError: nothing has the name.
        FileExistsError: something has the job's own one.
        OSError: as :func:`move`.
    """
    if move(folder, name, hidden):
        return
    if stat_in(folder, hidden) is not None:
        raise FileExistsError(errno.EEXIST, "a job's own name is taken")
    try:
        os.rename(name, hidden, src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError:
        if stat_in(folder, hidden) is None:
            raise
    os.fsync(folder)


def give(folder: int, hidden: bytes, name: bytes) -> None:
    """Give what has one of a job's own names a name that nothing has.

    Raises:
        FileExistsError: something has that name, and keeps it.
        OSError: as :func:`move`.
    """
    if move(folder, hidden, name):
        return
    try:
        os.link(hidden, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        ours, named = stat_in(folder, hidden), stat_in(folder, name)
        if ours is None or not ours.same_file(named):
            raise
    os.fsync(folder)
    unlink(folder, hidden)


def link(fd: int, folder: int, name: bytes) -> None:
    """Give a file, and no other one, a further name that nothing has.

    Args:
        fd: descriptor of the file, which has a name in that filesystem.
        folder: descriptor of the folder.
        name: in the folder.

    Raises:
        FileExistsError: something has that name, and keeps it.
        OSError: the host failed, or does not allow it.
    """
    try:
        os.link(b"/proc/self/fd/%d" % fd, name, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        named, ours = stat_in(folder, name), os.fstat(fd)
        if named is None or (named.dev, named.inode) != (ours.st_dev, ours.st_ino):
            raise
    os.fsync(folder)
