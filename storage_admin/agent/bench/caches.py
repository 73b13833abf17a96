"""What of a file is in this host's memory, and how it is brought out of there before it is read for a measurement."""

from __future__ import annotations

import ctypes
import mmap
import os

#: Bytes of a file that are looked at in one go.
_WINDOW = 1 << 30
DROP_CACHES = "/proc/sys/vm/drop_caches"
#: Filesystems with a cache of their own, which neither posix_fadvise(2) empties nor mincore(2) tells of.
OWN_CACHE = frozenset({"zfs"})
_FAILED = ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def can_drop_all() -> bool:
    """Whether this process may empty the host's page cache."""
    return os.access(DROP_CACHES, os.W_OK)


def drop(fds: list[int], filesystem: str | None) -> bool:
    """Bring files out of memory, so that the next read comes from the device.

    First these files alone, as the rest of the cache belongs to the guests; all of it only where that does not do.

    Args:
        fds: descriptors of the files.
        filesystem: that they are on, as in /proc/self/mountinfo.

    Returns:
        Whether nothing of them is in memory any more.
    """
    for fd in fds:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if filesystem not in OWN_CACHE and not any(map(resident_pages, fds)):
        return True
    try:
        with open(DROP_CACHES, "w", encoding="ascii") as switch:
            switch.write("3\n" if filesystem in OWN_CACHE else "1\n")
    except OSError:
        return False
    return not any(map(resident_pages, fds))


def resident_pages(fd: int) -> int:
    """How many pages of a file are in the page cache (mincore(2)).

    Raises:
        OSError: the kernel does not say.
    """
    size, found = os.fstat(fd).st_size, 0
    for start in range(0, size, _WINDOW):
        length = min(_WINDOW, size - start)
        pages = -(-length // mmap.PAGESIZE)
        address = _LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), "a file could not be mapped")
        try:
            states = ctypes.create_string_buffer(pages)
            if _LIBC.mincore(address, length, states):
                raise OSError(ctypes.get_errno(), "the kernel does not say what of a file is in memory")
            found += sum(state & 1 for state in states.raw)
        finally:
            _LIBC.munmap(address, length)
    return found
