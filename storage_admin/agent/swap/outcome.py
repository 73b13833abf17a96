"""What became of a job's files, and the two calls by which that is found out and done."""

from __future__ import annotations

import os
from dataclasses import dataclass

from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.swap import journal
from storage_admin.agent.swap.journal import Stamp

#: How a replacement was settled.
FINISHED, REVERTED, KEPT, BUSY, FAILED = "finished", "reverted", "kept", "busy", "failed"
#: Swapped, and the undo copy that should wait beside the image does not.
LOST = "lost"
#: Bytes of a name in a folder (NAME_MAX).
LONGEST_NAME = 255


@dataclass(frozen=True)
class Settled:
    """What became of a job's files.

    Args:
        job: whose files they are; an undo has its own id.
        outcome: ``finished``, ``reverted``, ``kept`` (swapped, the undo copy waits), ``lost`` (swapped, and somebody
            else took the undo copy away), ``busy``, or ``failed``: an admin has to look, and nothing was removed that
            may be a last copy.
        name: of the image, in the journal's folder; ``None`` where the journal does not say it.
        before: the original, as it was before the swap.
        undo_bytes: that the filesystem gets back when the undo copy goes; 0 where there is none.
        undo_waits: whether there is one: a file may occupy nothing.
        undo_of: the job that an undo undid.
        put_back: whether what became of a lost undo copy is that somebody gave it the image's name again.
        surely_back: whether it has that one's size and time as well: the number of an inode is given again.
        detail: what an admin should know, else empty.
        made_bytes: what the new file occupied as its job left it; ``None`` where the journal does not say it.
        undone_bytes: what the new file occupied when its undo began; as little.
        goes_shared, made_shared, undone_shared: what of the original, of the new file, and of that one when its undo
            began, other files had as well.
        discarded_bytes: what the filesystem got back when the undo copy was removed; ``None`` where it was not, by us.
    """

    job: str
    outcome: str
    name: bytes | None = None
    before: Stamp | None = None
    undo_bytes: int = 0
    undo_of: str | None = None
    put_back: bool = False
    detail: str = ""
    undo_waits: bool = False
    surely_back: bool = False
    made_bytes: int | None = None
    undone_bytes: int | None = None
    discarded_bytes: int | None = None
    goes_shared: int = 0
    made_shared: int = 0
    undone_shared: int = 0


def is_image_name(name: bytes) -> bool:
    """Whether it can be the name of an image: of one file in a folder, and none of a job's own."""
    possible = 0 < len(name) <= LONGEST_NAME and b"/" not in name and b"\0" not in name and name not in {b".", b".."}
    return possible and not journal.parse_name(name)


def is_back(named: Stamp | None, original: Stamp) -> tuple[bool, bool]:
    """Whether a file can be an original that was put back, by its inode; and whether it surely is, by all else."""
    if named is None or named.inode != original.inode:
        return False, False
    return True, same_content(named, original)


def same_content(now: Stamp, before: Stamp) -> bool:
    """Whether nobody has written to a file, by its size and time."""
    return (now.file_size, now.mtime_ns) == (before.file_size, before.mtime_ns)


def stamp_now(fd: int) -> Stamp:
    """The stamp of an open file as its server has it: a client of NFS remembers some until it is opened anew."""
    mount = Mounts.of_this_machine().of_descriptor(fd)
    if mount is None or not mount.is_network:
        return Stamp.of(os.fstat(fd))
    fresh = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return Stamp.of(os.fstat(fresh))
    finally:
        os.close(fresh)


def stat_in(folder: int, name: bytes) -> Stamp | None:
    """The stamp of a name in a folder, links not followed; ``None`` where there is none."""
    try:
        return Stamp.of(os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return None


def unlink(folder: int, name: bytes) -> None:
    """Take a name away, if it is there, and have that on the disk."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    os.fsync(folder)
