"""A kernel and an initial file system, copied into the scratch folder before libvirt is shown them.

libvirt gives the files of a guest to the user that runs it, and takes them back afterwards: what is not a copy would
change its owner meanwhile. A guest can show what it boots. So this is no way to other files of the host: they are in an
image folder, as all that the agent reads, or where the system keeps its kernels, and then everybody may read them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from storage_admin.agent.bench.step import Bench
from storage_admin.agent.folders import image_folders
from storage_admin.agent.host import attributes, space
from storage_admin.agent.protocol import INVALID, RefusedError, display

#: The most that a kernel and its initial file system may take together, in bytes.
MOST_BYTES = 256 << 20

#: Where a kernel has its mark: Linux for x86 (boot protocol, "HdrS"), for arm64 (booting.rst, "magic"), and those that
#: EFI unpacks (zboot, "zimg").
KERNELS = ((0x202, b"HdrS"), (0x38, b"ARM\x64"), (0x4, b"zimg"))
#: How an initial file system begins: cpio ("newc", "crc"), gzip, xz, zstd, lz4, bzip2, lzma, lzo.
ARCHIVES = tuple(
    (0, magic)
    for magic in (
        b"070701", b"070702", b"\x1f\x8b\x08", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd", b"\x02\x21\x4c\x18", b"BZh",
        b"\x5d\x00\x00", b"\x89LZO",
    )
)  # fmt: skip
#: Where the system keeps its kernels, and what belongs to them.
_OF_THE_SYSTEM = (b"/boot", b"/lib/modules", b"/usr/lib/modules")
_ANYBODY = attributes.Who(-1, frozenset())
_CHUNK = 1 << 20


def bring(bench: Bench, path: str, name: str, marks: Sequence[tuple[int, bytes]], what: str) -> None:
    """Copy a file of this host into the scratch folder.

    Args:
        path: absolute; only root's own links to folders are followed.
        name: of the copy.
        marks: offset and content, of which one has to be there.
        what: the file is to be, as in "is no *kernel*".

    Raises:
        RefusedError: ``folder_not_listed``; ``invalid``: it is not there, or none of these, or a system's file that not
            everybody may read; ``not_enough_space``; as :func:`image_folders.reach`.
    """
    shown = display(os.fsencode(path))
    try:
        source = _open(os.fsencode(path), shown)
    except OSError as error:
        raise RefusedError(INVALID, f"{shown} cannot be opened on this host: {error.strerror}") from error
    try:
        if not any(os.pread(source, len(mark), offset) == mark for offset, mark in marks):
            raise RefusedError(INVALID, f"{shown} is not a {what}")
        _copy(bench, source, name, os.fstat(source).st_size)
    finally:
        os.close(source)


def _open(path: bytes, shown: str) -> int:
    """The file, open; it is looked at before, since already to open it may do something."""
    folder = image_folders.reach(os.path.dirname(path))
    try:
        of_the_system = image_folders.is_beneath(folder.real, _OF_THE_SYSTEM)
        if not of_the_system:
            image_folders.check(folder)
        seen = os.open(os.path.basename(path), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd)
    finally:
        os.close(folder.fd)
    try:
        status = os.fstat(seen)
        if stat.S_ISLNK(status.st_mode):
            raise RefusedError(INVALID, f"{shown} is a symbolic link; specify the file that it leads to")
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            raise RefusedError(INVALID, f"{shown} is not a regular file of at most {MOST_BYTES} bytes")
        # Whoever owns it: libvirt gives a kernel to the user of a guest that it starts with that.
        if of_the_system and not attributes.may_read(_ANYBODY, seen):
            raise RefusedError(
                INVALID,
                f"not every user on this host may read {shown}; put a copy into an image folder, and specify that one",
            )
        return os.open(f"/proc/self/fd/{seen}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(seen)


def _copy(bench: Bench, source: int, name: str, size: int) -> None:
    copy = bench.scratch.open(name, os.O_WRONLY | os.O_CREAT)
    try:
        done = 0
        while done < size and (chunk := os.pread(source, min(_CHUNK, size - done), done)):
            bench.io.check()
            space.watch(bench.scratch.fd, bench.reserve)
            done += os.pwrite(copy, chunk, done)
        os.fsync(copy)
    finally:
        os.close(copy)
