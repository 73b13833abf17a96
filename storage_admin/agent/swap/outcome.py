"""What became of a job's files, and the two calls by which that is found out and done.

What a job made: the file, what of its header a guest never changes, and when. An undo copy may go by these.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from typing import Any

from storage_admin.agent import formats
from storage_admin.agent.folders.pools import held
from storage_admin.agent.formats import Reader, qcow2
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.protocol import Moment
from storage_admin.agent.swap import journal
from storage_admin.agent.swap.journal import JournalError, Stamp

#: How a replacement was settled.
FINISHED, REVERTED, KEPT, BUSY, FAILED = "finished", "reverted", "kept", "busy", "failed"
#: Swapped, and the undo copy that should wait beside the image does not.
LOST = "lost"


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

    def told(self, path_b64: str | None, **more: Any) -> dict[str, Any]:
        """As the verb ``recover`` tells it; what is not known is null.

        Args:
            path_b64: the image's.
            more: ``pool``, and of the image as it is now ``dev``, ``inode`` and ``after_bytes``, as far as known.
        """
        fields = asdict(self)
        fields.pop("name")
        original = fields.pop("before")
        now = dict.fromkeys(("pool", "dev", "inode", "after_bytes")) | more
        before = original["allocated_size"] if original else None
        return fields | {"path_b64": path_b64, "original": original, "before_bytes": before} | now


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
    with held(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fresh:
        return Stamp.of(os.fstat(fresh))


def names_left(fd: int) -> int:
    """How many names an open file has, but for the one by which a client of NFS keeps it until it is closed."""
    mount = Mounts.of_this_machine().of_descriptor(fd)
    kept = os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).startswith(".nfs")
    return os.fstat(fd).st_nlink - (mount is not None and mount.filesystem in {"nfs", "nfs4"} and kept)


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


#: What a guest, a backup or a snapshot of a hypervisor changes in headers that are not read field by field here.
_VOLATILE = frozenset({"dirty", "corrupt", "snapshots", "bitmaps", "other_size"})
_VOLATILE_FEATURES = qcow2.DIRTY | qcow2.CORRUPT


@dataclass(frozen=True)
class Identity:
    """A header's lasting part.

    Args:
        format: that the file is read as.
        header: a digest of the fields that stay while a guest writes: geometry, features, base.
        l1_offset: where the L1 table is, in bytes; ``None`` for formats that have none.
    """

    format: str
    header: str
    l1_offset: int | None

    @classmethod
    def of(cls, fd: int, form: str, name: bytes) -> Identity:
        """The identity of an open file.

        Args:
            fd: descriptor of the file, open for reading.
            form: its format, never guessed.
            name: its name, which matters for a fixed VHD alone.

        Raises:
            UnreadableError: its header cannot be read.
            OSError: the file cannot.
        """
        size = os.fstat(fd).st_size
        facts = {
            key: value for key, value in asdict(formats.read(fd, size, name, form)).items() if key not in _VOLATILE
        }
        l1_offset = None
        if form == "qcow2":
            header = qcow2.parse_header(Reader(fd, size))
            l1_offset = header.l1_offset
            kept = header.incompatible & ~_VOLATILE_FEATURES
            facts["fixed"] = (header.version, header.l1_size, header.length, kept)
        digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
        return cls(form, digest, l1_offset)


@dataclass(frozen=True)
class Made:
    """What a journal says of the file that its job made.

    Args:
        inode: of the file.
        was: the format of the image that it took the place of.
        identity: of its header.
        at: when it was whole, which is right before it took the image's place.
    """

    inode: int
    was: str
    identity: Identity
    at: Moment

    @classmethod
    def of(cls, fd: int, form: str, name: bytes, was: str) -> Made:
        """The file as it is now, which takes the place of one of the format ``was``; raises as :meth:`Identity.of`."""
        return cls(os.fstat(fd).st_ino, was, Identity.of(fd, form, name), Moment.now())

    def fields(self) -> dict[str, Any]:
        """As a journal has it."""
        return {"inode": self.inode, "was": self.was, **asdict(self.identity), "at": self.at.fields()}

    @classmethod
    def read(cls, records: list[dict[str, Any]]) -> Made | None:
        """What a journal's records say; ``None`` where they do not, as those of an older agent."""
        told = next((record for record in reversed(records) if record["step"] == journal.MADE), None)
        if told is None:
            return None
        try:
            l1_offset = told["l1_offset"]
            identity = Identity(str(told["format"]), str(told["header"]), None if l1_offset is None else int(l1_offset))
            return cls(int(told["inode"]), str(told["was"]), identity, Moment.parse(told["at"]))
        except (KeyError, TypeError, ValueError, JournalError):
            return None
