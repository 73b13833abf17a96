"""What a journal's records say together: which files a job found, made and moved, and how far it came."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from storage_admin.agent.protocol import unb64
from storage_admin.agent.swap import journal
from storage_admin.agent.swap.journal import JournalError, Stamp
from storage_admin.agent.swap.outcome import is_image_name


@dataclass(frozen=True)
class Story:
    """A journal's records, read into one.

    Args:
        name: of the image, in the journal's folder.
        original: the image before the swap.
        keep_undo: whether the original is kept after it; also until other hosts were asked who uses it.
        records_created: whether the journal says which file was created; that of an older agent does not.
        created: the new file when it was empty; ``None`` before that.
        ready: the new file, finished and synced; ``None`` before that.
        done: the new file under the image's name; ``None`` before that.
        copy: the original as undo copy, where the agent that swapped could still write it down, and no undo has moved
            its names since: what differs from it is somebody else's doing.
        undo_job: the undo that has begun, if any.
        undone: the new file as it was when that undo began.
        old_name: that the image had before, where the job gave it another one; else ``None``.
        parts: name and inode of each further file that follows the new one; ``parts_bytes`` is what they occupy.
        left: path and stamp of each image that the original stands on, and the new one does not.
        discarded_bytes: what the filesystem gets back by the removal of the undo copy, where that has begun.
        goes_shared, made_shared, undone_shared: as in :class:`Settled`; 0 in journals of older agents.
        exchanging: whether a swap or an undo had come to its names when the journal ended.
    """

    name: bytes
    original: Stamp
    keep_undo: bool
    records_created: bool = False
    created: Stamp | None = None
    ready: Stamp | None = None
    done: Stamp | None = None
    copy: Stamp | None = None
    undo_job: str | None = None
    undone: Stamp | None = None
    old_name: bytes | None = None
    parts: tuple[tuple[bytes, int], ...] = ()
    parts_bytes: int = 0
    left: tuple[tuple[bytes, Stamp], ...] = ()
    discarded_bytes: int | None = None
    exchanging: bool = False
    goes_shared: int = 0
    made_shared: int = 0
    undone_shared: int = 0

    @property
    def made(self) -> frozenset[int]:
        """Inodes of files that the job has made."""
        return frozenset(one.inode for one in (self.created, self.ready, self.done, self.undone) if one is not None)

    def is_touched(self, copy: Stamp) -> bool:
        """Whether somebody changed the undo copy in any way: its time of change tells, also where others were set back.

        It does so of a new owner, mode or name, too; and nothing where :attr:`copy` is not known.
        """
        return self.copy is not None and copy.ctime_ns != self.copy.ctime_ns

    @property
    def name_before(self) -> bytes:
        """The name under which the original was found."""
        return self.old_name or self.name

    @classmethod
    def of(cls, records: list[dict[str, Any]]) -> Story:
        """The story that a journal's records tell; raises JournalError."""
        first = records[0]
        try:
            name = unb64(first["name_b64"])
            old_name = unb64(first["old_name_b64"]) if "old_name_b64" in first else None
            keep_undo = bool(first["undo_hours"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise JournalError("it does not say which image it belongs to") from error
        if not is_image_name(name) or not is_image_name(old_name or name) or name == old_name:
            raise JournalError("it names something that is not an image")
        recorded = first.get("records_created") is True
        parts = tuple(_part(record) for record in records[1:] if record["step"] == journal.PART)
        original = Stamp.parse(first.get("original"))
        story = cls(name, original, keep_undo, recorded, old_name=old_name, parts=parts)
        for record in records[1:]:
            if record["step"] == journal.LEFT:
                story = replace(story, left=_left(record))
            elif record["step"] == journal.CREATED:
                story = replace(story, created=Stamp.parse(record.get("new")))
            elif record["step"] == journal.EXCHANGING:
                story = replace(story, exchanging=True, keep_undo=story.keep_undo or record.get("keeps") is True)
                story = story if story.undo_job is None else replace(story, copy=None)
            elif record["step"] == journal.READY:
                goes, made = _bytes(record.get("goes_shared")), _bytes(record.get("made_shared"))
                story = replace(story, ready=Stamp.parse(record.get("new")), goes_shared=goes, made_shared=made)
                story = replace(story, parts_bytes=_bytes(record.get("parts_bytes")))
            elif record["step"] == journal.DONE:
                # Of a copy the agent writes that swapped, and asked all; a recovery does not.
                copy = Stamp.parse(record["undo"]) if "undo" in record else None
                keep = bool(first["undo_hours"]) if copy is not None else story.keep_undo
                story = replace(story, done=Stamp.parse(record.get("new")), copy=copy, keep_undo=keep, exchanging=False)
            elif record["step"] == journal.UNDO:
                undone = Stamp.parse(record["new"]) if "new" in record else None
                story = replace(story, undo_job=str(record.get("job")), undone=undone, exchanging=False)
                story = replace(story, undone_shared=_bytes(record.get("goes_shared")))
            elif record["step"] == journal.UNDO_REVERTED:
                story = replace(story, undo_job=None, exchanging=False)
            elif record["step"] == journal.DISCARD:
                freed = record.get("freed_bytes")
                story = replace(story, discarded_bytes=freed if type(freed) is int else None)
        return story


def _bytes(told: Any) -> int:
    return told if type(told) is int and told > 0 else 0


def _part(record: dict[str, Any]) -> tuple[bytes, int]:
    try:
        name = unb64(record["name_b64"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JournalError("a further part has no name") from error
    if not is_image_name(name):
        raise JournalError("it names something that is not an image")
    return name, Stamp.parse(record.get("new")).inode


def _left(record: dict[str, Any]) -> tuple[tuple[bytes, Stamp], ...]:
    try:
        return tuple((unb64(one["path_b64"]), Stamp.parse(one["stamp"])) for one in record["bases"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise JournalError("it does not name the backing files of the original") from error
