"""One file of a folder takes over from another one: the steps, and what they come to after a kill or a stranger's move.

Between a look at a name and a step that changes what it leads to, anybody may put another file there. So no step takes
a name away from a file without giving it one of the job's own: what that leads to is looked at then, by its inode, and
a stranger's file gets its name back. Nothing is unlinked here but a further name of a file that keeps one.

The file that ``comes`` waits under ``coming``, a name of the job's own; the file that ``goes`` ends under ``going``,
another one of them. All of it happens within one folder, where files are told apart by inode.

How names move in a folder without taking one away from a stranger's file: renameat2(2), which Python does not know.

Filesystems without that call, as NFS, get the nearest thing: there it takes two steps, and what stands under a name is
looked at afterwards. A server may have done what it answers an error to (the answer was lost, and the request was sent
again): then the inode tells.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

from storage_admin.agent.protocol import display
from storage_admin.agent.swap.journal import file_name
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
        raise FileExistsError(
            errno.EEXIST, f"there is a file with the job's own name {display(hidden)}; recover the host"
        )
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


def drop(folder: int, name: bytes, hidden: bytes, inode: int) -> None:
    """Take a name away from a file that keeps another one; whatever else comes there meanwhile gets it back.

    Args:
        folder: descriptor of the folder.
        name: which may lead to anything by now.
        hidden: one of the job's own names, which is used meanwhile; an earlier, cut off run may have left it.
        inode: of the file.

    Raises:
        FileExistsError: somebody has taken the name while another one's file had the job's own.
        OSError: as :func:`move`.
    """
    named, taken = stat_in(folder, name), stat_in(folder, hidden)
    if taken is None and named is not None and named.inode == inode:
        with contextlib.suppress(FileNotFoundError):
            take(folder, name, hidden)
        taken = stat_in(folder, hidden)
    if taken is not None and taken.inode == inode:
        unlink(folder, hidden)
    elif taken is not None:
        give(folder, hidden, name)


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


class StrangerError(Exception):
    """Another file had the name in that very moment, or none.

    Args:
        settled: whether that is as it was again; else every file is under some name.
    """

    def __init__(self, settled: bool) -> None:
        super().__init__()
        self.settled = settled


@dataclass(frozen=True)
class TakeOver(ABC):
    """What takes over from what.

    Args:
        folder: descriptor of the folder.
        comes: inode of the file that comes.
        goes: inode of the file that goes.
        coming: the job's own name that the first one has before.
        going: the job's own name that the second one has afterwards.
        name: that the file that comes is to have.
    """

    folder: int
    comes: int
    goes: int
    coming: bytes
    going: bytes
    name: bytes

    @property
    def public_names(self) -> tuple[bytes, ...]:
        """By which guests know the files."""
        return (self.name,)

    def inode(self, name: bytes) -> int | None:
        """Which file a name leads to."""
        found = stat_in(self.folder, name)
        return None if found is None else found.inode

    @property
    @abstractmethod
    def is_in(self) -> bool:
        """Whether the file that comes has its name, and the other one has lost its own."""

    @abstractmethod
    def forward(self, fd: int) -> None:
        """Do it; ``fd`` is a descriptor of the file that comes.

        Raises:
            StrangerError: nothing has taken over.
            FileExistsError: the name that it should get is taken.
        """

    @abstractmethod
    def back(self) -> bool:
        """Give the file that goes its name again, or a stranger's file that took its place; from wherever it was left.

        Returns:
            Whether that is all. If not, others came in between: every file stays under the name that it has.
        """

    @abstractmethod
    def finish(self) -> None:
        """The file that goes has ``going`` as its one name, and the one that comes has but its own."""

    def _drop(self, name: bytes, inode: int) -> None:
        """Take a further name of the job's own away from a file."""
        if self.inode(name) == inode:
            unlink(self.folder, name)

    def _give(self, hidden: bytes, name: bytes) -> bool:
        try:
            give(self.folder, hidden, name)
        except FileExistsError:
            return False
        return True


@dataclass(frozen=True)
class SameName(TakeOver):
    """Both files want the same name: in one step where the filesystem can, else out, look, in."""

    @property
    def is_in(self) -> bool:
        """Whether the name leads to the file that comes, and a name of the job's own to the other one."""
        return self.inode(self.name) == self.comes and self.goes in {self.inode(self.coming), self.inode(self.going)}

    def forward(self, fd: int) -> None:
        """No name is taken here, so that FileExistsError means that the files are in the wrong places."""
        try:
            out = self.inode(self.coming) if exchange(self.folder, self.coming, self.name) else self._forward_in_two(fd)
        except FileNotFoundError:
            raise StrangerError(True) from None
        if out != self.goes:
            raise StrangerError(self.back())

    def _forward_in_two(self, fd: int) -> int | None:
        """For an instant nothing has the name: a crash just then is put right by :meth:`back`."""
        take(self.folder, self.name, self.going)
        out = self.inode(self.going)
        if out == self.goes:
            try:
                link(fd, self.folder, self.name)
            except FileExistsError:
                return None  # somebody has made a file where there was none for an instant
        return out

    def back(self) -> bool:
        named, came, went = (self.inode(name) for name in (self.name, self.coming, self.going))
        if came == self.goes and named not in {None, self.comes}:
            self.finish()
            return False  # somebody has replaced the file that came
        if came not in {None, self.comes}:  # what came out of an exchange
            return self._exchange_back() if named is not None else self._give(self.coming, self.name)
        if named == self.comes and went is not None:
            self._drop(self.coming, self.comes)
            take(self.folder, self.name, self.coming)
            if self.inode(self.coming) != self.comes:  # somebody's file by now, which takes its name back
                self._give(self.coming, self.name)
                return False
            named = None
        if named is None and went is not None:
            return self._give(self.going, self.name)
        return went is None

    def _exchange_back(self) -> bool:
        try:
            exchange(self.folder, self.coming, self.name)
        except FileNotFoundError:
            return self._give(self.coming, self.name)
        if self.inode(self.coming) == self.comes:
            return True
        # Somebody has put his file there since: the last one who came has the name.
        exchange(self.folder, self.coming, self.name)
        return False

    def finish(self) -> None:
        if self.inode(self.coming) == self.goes:
            if self.inode(self.going) == self.goes:
                unlink(self.folder, self.coming)
            else:
                take(self.folder, self.coming, self.going)
        self._drop(self.coming, self.comes)


@dataclass(frozen=True)
class OtherName(TakeOver):
    """The file that comes gets a name that nothing has, and the other one loses its own.

    At any moment at least one of both names leads to its file.

    Args:
        name_out: of the file that goes.
    """

    name_out: bytes

    @property
    def public_names(self) -> tuple[bytes, ...]:
        return (self.name, self.name_out)

    @property
    def is_half(self) -> bool:
        """Whether both files have their names."""
        return self.inode(self.name) == self.comes and self.inode(self.name_out) == self.goes

    @property
    def is_in(self) -> bool:
        """Whether the one name leads to the file that comes, and the other one not to the file that goes."""
        went = self.inode(self.going) == self.goes
        return went and self.inode(self.name) == self.comes and self.inode(self.name_out) != self.goes

    def forward(self, fd: int) -> None:
        if self.inode(self.name) != self.comes:
            link(fd, self.folder, self.name)
        self.retire()

    def retire(self) -> None:
        """Only the second half: the file that goes loses its name.

        Raises:
            StrangerError: as :meth:`forward`.
        """
        if self.inode(self.name_out) == self.goes:
            self._drop(self.going, self.goes)  # an older agent gave it this name before it took the other one
        try:
            take(self.folder, self.name_out, self.going)
        except FileNotFoundError:
            raise StrangerError(self.back()) from None
        if self.inode(self.going) != self.goes:
            raise StrangerError(self.back())

    def back(self) -> bool:
        if self.inode(self.name_out) == self.goes:
            self._drop(self.going, self.goes)
        given = self.inode(self.going) is None or self._give(self.going, self.name_out)
        if self.inode(self.name) == self.comes and self.inode(self.name_out) is not None:
            # Under its own name of the job it can be looked at, should somebody's file be taken with it.
            self._drop(self.coming, self.comes)
            take(self.folder, self.name, self.coming)
            if self.inode(self.coming) != self.comes:
                self._give(self.coming, self.name)
                return False
        return given

    def finish(self) -> None:
        self._drop(self.coming, self.comes)


def moves(
    folder: int, job: str, made: int, original: int, name: bytes, old_name: bytes | None, *, back: bool = False
) -> TakeOver:
    """The steps by which the file that a job made takes over from the original; ``back``: the original again.

    Args:
        folder: descriptor of the folder.
        made, original: inodes of the files.
        name: of the file that the job made.
        old_name: of the original, where that is another one.
    """
    new, orig = file_name(job, "new"), file_name(job, "orig")
    if back and old_name is not None:
        return OtherName(folder, original, made, orig, new, old_name, name)
    if back:
        return SameName(folder, original, made, orig, new, name)
    if old_name is not None:
        return OtherName(folder, made, original, new, orig, name, old_name)
    return SameName(folder, made, original, new, orig, name)
