"""The only code that puts a file in another one's place.

A kill, a power cut or a full disk at any point leaves the original or the finished result under the image's name.
:func:`settle` says from the journal and the names alone which of both it is, and clears the rest; an exception, a
cancel and a crash all end there.

Files are told apart by their inode: they are all in one folder, and a device's number may change with a reboot.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Callable

from storage_admin.agent import attributes, journal, locking
from storage_admin.agent.journal import Journal, JournalError, Stamp
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import HostError, RefusedError, Request, b64, unb64

#: How a replacement was settled.
FINISHED, REVERTED, KEPT, BUSY, FAILED = "finished", "reverted", "kept", "busy", "failed"
#: Seconds that the locks outlast the swap: who opened the old file by its name just before is refused by then.
GRACE = 0.3


@dataclass(frozen=True)
class Settled:
    """What became of a job's files.

    Args:
        job: whose files they are; an undo has its own id.
        outcome: ``finished``, ``reverted``, ``kept`` (swapped, the undo copy waits), ``busy``, or ``failed``: an admin
            has to look, and nothing was removed that may be a last copy.
        name: of the image, in the journal's folder; ``None`` where the journal does not say it.
        before: the original, as it was before the swap.
        undo_bytes: that the undo copy occupies; 0 where there is none.
        undo_of: the job that an undo undid.
        detail: what an admin should know, else empty.
    """

    job: str
    outcome: str
    name: bytes | None = None
    before: Stamp | None = None
    undo_bytes: int = 0
    undo_of: str | None = None
    detail: str = ""


@dataclass(frozen=True)
class Swapped:
    """A replacement that is done. ``undo_bytes`` is what the undo copy occupies; 0 where none was kept."""

    new: Stamp
    undo_bytes: int


class Replacement:
    """A new file beside an image that will take its place.

    Use it as a context manager: whatever is not swapped when it is left is put back.

    Args:
        folder: descriptor of the image's folder.
        name: the image's name in it.
        original: descriptor of the image.
        request: whose work it is.
        undo_hours: how long the original is kept; 0 removes it right after the swap.

    Raises:
        OSError: the files cannot be made; FileExistsError, where the job has some (see :func:`clear_earlier`).
    """

    def __init__(self, folder: int, name: bytes, original: int, request: Request, undo_hours: float) -> None:
        self.folder, self.name, self.original = folder, name, original
        self.job, self.generation = request.job, request.generation
        self.new_name = journal.file_name(self.job, "new")
        self._keep_undo = undo_hours > 0
        self._journal = Journal.create(
            folder,
            self.job,
            generation=self.generation,
            name_b64=b64(name),
            original=Stamp.of(os.fstat(original)),
            undo_hours=undo_hours,
        )
        self.new = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.new = os.open(self.new_name, flags, 0o600, dir_fd=folder)
            attributes.copy_flags(original, self.new)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Replacement:  # noqa: PYI034 - Self is younger than Python 3.9
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        try:
            settle(self._journal)
        finally:
            self._journal.close()
            if self.new >= 0:
                os.close(self.new)

    def swap(self, io: AgentIO, recheck: Callable[[], None]) -> Swapped:
        """Put the new file in the image's place.

        Args:
            io: the controller, which has to say ``go``.
            recheck: raises where the image, its base or their users changed; called under the image locks.

        Returns:
            The new image's facts.

        Raises:
            StoppedError: the controller did not say ``go``; nothing was changed.
            RefusedError: what ``recheck`` raised, or ``immutable``; nothing was changed.
        """
        os.fsync(self.new)
        self._journal.append(journal.READY, new=Stamp.of(os.fstat(self.new)))
        io.wait_for_go(self.generation)
        # Locks first, questions afterwards: a writer that was there before does not hinder the locks.
        locking.keep_writers_away(self.original)
        locking.keep_writers_away(self.new)
        recheck()
        self._check_names()
        undo_name = journal.file_name(self.job, "orig")
        try:
            os.link(self.name, undo_name, src_dir_fd=self.folder, dst_dir_fd=self.folder, follow_symlinks=False)
            # Some filesystems may bring the rename to the disk before the link.
            os.fsync(self.folder)
            os.rename(self.new_name, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except PermissionError as error:
            raise RefusedError(
                "immutable", "the image or its folder is protected (chattr +i), so it cannot be replaced"
            ) from error
        os.fsync(self.folder)
        new = Stamp.of(os.fstat(self.new))
        self._journal.append(journal.DONE, new=new, undo=Stamp.of(os.fstat(self.original)))
        _outlast_late_openers(io, locking.file_id(self.original))
        settled = settle(self._journal)
        return Swapped(new, settled.undo_bytes)

    def _check_names(self) -> None:
        """Both names, in the very folder that is worked in, must be of the files that were looked at and made.

        The folder and the image were opened one after the other, and who may rename folders of the pool could have put
        another one there in between.
        """
        named = stat_in(self.folder, self.name)
        if named is None or not named.same_file(Stamp.of(os.fstat(self.original))):
            raise RefusedError("stale_plan", "the image was exchanged by somebody else; scan the host and try again")
        made = stat_in(self.folder, self.new_name)
        if made is None or not made.same_file(Stamp.of(os.fstat(self.new))) or os.fstat(self.new).st_nlink != 1:
            raise HostError("the temporary file was exchanged by somebody else")
        if locking.locked_bytes(self.new) or locking.opener([locking.file_id(self.new)]):
            raise HostError("the temporary file is used by somebody else")


def clear_earlier(folder: int, request: Request) -> None:
    """Put back what an earlier run of the same job left.

    Args:
        folder: descriptor of the image's folder.
        request: the run that is to begin.

    Raises:
        RefusedError: ``busy``, where the earlier run is still at work; ``stale_plan``, where it is the later one or
            has swapped.
    """
    try:
        earlier = Journal.open(folder, request.job)
    except FileNotFoundError:
        return
    except JournalError as error:
        raise RefusedError(
            "stale_plan", f"the journal of this job cannot be read: {error}; recover the host"
        ) from error
    try:
        records = earlier.records()
        if any(_generation(record) >= request.generation for record in records if "generation" in record):
            raise RefusedError("stale_plan", "this job was claimed again since; this run of it is not valid any more")
        if settle(earlier).outcome != REVERTED:
            raise RefusedError("stale_plan", "this job has replaced the image already; recover the host")
    except JournalError:
        settle(earlier)
    finally:
        earlier.close()


def _generation(record: dict[str, Any]) -> int:
    generation = record["generation"]
    return generation if isinstance(generation, int) else 0


def _outlast_late_openers(io: AgentIO, old: locking.FileId) -> None:
    """Who opened the old file by its name before the rename asks for its lock moments later, and must not get it."""
    time.sleep(GRACE)
    deadline = time.monotonic() + 10
    while (who := locking.opener([old])) is not None:
        if time.monotonic() > deadline:
            io.log(f"{who} still has the replaced file open; what it does there is not in the image", "warning")
            return
        time.sleep(GRACE)


# What a journal and the names beside it mean


def settle(one: Journal) -> Settled:
    """Finish or put back what a journal tells of, by names and the journal alone.

    Args:
        one: an open journal; it is removed where nothing is left to be kept.

    Returns:
        What became of it.

    Raises:
        OSError: the folder cannot be written or read.
    """
    try:
        records = one.records()
        return _settle(one, Story.of(records))
    except JournalError as error:
        return _settle_unreadable(one, str(error))


@dataclass(frozen=True)
class Story:
    """A journal's records, read into one.

    Args:
        name: of the image, in the journal's folder.
        original: the image before the swap.
        keep_undo: whether the original is kept after it.
        ready: the new file, finished and synced; ``None`` before that.
        done: the new file under the image's name; ``None`` before that.
        copy: the original as undo copy, where the agent that swapped could still write it down.
        undo_job: the undo that has begun, if any.
    """

    name: bytes
    original: Stamp
    keep_undo: bool
    ready: Stamp | None = None
    done: Stamp | None = None
    copy: Stamp | None = None
    undo_job: str | None = None

    @classmethod
    def of(cls, records: list[dict[str, Any]]) -> Story:
        """The story that a journal's records tell; raises JournalError."""
        first = records[0]
        try:
            name = unb64(first["name_b64"])
            keep_undo = bool(first["undo_hours"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise JournalError("it does not say of which image it is") from error
        if not name or b"/" in name or b"\0" in name or name in {b".", b".."} or journal.parse_name(name):
            raise JournalError("it names something that is no image")
        story = cls(name, Stamp.parse(first.get("original")), keep_undo)
        for record in records[1:]:
            if record["step"] == journal.READY:
                story = replace(story, ready=Stamp.parse(record.get("new")))
            elif record["step"] == journal.DONE:
                copy = Stamp.parse(record["undo"]) if "undo" in record else None
                story = replace(story, done=Stamp.parse(record.get("new")), copy=copy)
            elif record["step"] == journal.UNDO:
                story = replace(story, undo_job=str(record.get("job")))
            elif record["step"] == journal.UNDO_REVERTED:
                story = replace(story, undo_job=None)
        return story


def _settle(one: Journal, story: Story) -> Settled:
    named = stat_in(one.folder, story.name)
    if story.undo_job is not None:
        return _settle_undo(one, story, named)
    if story.done is None and story.ready is not None and named is not None and named.inode == story.ready.inode:
        # Renamed, but the last record is missing. Written to since? Then its time and size differ from these.
        os.fsync(one.folder)
        done = replace(named, file_size=story.ready.file_size, mtime_ns=story.ready.mtime_ns)
        one.append(journal.DONE, new=done)
        return replace(_settle_done(one, story), outcome=FINISHED)
    if story.done is not None:
        return _settle_done(one, story)
    return _revert(one, story, named)


def _settle_done(one: Journal, story: Story) -> Settled:
    undo_name = journal.file_name(one.job, "orig")
    copy = stat_in(one.folder, undo_name)
    settled = Settled(one.job, KEPT, story.name, story.original)
    if story.keep_undo:
        if copy is None or copy.inode != story.original.inode:
            return replace(settled, detail="the undo copy was removed by somebody else")
        return replace(settled, undo_bytes=copy.allocated_size)
    if copy is not None and copy.inode == story.original.inode:
        unlink(one.folder, undo_name)
    one.remove()
    return replace(settled, outcome=FINISHED)


def _revert(one: Journal, story: Story, named: Stamp | None) -> Settled:
    unlink(one.folder, journal.file_name(one.job, "new"))
    undo_name = journal.file_name(one.job, "orig")
    copy = stat_in(one.folder, undo_name)
    settled = Settled(one.job, REVERTED, story.name, story.original)
    if copy is not None and (named is None or named.inode != copy.inode):
        # Somebody else removed or exchanged the image in the moment before the rename: this is its last name.
        return replace(
            settled,
            outcome=FAILED,
            undo_bytes=copy.allocated_size,
            detail="the image was removed or exchanged by somebody else; the original is kept as undo copy",
        )
    if copy is not None:
        unlink(one.folder, undo_name)
    one.remove()
    return settled


def _settle_undo(one: Journal, story: Story, named: Stamp | None) -> Settled:
    undo_job = str(story.undo_job)
    if named is not None and named.inode == story.original.inode:
        os.fsync(one.folder)
        one.remove()
        return Settled(undo_job, FINISHED, story.name, story.original, undo_of=one.job)
    one.append(journal.UNDO_REVERTED, job=undo_job)
    copy = stat_in(one.folder, journal.file_name(one.job, "orig"))
    held = copy.allocated_size if copy is not None else 0
    return Settled(undo_job, REVERTED, story.name, story.original, held, undo_of=one.job)


def _settle_unreadable(one: Journal, why: str) -> Settled:
    """A journal that was cut off before its first record was whole: nothing else was made by then, or only a copy."""
    copy = stat_in(one.folder, journal.file_name(one.job, "orig"))
    if copy is not None:
        return Settled(one.job, FAILED, undo_bytes=copy.allocated_size, detail=f"the journal says nothing: {why}")
    unlink(one.folder, journal.file_name(one.job, "new"))
    one.remove()
    return Settled(one.job, REVERTED)


# Backwards


@dataclass(frozen=True)
class Ends:
    """What an undo exchanges: descriptors of the image that is there now and of the undo copy, and the image's name."""

    name: bytes
    new: int
    old: int


def swap_back(one: Journal, request: Request, ends: Ends, io: AgentIO, recheck: Callable[[], None]) -> None:
    """Put an undo copy back into its image's place; what was there is gone afterwards.

    Args:
        one: the journal of the replacement that is undone; removed in the end.
        request: the undo.
        ends: the two files.
        io: the controller, which has to say ``go``.
        recheck: raises where something has changed; called under the image locks.

    Raises:
        StoppedError, RefusedError: nothing was changed.
    """
    one.append(journal.UNDO, job=request.job, generation=request.generation)
    undo_name = journal.file_name(one.job, "orig")
    try:
        io.wait_for_go(request.generation)
        locking.keep_writers_away(ends.new)
        locking.keep_writers_away(ends.old)
        recheck()
        os.rename(undo_name, ends.name, src_dir_fd=one.folder, dst_dir_fd=one.folder)
        os.fsync(one.folder)
        _outlast_late_openers(io, locking.file_id(ends.new))
    except PermissionError as error:
        raise RefusedError("immutable", "the image is protected (chattr +i), so it cannot be replaced") from error
    finally:
        settle(one)


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
