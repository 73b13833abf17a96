"""Keeps users on other machines away from files while names change, on filesystems of a network.

There, F_OFD_GETLK answers "nobody" over NFSv3 whoever holds a lock, and read locks keep no guest away that asks another
client. Only a write lock that is granted says that nobody else holds one, on any machine. So the swap takes them, and
nothing else does: a guest that started in the moment of such a question would fail.

Guests of Proxmox VE that the controller has locked, so that none starts while a file of theirs gives up its name.

Proxmox VE's hypervisors take no image locks, and over a network no door can be kept. What is left is the ``lock`` of a
guest's configuration, which every start asks for. The controller takes it; here is looked whether it is held, in the
files that all nodes of the cluster share, before the names change and after that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from storage_admin.agent.folders import image_folders
from storage_admin.agent.host import locking
from storage_admin.agent.host.in_use import FileId
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import HELD_LOCK, Arguments, HostError, RefusedError, StoppedError

PVE_FOLDER = "/etc/pve"
#: The arguments by which a verb is told of them.
ARGS = frozenset({"guests", "etc_pve", "shared"})

_GUEST = re.compile(r"([1-9][0-9]{0,8})\.conf")
_LOCK = re.compile(rb"^lock:\s*(\S+)\s*$", re.MULTILINE)
#: pmxcfs itself takes no file above 1 MiB.
_MOST = 1024 * 1024


@dataclass(frozen=True)
class Held:
    """The guests whose locks are held, by number; none where no locks are needed or can be had.

    ``shared`` says whether other hosts of the controller's show the files, too.
    """

    guests: frozenset[str] = frozenset()
    folder: str = PVE_FOLDER
    shared: bool = False

    @classmethod
    def of(cls, args: dict[str, Any]) -> Held:
        """What a request says: ``guests``, a list of numbers, ``etc_pve``, ``shared``.

        Raises:
            RefusedError: ``invalid``.
        """
        told = Arguments({name: args[name] for name in ARGS & args.keys()}, ARGS)
        folder = image_folders.refuse_elsewhere(told.get("etc_pve", str, PVE_FOLDER), PVE_FOLDER)
        return cls(frozenset(map(str, told.get("guests", list, []))), folder, told.get("shared", bool, False))

    @property
    def is_asked_for(self) -> bool:
        """Whether the controller is asked again after the exchange."""
        return bool(self.guests) or self.shared

    def refuse_unlocked(self, *names: bytes) -> None:
        """Refuse where a guest is not locked so, or another one's configuration names one of the files.

        Args:
            names: of the files.

        Raises:
            RefusedError: ``guests_unknown``.
            HostError: the cluster's files cannot be read.
        """
        missing = set(self.guests)
        for number, content in _configurations(self.folder):
            if number not in self.guests and not any(name in content for name in names):
                continue
            missing.discard(number)
            lock = _LOCK.search(content.partition(b"\n[")[0])
            if lock is None or lock[1] != HELD_LOCK.encode():
                raise RefusedError(
                    "guests_unknown", f"guest {number} could start, because its lock is no longer held; try again"
                )
        if missing:
            raise RefusedError("guests_unknown", f"guest {min(missing)} is no longer in the cluster; scan the host")


def is_node() -> bool:
    """Whether this is a node of Proxmox VE."""
    return os.path.isdir(PVE_FOLDER)


def _configurations(folder: str) -> Iterator[tuple[str, bytes]]:
    nodes = os.path.join(folder, "nodes")
    try:
        for node in os.listdir(nodes):
            for kind in ("qemu-server", "lxc"):
                yield from _in(os.path.join(nodes, node, kind))
    except OSError as error:
        raise HostError(f"{nodes} cannot be read: {error.strerror}") from error


def _in(folder: str) -> Iterator[tuple[str, bytes]]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        if found := _GUEST.fullmatch(name):
            with open(os.path.join(folder, name), "rb") as file:
                yield found[1], file.read(_MOST)


#: What qemu locks of an image that it uses: first byte and length. Byte 200 says only that others may not read.
RANGES = ((100, 4), (201, 3))
#: Seconds for which another client may still open the old file by the name that it had: it keeps folders' entries so
#: long at most, unless it was mounted otherwise (nfs(5), acdirmax). Measured: 29.5 s.
NAMES_KEPT = 60.0
#: Filesystems of which that is known.
_KEEPS_NAMES = ("nfs", "nfs4")


class Fence:
    """Holds image locks on files from before the last look until after it. Use it as a context manager.

    Args:
        folder: descriptor of the files' folder.
        going: descriptor of the file that loses its name, open for reading only.
        coming: of the one that gets it; ``None`` where none does, so that who only reads is kept away as well.
    """

    def __init__(self, folder: int, going: int, coming: int | None = None) -> None:
        self._files = (going,) if coming is None else (going, coming)
        self._mount = Mounts.of_this_machine().of_descriptor(folder)
        self._held: list[FileId] = []

    def __enter__(self) -> Fence:  # noqa: PYI034 - Self is younger than Python 3.9
        """Take the locks, those first and questions afterwards: a writer that was there before shows only then.

        Raises:
            RefusedError: ``image_in_use``; ``locks_missing``, where the filesystem's locks reach no other machine.
        """
        try:
            if self._mount is None or not self._mount.is_network:
                keep_away = locking.keep_writers_away if len(self._files) > 1 else locking.keep_everybody_away
                for fd in self._files:
                    keep_away(fd)
                return self
            if self._mount.locks_alone:
                raise _no_locks("it is mounted without locks on the server (nolock or local_lock)")
            if locking.open_for_writing(self._files[0]):
                raise RefusedError("image_in_use", "a program on some host has the image open for writing; stop it")
            for fd in self._files:
                self._held.append(_hold(fd))
        except BaseException:
            self._let_go()
            raise
        return self

    @property
    def closes_late(self) -> bool:
        """Whether a name that an open file loses lives on under another one until it is closed, which moves the time of
        change once more (``.nfs…``): on a mount of NFS, where two names cannot be exchanged.
        """
        return self._mount is not None and self._mount.filesystem in _KEEPS_NAMES

    def let_in(self) -> None:
        """Let go of the file that came: whoever opens the image now finds the right one."""
        while len(self._held) > 1:
            os.close(locking.fenced.pop(self._held.pop()))

    def outlast_names(self, went: int, io: AgentIO) -> None:
        """Hold the locks until no other machine finds the old file by the name that it had.

        Args:
            went: descriptor of the file that has lost its name, and lives on under another one.
        """
        if not self._held or self._mount is None:
            return
        if self._mount.filesystem not in _KEEPS_NAMES and not self._mount.exported:
            return
        self.let_in()
        began = time.monotonic()
        while (passed := time.monotonic() - began) < NAMES_KEPT and os.fstat(went).st_nlink:
            with contextlib.suppress(StoppedError):  # it is done: nothing is put back any more
                io.progress("swapping", int(passed), int(NAMES_KEPT), "until other hosts look the image up anew")
            time.sleep(0.5)

    def _let_go(self) -> None:
        for file in self._held:
            os.close(locking.fenced.pop(file))
        self._held = []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()


def _hold(fd: int) -> FileId:
    """Lock a file for this machine alone, by a descriptor of its own: it has to be open for writing."""
    file = locking.file_id(fd)
    writing = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if locking.file_id(writing) != file:
            raise RefusedError("stale_plan", "the image was replaced by someone else; scan the host and try again")
        for first, length in RANGES:
            locking.take(writing, fcntl.F_WRLCK, first, length)
    except BaseException as error:
        os.close(writing)
        if isinstance(error, OSError) and error.errno in {errno.ENOLCK, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}:
            raise _no_locks(f"its server does not offer locks ({error.strerror})") from error
        raise
    locking.fenced[file] = writing
    return file


def _no_locks(why: str) -> RefusedError:
    return RefusedError(
        "locks_missing",
        f"the image is on a network filesystem, and {why}. A guest that starts on another host could not be kept "
        "away. Mount the filesystem with locks, and check that rpc.statd is running",
    )
