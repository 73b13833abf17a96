"""A name moves in its folder, unless the new one is taken: renameat2(2), which Python has no call for."""

from __future__ import annotations

import ctypes
import errno
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
# linux/fs.h
_NOREPLACE = 1
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
    call = getattr(_LIBC, "renameat2", None)
    if call is None:
        return False
    if call(folder, old, folder, new, _NOREPLACE) == 0:
        os.fsync(folder)
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code))
