"""What on this machine has a file open, whoever asks: descriptors of processes, loop devices, swap."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from storage_admin.agent.host.hung_mounts import Descriptors
from storage_admin.agent.host.mounts import unescape

# struct loop_info64 of linux/loop.h begins with lo_device and lo_inode; the whole is 232 bytes.
_LOOP_GET_STATUS64, _LOOP_INFO_BYTES = 0x4C05, 232
_LOOP_HEAD = struct.Struct("=QQ")
_SWAPS = "/proc/swaps"
#: What a descriptor of a process answers that is closed by now, or lies on a dead network mount.
_NOT_ASKED = frozenset(
    {errno.ENOENT, errno.ESRCH, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN}
)


class FileId(NamedTuple):
    """A file by device and inode, whatever its name."""

    dev: int
    inode: int


def of_descriptor(pid: str, descriptor: str, others: Descriptors) -> FileId | None:
    """The file behind a process's descriptor; ``None`` for sockets and pipes, and for what could make one wait.

    Raises:
        OSError: it is there and cannot be asked.
    """
    link = f"/proc/{pid}/fd/{descriptor}"
    try:
        if not os.readlink(link).startswith("/") or others.may_wait(pid, descriptor):
            return None
        status = os.stat(link)
    except OSError as error:
        if error.errno in _NOT_ASKED:
            return None
        raise
    return FileId(status.st_dev, status.st_ino)


def process_name(pid: str) -> str:
    """What a process calls itself."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().rstrip(b"\n").decode("utf-8", "backslashreplace")
    except OSError:
        return "ended"


def loop_devices() -> Iterator[tuple[str, FileId]]:
    """The loop devices that have a file, by name."""
    for name in os.listdir("/sys/block") if os.path.isdir("/sys/block") else ():
        if name.startswith("loop") and os.path.exists(f"/sys/block/{name}/loop/backing_file"):
            file = _behind_loop(name)
            if file is not None:
                yield name, file


def _behind_loop(name: str) -> FileId | None:
    """As the kernel has it (loop(4)): the path may lie in another namespace."""
    try:
        fd = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            answer = fcntl.ioctl(fd, _LOOP_GET_STATUS64, bytes(_LOOP_INFO_BYTES))
        finally:
            os.close(fd)
        return FileId(*_LOOP_HEAD.unpack_from(answer))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None  # detached meanwhile
    # No device node to ask (a stripped /dev): the path is second best, it may have been renamed since.
    try:
        with open(f"/sys/block/{name}/loop/backing_file", "rb") as file:
            return _of_path(file.read().rstrip(b"\n"))
    except OSError:
        return None


def swap_files(table: str = _SWAPS) -> Iterator[FileId]:
    """The files that this machine swaps to; none where the kernel knows no swap."""
    try:
        with open(table, "rb") as file:
            lines = file.read().splitlines()[1:]
    except FileNotFoundError:
        return
    for line in lines:
        fields = line.split()
        found = _of_path(unescape(fields[0])) if fields[1:2] == [b"file"] else None
        if found is not None:
            yield found


def _of_path(path: bytes) -> FileId | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return FileId(status.st_dev, status.st_ino)
