"""What the journal of an image that is set aside means: it has its name, or it waits, or it is gone by an admin's word.

The file itself never changes, it only has another name: ``.sa-<job>.aside`` instead of its own. Where a filesystem
cannot rename without replacing, a crash between the new name and the end of the old one leaves both; then the old one
counts, as nobody was told otherwise. A stranger's file that was renamed instead of the image gets its name back.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from storage_admin.agent.protocol import display
from storage_admin.agent.swap import exchange, journal, outcome
from storage_admin.agent.swap.journal import Journal, Stamp, told_name
from storage_admin.agent.swap.outcome import Settled, is_back, stat_in, unlink


@dataclass(frozen=True)
class AsideStory:
    """A journal's records, read into one.

    Args:
        name: that the image had, in the journal's folder.
        original: the image before it was set aside.
        aside: the same file when it had its other name alone; ``None`` before that.
        later: what has begun since (``restore`` or ``delete``) and the job that began it; ``None`` where nothing has.
        freed_bytes: what the filesystem gets back by a deletion, where that has begun.
    """

    name: bytes
    original: Stamp
    aside: Stamp | None = None
    later: tuple[str, str] | None = None
    freed_bytes: int | None = None

    @classmethod
    def of(cls, records: list[dict[str, Any]]) -> AsideStory:
        """The story that a journal's records tell; raises JournalError."""
        name = told_name(records[0])
        story = cls(name, Stamp.parse(records[0].get("original")))
        for record in records[1:]:
            step = record["step"]
            if step == journal.ASIDE:
                story = replace(story, aside=Stamp.parse(record.get("aside")))
            elif step in {journal.RESTORE, journal.DELETE}:
                freed = record.get("freed_bytes")
                freed = freed if type(freed) is int else None
                story = replace(story, later=(step, str(record.get("job"))), freed_bytes=freed)
            elif step == journal.STAYED:
                story = replace(story, later=None)
        return story


@dataclass(frozen=True)
class _Names:
    """What the two names lead to: the image's own and the one that it has while it is set aside."""

    own: Stamp | None
    aside: Stamp | None
    inode: int

    @property
    def is_back(self) -> bool:
        return self.own is not None and self.own.inode == self.inode

    @property
    def held(self) -> Stamp | None:
        """The image under its other name; ``None`` where that is missing or another file's."""
        return self.aside if self.aside is not None and self.aside.inode == self.inode else None


def settle(one: Journal, records: list[dict[str, Any]]) -> Settled:
    """Finish or put back what such a journal tells of; outcomes as of :mod:`storage_admin.agent.swap.outcome`.

    ``kept`` says that the image waits under its other name, ``finished`` that it was restored or deleted, ``reverted``
    that it has its own name as if nothing had happened, ``lost`` that somebody else took it away.

    Raises:
        JournalError: the journal says nothing to go by.
        OSError: the folder cannot be written or read.
    """
    story = AsideStory.of(records)
    other = journal.file_name(one.job, "aside")
    names = _Names(stat_in(one.folder, story.name), stat_in(one.folder, other), story.original.inode)
    if story.later is not None:
        return _settle_later(one, story, names)
    held = names.held
    if held is None:
        return _without_the_file(one, story, names)
    if story.aside is None and names.is_back:
        unlink(one.folder, other)
        one.remove()
        return Settled(one.job, outcome.REVERTED, story.name, story.original)
    if story.aside is None:
        one.append(journal.ASIDE, aside=held)
    return Settled(one.job, outcome.KEPT, story.name, story.original, held.allocated_size, put_back=names.is_back)


def _without_the_file(one: Journal, story: AsideStory, names: _Names) -> Settled:
    other = journal.file_name(one.job, "aside")
    if story.aside is None and names.own is None and names.aside is not None:
        with contextlib.suppress(FileExistsError):
            exchange.give(one.folder, other, story.name)
            names = replace(names, own=names.aside, aside=None)
    if story.aside is None and names.aside is not None:
        detail = (
            f"a file that took the place of the image at that moment is now named {display(other)}, and its own "
            "name is taken; move it back by hand"
        )
        return Settled(one.job, outcome.FAILED, story.name, story.original, put_back=names.is_back, detail=detail)
    if story.aside is None and names.own is not None:
        # Whatever has the name: it was not taken from it.
        one.remove()
        return Settled(one.job, outcome.REVERTED, story.name, story.original)
    if names.is_back:
        detail = "someone else has restored the name of the image"
    elif names.aside is None:
        detail = "the image that was set aside was removed by someone else"
    else:
        detail = "the image that was set aside was removed, and another file has its place; check that file yourself"
    return Settled(one.job, outcome.LOST, story.name, story.original, put_back=names.is_back, detail=detail)


def _settle_later(one: Journal, story: AsideStory, names: _Names) -> Settled:
    """A restore or a deletion that has begun: done where the names say so, else as if it had not begun."""
    step, job = story.later or ("", "")
    # Not only by its number, which the filesystem gives again to a file that comes later.
    _, surely_back = is_back(names.own, story.original)
    is_done = names.is_back if step == journal.RESTORE else names.held is None and not surely_back
    if is_done:
        if names.held is not None:
            unlink(one.folder, journal.file_name(one.job, "aside"))
        one.remove()
        return Settled(
            job, outcome.FINISHED, story.name, story.original, undo_of=one.job, put_back=names.is_back,
            discarded_bytes=story.freed_bytes,
        )  # fmt: skip
    if names.held is None:
        return _without_the_file(one, story, names)
    one.append(journal.STAYED, job=job)
    return Settled(job, outcome.REVERTED, story.name, story.original, names.held.allocated_size, undo_of=one.job)
