"""Whether an image is in use, and how its users are kept away in the moment of the swap.

qemu locks single bytes of an image with open-file-description locks: a byte from 100 on for each thing that it does,
a byte from 200 on for each thing that it does not let others do (block/file-posix.c, RAW_PERM_* and RAW_LOCK_*).
A guest that writes holds 100, 101, 103, 201 and 203, a reader 100, 201 and 203. Other programs lock nothing, so
open descriptors, loop devices and swap are looked at as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator

from storage_admin.agent.host.in_use import (
    LOOKS,
    FileId,
    is_fellow,
    loop_devices,
    of_descriptor,
    only_reads,
    process_name,
    swap_files,
)
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.host.special_mounts import Descriptors
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import RefusedError

#: What a program does with an image: 100 reads, 101 writes, 103 resizes; and what it forbids others: 201 and 203.
WRITE, RESIZE, FORBID_WRITE, FORBID_RESIZE = 101, 103, 201, 203
ANY_USE = (100, 101, 102, 103, 200, 201, 202, 203)
#: What our own reading tools never hold, as they share everything.
CHANGES = (WRITE, RESIZE)

# struct flock as the kernel's 64-bit ABI lays it out: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi4x")
# From asm-generic/fcntl.h; Python's fcntl has no names for them before 3.9 on all builds.
_OFD_GETLK, _OFD_SETLK = 36, 37

#: The files that this process has locked for itself alone (:mod:`storage_admin.agent.swap.fence`): the descriptors
#: that hold the locks, which are open for writing.
fenced: dict[FileId, int] = {}

# linux/fcntl.h
_SETLEASE = 1024


def file_id(fd: int) -> FileId:
    """The identity of an open file."""
    return FileId.of(fd)


def locked_bytes(fd: int, among: Iterable[int] = ANY_USE) -> list[int]:
    """Which of qemu's lock bytes somebody else holds.

    Args:
        fd: descriptor of the image; locks taken on this very descriptor's description do not count.
        among: the bytes to ask about.
    """
    held = []
    fd = fenced.get(file_id(fd), fd)
    for byte in among:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        if _FLOCK.unpack(fcntl.fcntl(fd, _OFD_GETLK, asked))[0] != fcntl.F_UNLCK:
            held.append(byte)
    return held


def keep_writers_away(fd: int) -> None:
    """Hold what makes qemu refuse to start a guest that writes on this image, until the descriptor is closed.

    Writers that run already are not noticed by this: ask :func:`locked_bytes` afterwards, never before.

    Raises:
        RefusedError: ``image_in_use``, where somebody locked these bytes for himself alone.
        OSError: the filesystem has no such locks.
    """
    _hold(fd, (FORBID_WRITE, FORBID_RESIZE))


def keep_everybody_away(fd: int) -> None:
    """The same for a guest, or a tool of qemu, that would only read: to them the image looks as if it were written to.

    Raises:
        RefusedError, OSError: as :func:`keep_writers_away`.
    """
    _hold(fd, (FORBID_WRITE, FORBID_RESIZE, WRITE, RESIZE))


def _hold(fd: int, lock_bytes: Iterable[int]) -> None:
    for byte in lock_bytes:
        take(fd, fcntl.F_RDLCK, byte, 1)


def take(fd: int, how: int, first: int, length: int) -> None:
    """Lock some bytes of a file.

    Args:
        how: ``F_RDLCK``, or ``F_WRLCK`` of a descriptor that is open for writing.
        first, length: which bytes.

    Raises:
        RefusedError: ``image_in_use``.
        OSError: the filesystem has no such locks.
    """
    try:
        fcntl.fcntl(fd, _OFD_SETLK, _FLOCK.pack(how, os.SEEK_SET, first, length, 0))
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            raise RefusedError(
                "image_in_use", "another program, perhaps on another host, has locked the image; stop it and try again"
            ) from error
        raise


def let_go(fd: int) -> None:
    """Give back all locks that are held by a descriptor."""
    fd = fenced.get(file_id(fd), fd)
    fcntl.fcntl(fd, _OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))


def user(fd: int) -> str | None:
    """Who has a file open beside this process and its tools, by what qemu's locks do not tell.

    Args:
        fd: descriptor of the file, open for reading only.

    Returns:
        A phrase such as ``process 4711 (qemu-system-x86)``, or ``None``.

    Raises:
        RefusedError: ``guests_unknown``, where this process may not look.
    """
    files = frozenset([file_id(fd)])
    unseen: list[str] = []
    if (who := _process(files, unseen) or _loop_device(files) or _swap(files)) is not None:
        return who
    written = open_for_writing(fd)
    if written:
        return "a program that has it open for writing"
    # Root may look into every process but a few that the kernel protects. The lease answers for those.
    if unseen and (written is None or os.geteuid() != 0):
        raise RefusedError(
            "guests_unknown", f"the agent cannot see the open files of process {unseen[0]}; run the agent as root"
        )
    return None


def opener(files: Iterable[FileId]) -> str | None:
    """Who, beside this process and its tools, has one of these files open, as far as it can be seen."""
    wanted = frozenset(files)
    return _process(wanted, []) or _loop_device(wanted) or _swap(wanted)


def open_for_writing(fd: int) -> bool | None:
    """Whether anybody has a file open for writing: other processes, in whatever container, and the kernel itself.

    The kernel gives a read lease only on a file without writers; it is given back at once. Over NFS it rests on what
    the server granted with an open, and takes back for good when the file gets another name, also from us: a descriptor
    that was opened before tells nothing then, a fresh one does.

    Args:
        fd: descriptor of the file, open for reading only.

    Returns:
        ``None`` where the filesystem has no leases, or its server gives none.
    """
    if file_id(fd) in fenced:
        return False  # it was asked before the locks were taken, which keep writers away since
    leased = is_leased(fd)
    if leased is False and _is_network(fd):
        fresh = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            leased = is_leased(fresh)
        finally:
            os.close(fresh)
        if leased is False and not _gives_leases(fd):
            return None
    return None if leased is None else not leased


def is_leased(fd: int, kind: int = fcntl.F_RDLCK) -> bool | None:
    """Whether a read or write lease was granted, and given back; ``None`` where the filesystem has no leases."""
    try:
        fcntl.fcntl(fd, _SETLEASE, kind)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        if error.errno in {errno.EINVAL, errno.ENOTSUP, errno.ENOLCK, errno.EACCES}:
            return None
        raise
    fcntl.fcntl(fd, _SETLEASE, fcntl.F_UNLCK)
    return True


def _gives_leases(fd: int) -> bool:
    """Whether the server of a file gives leases at all: asked with a new file beside it that nobody else has.

    Some never do, and none does right after its start. Its name is one that a recovery removes.
    """
    name = f".sa-{os.urandom(8).hex()}.new"
    try:
        folder = _folder_of(fd)
    except OSError:
        return True
    try:
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
        except OSError:
            return True
        try:
            probe = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                return is_leased(probe) is True
            finally:
                os.close(probe)
        finally:
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(folder)


def _folder_of(fd: int) -> int:
    """The folder that an open file is in, by no link and by its very name there; the caller closes it.

    Who owns a folder above can put another one, or a link, in its place after the kernel has told the path.

    Raises:
        OSError: the file has no such name any more.
    """
    *above, name = os.readlink(f"/proc/self/fd/{fd}").split("/")[1:]
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open("/", flags)
    try:
        for part in above:
            below = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = below
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if FileId(found.st_dev, found.st_ino) != file_id(fd):
            raise FileNotFoundError(errno.ENOENT, "another file has its name", name)
    except BaseException:
        os.close(folder)
        raise
    return folder


def _is_network(fd: int) -> bool:
    mount = Mounts.of_this_machine().of_descriptor(fd)
    return mount is not None and mount.is_network


def _process(files: frozenset[FileId], unseen: list[str]) -> str | None:
    """The first process with one of the files open; ``unseen`` gets those that may not be looked into.

    One that ended before it was known to be no fellow agent may have been one: all is looked at again then.
    """
    for _ in range(LOOKS):
        unseen.clear()
        pid = _stranger(files, unseen)
        if pid is None or os.path.exists(f"/proc/{pid}"):
            break
    return None if pid is None else f"process {pid} ({process_name(pid)})"


def _stranger(files: frozenset[FileId], unseen: list[str]) -> str | None:
    """The id of that process.

    A fellow agent that only reads, such as one that takes a sample, does no harm and suffers none.
    """
    others = Descriptors({file.dev for file in files}, {file.inode for file in files})
    ours = {str(pid) for pid in (os.getpid(), *tools.running)}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or entry in ours:
            continue
        folder = f"/proc/{entry}/fd"
        try:
            found = [name for name in os.listdir(folder) if of_descriptor(entry, name, others) in files]
            if found and is_fellow(entry):
                found = [name for name in found if not only_reads(entry, name)]
            if found:
                return entry
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except PermissionError:
            unseen.append(entry)
    return None


def _loop_device(files: frozenset[FileId]) -> str | None:
    return next((f"loop device /dev/{loop.name}" for loop in loop_devices() if loop.file in files), None)


def _swap(files: frozenset[FileId]) -> str | None:
    return "the swap area of this host" if files.intersection(swap_files()) else None


@contextlib.contextmanager
def alone(folder: str, name: str, busy: str) -> Iterator[int]:
    """No other agent of this host is in here with that name meanwhile.

    Args:
        folder: of root's own; it is made where it is not there.
        busy: what is said where another one is.

    Yields:
        A descriptor of the file of that name: whoever has it holds the lock.

    Raises:
        RefusedError: ``busy``.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    fd = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not take_file(fd, 0.0):
            raise RefusedError("busy", busy)
        yield fd
    finally:
        os.close(fd)


def take_file(fd: int, patience: float, check: Callable[[], None] | None = None, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file (flock); whether that could be done within so many seconds.

    Args:
        check: called while it waits; raises to stop.
        kind: ``LOCK_EX`` or ``LOCK_SH``.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            if check is not None:
                check()
            time.sleep(0.01)
        else:
            return True
