"""What a tool that works on a guest's bytes can reach: the files that it was given, its own libraries, nothing else.

A header is read by us first and by the tool again. Whoever may write to the file can change it in between, and what he
names then (an external data file, an extent, a base, ``nbd:`` or ``http:``) would be opened by a tool that is root. So:

- Landlock (Linux 5.13, ``Documentation/userspace-api/landlock.rst``) has one rule for each given file, by its inode,
  and only for reading unless it is to be written to. Opening a descriptor anew by ``/proc/self/fd`` is asked as well.
- No sockets. Landlock leaves them alone, and a network namespace leaves those alone that have a name in the file
  system, so a filter of system calls refuses to make any; the network namespace is empty besides.
- Of root's capabilities it keeps those without which it could not open and fill its files.

Where the kernel has no Landlock, the tool gets a file system of its own, in which there is nothing else; see
:class:`Enclosure`. Where neither can be had, files that somebody else may write are refused.

A file system for one tool, with nothing in it but what the tool was given: for kernels without Landlock.

There is no ``/proc`` in it, through which others lead out: what a tool was given as a descriptor stands there as a file
of its own, ``/proc/self/fd/N``, bound read-only unless it is to be written to. Its network is empty as well.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Callable

from storage_admin.agent.protocol import RefusedError, display

LIBC = ctypes.CDLL(None, use_errno=True)

# linux/sched.h, linux/mount.h
_NEW_MOUNTS, _NEW_IPC, _NEW_NET = 0x00020000, 0x08000000, 0x40000000
_READ_ONLY, _NO_SETUID, _REMOUNT, _BIND, _MOVE, _RECURSIVE, _PRIVATE = 1, 2, 32, 4096, 8192, 16384, 1 << 18
#: Where it is put together, in a mount namespace of its own; what stands there is covered only for the tool.
_ROOT = "/tmp"  # noqa: S108 - nothing is read from it


def checked(result: int) -> int:
    """What a call of :data:`LIBC` answered; raises OSError where that is -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def can_enclose() -> bool:
    """Whether this process may make such a file system: tried out."""
    program = "/bin/true"
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    with open("/dev/null", "rb") as empty:
        enclosure = Enclosure(read=[empty.fileno()], written=[], seen=[*libraries, program], used=[])
        try:
            done = subprocess.run([program], preexec_fn=enclosure.enter, check=False)
        except (OSError, subprocess.SubprocessError):
            return False
    return done.returncode == 0


class Enclosure:
    """What the tool will see.

    Args:
        read: descriptors of files that it may read.
        written: of those that it may write as well.
        seen: absolute paths of files and folders that it may read; those that are missing are left out.
        used: of those that it may write as well.
    """

    def __init__(
        self, *, read: Sequence[int], written: Sequence[int], seen: Sequence[str], used: Sequence[str]
    ) -> None:
        self._fds = [(fd, f"/proc/self/fd/{fd}", fd in written) for fd in sorted({*read, *written})]
        self._links, self._paths = [], []
        for path in dict.fromkeys((*seen, *used)):
            if os.path.islink(path) and os.path.isdir(path):
                self._links.append((path, os.readlink(path)))
            elif os.path.exists(path):
                self._paths.append((path, path in used))

    def enter(self) -> None:
        """Called in the tool's process, between fork and exec.

        Raises:
            OSError: it cannot be made, or the file that a descriptor leads to has another name by now.
        """
        checked(LIBC.unshare(_NEW_MOUNTS | _NEW_IPC | _NEW_NET))
        self._mount(None, "/", _RECURSIVE | _PRIVATE)
        places = [(_named(fd), place, written) for fd, place, written in self._fds]
        places += [(os.open(path, os.O_PATH), path, used) for path, used in self._paths]
        self._mount("none", _ROOT, _NO_SETUID, b"tmpfs")
        for path, leads_to in self._links:
            os.makedirs(_ROOT + os.path.dirname(path), exist_ok=True)
            os.symlink(leads_to, _ROOT + path)
        for fd, place, written in places:
            self._bind(fd, _ROOT + place, written=written)
        self._mount(None, _ROOT, _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID)
        os.chdir(_ROOT)
        self._mount(".", "/", _MOVE)
        os.chroot(".")
        os.chdir("/")

    def _bind(self, fd: int, place: str, *, written: bool) -> None:
        source = f"/proc/self/fd/{fd}"
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.isdir(source):
            os.makedirs(place, exist_ok=True)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))
        self._mount(source, place, _BIND)
        if not written:
            self._mount(None, place, _BIND | _REMOUNT | _READ_ONLY | _NO_SETUID)

    @staticmethod
    def _mount(source: str | None, target: str, flags: int, kind: bytes | None = None) -> None:
        named = None if source is None else os.fsencode(source)
        checked(LIBC.mount(named, os.fsencode(target), kind, ctypes.c_ulong(flags), None))


def _named(fd: int) -> int:
    """The same file in this mount namespace, where the descriptor's own mount is none that could be bound."""
    found = os.open(os.readlink(b"/proc/self/fd/%d" % fd), os.O_PATH | os.O_NOFOLLOW)
    if not os.path.sameopenfile(fd, found):
        raise FileNotFoundError("the file has another name by now")
    return found


LANDLOCK, NAMESPACES = "landlock", "namespaces"

# linux/landlock.h; the numbers of its system calls are the same on every machine.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_MAKE_SOCKET = 1 << 9
#: To ask a device anything but for its bytes (version 5): who is to write to one asks whether it can be.
_USE_DEVICE = 1 << 15
_PATH_BENEATH = 1
#: All rights over files that a version of Landlock knows, which are all refused but for the rules.
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
#: To bind and to connect over TCP (version 4); abstract unix sockets and signals to others (version 6).
_TCP, _SCOPES = 3, 3

# linux/prctl.h, linux/seccomp.h, linux/sched.h, linux/capability.h
_DIE_WITH_PARENT, _SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER, _DROP_CAPABILITY = 1, 38, 22, 2, 24
_NEW_NETWORK = 0x40000000
#: Capabilities that are kept: to open files whatever their mode, and to fill a disk to what is set aside for root.
_KEPT = frozenset({1, 24})
#: CAP_SYS_ADMIN, by which a device is connected.
_CONNECTS = 21
_CAPABILITIES = 64

#: By machine: what its system calls are marked with (linux/audit.h), and the numbers of those that make a socket.
_SOCKETS = {
    "x86_64": (0xC000003E, (41, 53)),
    "aarch64": (0xC00000B7, (198, 199)),
    "riscv64": (0xC00000F3, (198, 199)),
    "loongarch64": (0xC0000102, (198, 199)),
    "ppc64le": (0xC0000015, (102, 326, 333)),
    "s390x": (0x80000016, (102, 359, 360)),
}
#: io_uring can make sockets without any of these; the number is the same on every machine.
_IO_URING_SETUP = 425
#: Calls of the other ABI of x86_64 are those from here on.
_X32 = 0x40000000

#: Folders with what a dynamically linked program loads, and single files that tools ask for before they do anything.
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_LINKER = ("/etc/ld.so.cache", "/dev/urandom")
_NOTHING = "/dev/null"


@dataclass(frozen=True)
class Files:
    """What a tool is given: descriptors that it may open anew as ``/proc/self/fd/N``, to read, or to write as well.

    Args:
        looked: absolute paths of folders in which it may read all.
        connected: paths of a block device that it connects to itself, and of the folder for its socket. That takes
            sockets and the right to connect devices, so that it keeps both, and is kept from files alone.
    """

    read: Sequence[int] = ()
    written: Sequence[int] = ()
    looked: Sequence[str] = ()
    connected: tuple[str, str] | None = None

    @property
    def fds(self) -> list[int]:
        """All of them, each once."""
        return sorted({*self.read, *self.written})


@lru_cache(maxsize=1)
def means() -> str | None:
    """How tools are confined on this host: :data:`LANDLOCK`, :data:`NAMESPACES`, or not at all."""
    if _version() and _program() is not None:
        return LANDLOCK
    return NAMESPACES if can_enclose() else None


class Confinement:
    """What is done in a tool's process before it begins; made in the agent's, so that little is left to go wrong there.

    Args:
        files: that it is given.
        programs: absolute paths of what is started, one by the other.

    Raises:
        RefusedError: ``not_confined``, where it cannot be and the files are not root's alone.
        OSError: the kernel refuses what it says it has.
    """

    def __init__(self, files: Files, programs: Sequence[str]) -> None:
        self._ruleset, self._agent = -1, os.getpid()
        self._enclosure: Callable[[], None] | None = None
        how = means()
        if how is None:
            _refuse_others(files)
        libraries = [*LIBRARIES, *(folder for program in programs for folder in _beside(program))]
        if how == LANDLOCK:
            self._ruleset = _ruleset(files, programs, libraries)
        elif how == NAMESPACES:
            self._enclosure = Enclosure(
                read=files.read,
                written=files.written,
                seen=[*libraries, *programs, *_LINKER, *files.looked],
                used=[_NOTHING, *(files.connected or ())],
            ).enter
        self._network, self._filter = _empty_network(), None if files.connected else _program()
        self._kept = _KEPT | {_CONNECTS} if files.connected else _KEPT

    def close(self) -> None:
        """To be called once the tool was started, or was not."""
        if self._ruleset >= 0:
            os.close(self._ruleset)

    def enter(self) -> None:
        """Called in the tool's process, between fork and exec; raises OSError, so that the tool is not started."""
        checked(LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0))
        if os.getppid() != self._agent:
            os._exit(1)  # it has died already
        if self._enclosure is not None:
            self._enclosure()
        elif self._network is not None:
            checked(LIBC.setns(self._network, _NEW_NETWORK))
        for number in range(_CAPABILITIES):
            if number not in self._kept:
                LIBC.prctl(_DROP_CAPABILITY, number, 0, 0, 0)  # fails for numbers that there are not
        checked(LIBC.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if self._ruleset >= 0:
            # By which Python finds the descriptors that it closes before exec; it takes 3 ms longer without.
            _allow_path(self._ruleset, "/proc/self/fd", _LIST)
            checked(LIBC.syscall(_RESTRICT_SELF, self._ruleset, 0))
        if self._filter is not None:
            checked(LIBC.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(self._filter), 0, 0))


def _beside(program: str) -> list[str]:
    """Where a program's libraries are that is not the distribution's: ``/usr/local/lib`` of ``/usr/local/bin/x``."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(program)))
    return [] if prefix in {"/", "/usr"} else [os.path.join(prefix, "lib"), os.path.join(prefix, "lib64")]


# Landlock


def _version() -> int:
    """The version of Landlock that this kernel has; 0 for none."""
    return max(int(LIBC.syscall(_CREATE_RULESET, None, 0, 1)), 0)


def _ruleset(files: Files, programs: Sequence[str], libraries: Sequence[str]) -> int:
    """A descriptor of the rules, which the caller closes."""
    version = _version()
    rights = _RIGHTS[max(known for known in _RIGHTS if known <= version)]
    attributes = struct.pack("=QQQ", rights, _TCP, _SCOPES)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = int(checked(LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0)))
    try:
        for fd in files.fds:
            written = _WRITE | _TRUNCATE | _USE_DEVICE if fd in files.written else 0
            _allow(ruleset, fd, (_READ | written) & rights)
        for path in libraries:
            _allow_path(ruleset, path, _READ | _EXECUTE | _LIST)
        for path in programs:
            _allow_path(ruleset, path, _READ | _EXECUTE)
        for path in _LINKER:
            _allow_path(ruleset, path, _READ)
        for path in files.looked:
            _allow_path(ruleset, path, _READ | _LIST)
        _allow_path(ruleset, _NOTHING, _READ | _WRITE)
        if files.connected is not None:
            device, sockets = files.connected
            _allow_path(ruleset, device, (_READ | _WRITE | _USE_DEVICE) & rights)
            _allow_path(ruleset, sockets, _MAKE_SOCKET)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _allow(ruleset, fd, rights)
    finally:
        os.close(fd)


def _allow(ruleset: int, fd: int, rights: int) -> None:
    checked(LIBC.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0))


# Sockets


@lru_cache(maxsize=1)
def _empty_network() -> int | None:
    """A descriptor of a network namespace with nothing in it, made once; ``None`` for who may not make one."""
    found: list[int] = []

    def make() -> None:
        # A namespace is a thread's; this one ends, the descriptor keeps it.
        if not LIBC.unshare(_NEW_NETWORK):
            found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=make, name="empty network")
    thread.start()
    thread.join()
    return found[0] if found else None


@lru_cache(maxsize=1)
def _program() -> ctypes.Structure | None:
    """The filter of system calls; ``None`` for a kernel or a machine without."""
    machine = os.uname().machine
    if machine not in _SOCKETS:
        return None
    # Whoever has it says that there is nothing at address 0, others that they know no such thing.
    if LIBC.prctl(_SET_SECCOMP, _FILTER, None, 0, 0) == 0 or ctypes.get_errno() != errno.EFAULT:
        return None
    mark, calls = _SOCKETS[machine]
    refused = (*calls, _IO_URING_SETUP)
    # linux/filter.h: code, how many lines to skip if it holds, if not, with what is compared.
    lines = [(0x20, 0, 0, 4), (0x15, 0, len(refused) + 3, mark), (0x20, 0, 0, 0)]
    lines.append((0x35, len(refused) + 1, 0, _X32))
    lines += [(0x15, len(refused) + 1 - number, 0, call) for number, call in enumerate(refused, 1)]
    lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | errno.EACCES)]
    return _Program(len(lines), b"".join(struct.pack("=HBBI", *line) for line in lines))


class _Program(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


# Where there is neither


def _refuse_others(files: Files) -> None:
    """Refuse files that somebody else than root may write: only there can a header change after it was looked at.

    Raises:
        RefusedError: ``not_confined``.
    """
    for fd in files.read:
        path = os.readlink(b"/proc/self/fd/%d" % fd)
        folders = [path[:at] or b"/" for at, letter in enumerate(path) if letter == ord("/")]
        if not (_is_roots(os.fstat(fd)) and all(_is_roots(os.stat(folder)) for folder in folders)):
            raise RefusedError(
                "not_confined",
                f"users other than root can write to {display(path)} or its folder, and this host cannot restrict "
                "tools to the files of a job (it has neither Landlock nor namespaces); make root the only owner, "
                "or use kernel 5.13 or newer",
            )


def _is_roots(status: os.stat_result) -> bool:
    others = status.st_mode & 0o022
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return status.st_uid == 0 and (not others or bool(sticky))
