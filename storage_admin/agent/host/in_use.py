"""Which files something on this machine holds: a lock of qemu, an open descriptor, a loop device, swap.

qemu's locks alone do not tell: a raw image behind a loop device has none (docs/safety.md).

What on this machine has a file open, whoever asks: descriptors of processes, loop devices, swap.

Other agents of this very program on this machine: one that samples an image while another one is to rewrite it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from storage_admin.agent.host.mounts import unescape
from storage_admin.agent.host.special_mounts import Descriptors

# struct loop_info64 of linux/loop.h begins with lo_device, lo_inode and lo_rdevice; the whole is 232 bytes.
_LOOP_GET_STATUS64, _LOOP_INFO_BYTES = 0x4C05, 232
_LOOP_HEAD = struct.Struct("=QQQ")
_SWAPS = "/proc/swaps"
#: What a descriptor of a process answers that is closed by now, or lies on a dead network mount.
_NOT_ASKED = frozenset(
    {errno.ENOENT, errno.ESRCH, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN}
)


class FileId(NamedTuple):
    """A file by device and inode, whatever its name."""

    dev: int
    inode: int

    @classmethod
    def of(cls, place: int | str | bytes) -> FileId:
        """The identity of an open file, or of that at a path; raises OSError."""
        status = os.stat(place)
        return cls(status.st_dev, status.st_ino)


def of_descriptor(pid: str, descriptor: str, others: Descriptors) -> FileId | None:
    """The file behind a process's descriptor; ``None`` for sockets and pipes, and for what could make one wait.

    Raises:
        OSError: it is there and cannot be asked.
    """
    link = f"/proc/{pid}/fd/{descriptor}"
    try:
        if not os.readlink(link).startswith("/") or others.may_wait(pid, descriptor):
            return None
        return FileId.of(link)
    except OSError as error:
        if error.errno in _NOT_ASKED:
            return None
        raise


def process_name(pid: str) -> str:
    """What a process calls itself."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().rstrip(b"\n").decode("utf-8", "backslashreplace")
    except OSError:
        return "ended"


class Loop(NamedTuple):
    """A loop device: its name, the file behind it, and the number of that where it is a device itself, else 0."""

    name: str
    file: FileId
    number: int


def loop_devices() -> Iterator[Loop]:
    """The loop devices that have a file."""
    for name in os.listdir("/sys/block") if os.path.isdir("/sys/block") else ():
        if name.startswith("loop") and os.path.exists(f"/sys/block/{name}/loop/backing_file"):
            loop = _loop(name)
            if loop is not None:
                yield loop


def _loop(name: str) -> Loop | None:
    """As the kernel has it (loop(4)): the path may lie in another namespace."""
    try:
        fd = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            answer = fcntl.ioctl(fd, _LOOP_GET_STATUS64, bytes(_LOOP_INFO_BYTES))
        finally:
            os.close(fd)
        device, inode, number = _LOOP_HEAD.unpack_from(answer)
        return Loop(name, FileId(device, inode), number)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None  # detached meanwhile
    # No device node to ask (a stripped /dev): the path is second best, it may have been renamed since.
    try:
        with open(f"/sys/block/{name}/loop/backing_file", "rb") as file:
            status = os.stat(file.read().rstrip(b"\n"))
    except OSError:
        return None
    return Loop(name, FileId(status.st_dev, status.st_ino), status.st_rdev)


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
        return FileId.of(path)
    except OSError:
        return None


#: The bytes that qemu locks: 100 + n says that permission n is used, 200 + n that it is not shared (file-posix.c).
LOCK_RANGES = ((100, 103), (200, 203))
_LOCK = re.compile(rb"(?:->\s*)?(\w+)\s+\w+\s+(\w+)\s+(-?\d+)\s+([0-9a-f]+):([0-9a-f]+):(\d+)\s+(\d+)\s+(\d+|EOF)")
#: Reasons that are told of one file; a base of a hundred guests needs no hundred.
_MAX_REASONS = 4
#: How often processes are looked through where one ends in the midst of it.
LOOKS = 3


class Hold(NamedTuple):
    """One reason why a file is in use."""

    device: int
    inode: int
    why: str


@dataclass(frozen=True)
class Holds:
    """What is held. ``complete`` is false where another user's processes could not be looked into."""

    holds: tuple[Hold, ...]
    complete: bool


def holds(
    files: Mapping[int, Collection[int]],
    aliases: Mapping[int, int] | None = None,
    check: Callable[[], None] | None = None,
) -> Holds:
    """Why any of these files is in use by anything but this process and its children.

    Args:
        files: inodes by device (``st_dev``).
        aliases: where ``st_dev`` is not the device of the superblock (btrfs): the latter to the former.
        check: called now and then; raises to stop.

    Raises:
        OSError: /proc cannot be read.
    """
    found: dict[tuple[int, int], list[str]] = {}

    def note(device: int, inode: int, why: str) -> None:
        inodes = files.get(device)
        if inodes is not None and inode in inodes:
            reasons = found.setdefault((device, inode), [])
            if why not in reasons and len(reasons) < _MAX_REASONS:
                reasons.append(why)

    with ThreadPoolExecutor(1) as other:
        # The kernel stops all that lock files while it tells of the locks, and may wait for each of them to notice.
        asked = other.submit(lambda: list(_locks()))
        inodes = frozenset(inode for some in files.values() for inode in some)
        strangers, complete = _strangers(files, Descriptors({*files, *(aliases or ())}, inodes), check)
        locks = asked.result()
    for device, inode, why in locks:
        note(device, inode, why)
        if aliases and device in aliases:
            note(aliases[device], inode, why)
    for device, inode, pid in strangers:
        note(device, inode, f"open in process {pid} ({process_name(str(pid))})")
    for loop in loop_devices():
        note(*loop.file, f"behind the loop device {loop.name}")
    for file in swap_files():
        note(*file, "used as swap")
    flat = tuple(Hold(device, inode, why) for (device, inode), reasons in found.items() for why in reasons)
    return Holds(flat, complete)


def _strangers(
    files: Mapping[int, Collection[int]], others: Descriptors, check: Callable[[], None] | None
) -> tuple[list[tuple[int, int, int]], bool]:
    """Device, inode and process of each opening of the files by a stranger, and whether all could be looked into.

    Who is one of ours is known only of those that still run, before a look or after it. Where another one has ended
    meanwhile, as tools do that sample an image, all is looked at again; in the end it counts as a stranger.
    """
    before = set[int]()
    for _ in range(LOOKS):
        incomplete: list[int] = []
        opened = [one for one in _descriptors(incomplete, others, check) if one[1] in files.get(one[0], ())]
        # Asked only where it matters: it takes as long as all the rest.
        own = before | _own_processes() if opened or incomplete else before
        strangers = [one for one in opened if one[2] not in own]
        if all(os.path.exists(f"/proc/{pid}") for *_, pid in strangers):
            break
        before = own
    return strangers, own.issuperset(incomplete)


def _locks() -> Iterator[tuple[int, int, str]]:
    with open("/proc/locks", "rb") as file:
        lines = file.read().splitlines()
    for line in lines:
        fields = _LOCK.search(line)
        if fields is None:
            continue
        start, end = int(fields[7]), (1 << 63) if fields[8] == b"EOF" else int(fields[8])
        if any(start <= last and end >= first for first, last in LOCK_RANGES) and fields[1] != b"FLOCK":
            yield os.makedev(int(fields[4], 16), int(fields[5], 16)), int(fields[6]), "locked by qemu or a like program"


def _descriptors(
    incomplete: list[int], others: Descriptors, check: Callable[[], None] | None = None
) -> Iterator[tuple[int, int, int]]:
    """Device and inode of each open file, and the process that has it open."""
    for number, name in enumerate(os.listdir("/proc")):
        if check is not None and number % 100 == 0:
            check()
        if not name.isdigit():
            continue
        try:
            descriptors = os.listdir(f"/proc/{name}/fd")
        except PermissionError:
            incomplete.append(int(name))
            continue
        except OSError:
            continue  # the process has ended
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                file = of_descriptor(name, descriptor, others)
                if file is not None:
                    yield (*file, int(name))


def _own_processes() -> set[int]:
    """This process, other agents of this very program that this user runs, and all below them.

    An agent that samples an image reads it and is gone in a moment. The tools of one that rewrites an image hold qemu's
    locks on it, which are seen whoever holds them.
    """
    fellows = filter(is_fellow, filter(str.isdigit, os.listdir("/proc")))
    waiting, found = [os.getpid(), *map(int, fellows)], set()
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                    waiting += [int(child) for child in file.read().split()]
        except OSError:
            continue  # ended, or a kernel without the list of children: it counts as a stranger's process then
    return found


def is_fellow(pid: str) -> bool:
    """Whether a process is an agent that runs the same file as the same user."""
    program = os.fsencode(sys.argv[0])
    if not program.endswith(b".pyz"):
        return False  # it runs from a folder, as in development
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        return program in words[:4] and os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False  # the process has ended


def only_reads(pid: str, descriptor: str) -> bool:
    """Whether a process has a descriptor open for reading alone (proc_pid_fdinfo(5), "flags", in octal)."""
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as file:
            for line in file:
                if line.startswith("flags:"):
                    return int(line.split()[1], 8) & os.O_ACCMODE == os.O_RDONLY
    except (OSError, ValueError, IndexError):
        return False
    return False


def only_opens_to_read(pid: str) -> bool:
    """Whether a process that waits in ``open`` wants to read alone, as far as the kernel tells what it is called with.

    proc_pid_syscall(5): the call's number, then its arguments in hex. ``openat`` is 257 on x86-64 and 56 on ARM, and
    its third argument is the flags.
    """
    wanted = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/syscall", encoding="ascii") as file:
                words = file.read().split()
            if words and words[0] == {"x86_64": "257", "aarch64": "56"}.get(os.uname().machine):
                wanted.append(int(words[3], 16) & os.O_ACCMODE)
    except (OSError, ValueError, IndexError):
        return False
    return bool(wanted) and set(wanted) == {os.O_RDONLY}
