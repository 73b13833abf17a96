"""What a job made: the file, what of its header a guest never changes, and when. An undo copy may go by these."""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from typing import Any

from storage_admin.agent import formats
from storage_admin.agent.formats import qcow2
from storage_admin.agent.formats.reader import Reader
from storage_admin.agent.swap import journal
from storage_admin.agent.swap.clock import Moment
from storage_admin.agent.swap.journal import JournalError

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
