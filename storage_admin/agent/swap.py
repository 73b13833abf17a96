"""The only code that puts a file in another one's place.

A kill, a power cut or a full disk at any point leaves the original or the finished result under the image's name.
:mod:`storage_admin.agent.settle` says from the journal and the names alone which of both it is, and clears the rest.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Callable, NoReturn

from storage_admin.agent import attributes, journal, locking
from storage_admin.agent.journal import Journal, JournalError, Stamp
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import HostError, RefusedError, Request, b64
from storage_admin.agent.settle import REVERTED, same_content, settle, stat_in

#: Seconds that the locks outlast the swap: who opened the old file by its name just before is refused by then.
GRACE = 0.3
#: Seconds after which who still has the old file open is not one that was refused by the locks and goes away.
PASSING_OPENER = 10.0
WRITER = "somebody who has written to it"


@dataclass(frozen=True)
class Swapped:
    """A replacement that is done. ``undo_bytes`` is what the undo copy occupies; ``None`` where none was kept."""

    new: Stamp
    undo_bytes: int | None


class NewFile(ABC):
    """A new file with its journal, which will get a name: an image's, or one of its own.

    Use it as a context manager: whatever has not got its name when it is left is put back.

    Args:
        folder: descriptor of the folder that it is made in.
        name: that it will have.
        original: descriptor of the image that it is made from.
        request: whose work it is.
        undo_hours: how long the original is kept; 0 keeps none.
        more: what the journal's first record says beside that.

    Raises:
        OSError: the files cannot be made; FileExistsError, where the job has some (see :func:`clear_earlier`).
    """

    def __init__(
        self, folder: int, name: bytes, original: int, request: Request, undo_hours: float, **more: str
    ) -> None:
        self.folder, self.name, self.original = folder, name, original
        self.job, self.generation = request.job, request.generation
        self.new_name = journal.file_name(self.job, "new")
        self._journal = Journal.create(
            folder,
            self.job,
            generation=self.generation,
            name_b64=b64(name),
            original=Stamp.of(os.fstat(original)),
            undo_hours=undo_hours,
            **more,
        )
        self.new = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.new = os.open(self.new_name, flags, 0o600, dir_fd=folder)
            self._prepare()
        except BaseException:
            self._end()
            raise

    def _prepare(self) -> None:  # noqa: B027 (not every file needs anything)
        """What has to be done to the file before its first byte."""

    def __enter__(self) -> NewFile:  # noqa: PYI034 - Self is younger than Python 3.9
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

    def note_left(self, bases: Sequence[tuple[bytes, Stamp]]) -> None:
        """Write down which images the original stands on that the new one does not: an undo needs them as they are.

        Args:
            bases: path and stamp of each.
        """
        if bases:
            told = [{"path_b64": b64(path), "stamp": asdict(stamp)} for path, stamp in bases]
            self._journal.append(journal.LEFT, bases=told)

    def check_names(self, image: bytes) -> None:
        """Both names, in the very folder that is worked in, must be of the files that were looked at and made.

        The folder and the image were opened one after the other, and who may rename folders of the pool could have put
        another one there in between.

        Args:
            image: the name that the original has.

        Raises:
            RefusedError: ``stale_plan``.
            HostError: the new file was exchanged, or is used.
        """
        named = stat_in(self.folder, image)
        if named is None or not named.same_file(Stamp.of(os.fstat(self.original))):
            raise RefusedError("stale_plan", "the image was exchanged by somebody else; scan the host and try again")
        made = stat_in(self.folder, self.new_name)
        if made is None or not made.same_file(Stamp.of(os.fstat(self.new))) or os.fstat(self.new).st_nlink != 1:
            raise HostError("the temporary file was exchanged by somebody else")
        if locking.locked_bytes(self.new) or locking.opener([locking.file_id(self.new)]):
            raise HostError("the temporary file is used by somebody else")

    def facts(self) -> dict[str, int]:
        """What the controller is told before the swap: bytes that both files occupy, and the inode of the new one."""
        made = Stamp.of(os.fstat(self.new))
        before = os.fstat(self.original).st_blocks * 512
        return {"before_bytes": before, "made_bytes": made.allocated_size, "made_inode": made.inode}

    def _let_late_openers_win(self, io: AgentIO, before: Stamp, made: Stamp, bring_back: Callable[[], None]) -> None:
        """Who opened the original by its name right before that went is a user of it, whatever the locks say.

        What was written to it is nowhere else: it gets its name again, unless somebody uses the new file by now. Then
        both stay, and settling keeps the original as undo copy.

        Args:
            io: the controller.
            before: the original, right before the swap.
            made: the new file, right after it.
            bring_back: gives the original its name again; settling the journal clears the rest.

        Raises:
            RefusedError: ``image_in_use``; the original has its name again.
        """
        who = outlast_late_openers(self.original)
        if who is None and same_content(Stamp.of(os.fstat(self.original)), before):
            return
        found = who or WRITER
        used = locking.opener([locking.file_id(self.new)])
        if used is not None or not same_content(Stamp.of(os.fstat(self.new)), made):
            io.log(f"the original was opened in the moment of the swap by {found}, the new image as well: the original "
                   "is kept as undo copy, look at both", "error")  # fmt: skip
            return
        self._take_back(found, bring_back)

    def _take_back(self, who: str, bring_back: Callable[[], None]) -> NoReturn:
        """The original has its own name again, and the new file goes; raises RefusedError(``image_in_use``)."""
        self._journal.append(journal.UNDO, job=self.job, generation=self.generation, new=Stamp.of(os.fstat(self.new)))
        bring_back()
        os.fsync(self.folder)
        settle(self._journal)
        raise RefusedError("image_in_use", f"the image was opened in the moment of the swap by {who}; it is as it was")

    @abstractmethod
    def swap(self, io: AgentIO, recheck: Callable[[], None]) -> Swapped:
        """Give the new file its name, once the controller has said ``go`` and ``recheck`` raises nothing."""


class Replacement(NewFile):
    """A new file beside an image that will take its place."""

    def _prepare(self) -> None:
        attributes.copy_flags(self.original, self.new)

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
        io.wait_for_go(self.generation, **self.facts())
        # Locks first, questions afterwards: a writer that was there before does not hinder the locks.
        locking.keep_writers_away(self.original)
        locking.keep_writers_away(self.new)
        recheck()
        self.check_names(self.name)
        undo_name = journal.file_name(self.job, "orig")
        before = Stamp.of(os.fstat(self.original))
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
        self._let_late_openers_win(
            io, before, new, lambda: os.rename(undo_name, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        )
        settled = settle(self._journal)
        return Swapped(new, settled.undo_bytes if settled.undo_waits else None)


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


def outlast_late_openers(old: int) -> str | None:
    """Who opened the old file by its name before the rename asks for its lock moments later, and must not get it.

    Args:
        old: descriptor of the old file, open for reading only.

    Returns:
        Who has it open still, after seconds; ``None`` where nobody has, as far as can be seen.
    """
    time.sleep(GRACE)
    deadline = time.monotonic() + PASSING_OPENER
    while (who := _user(old)) is not None:
        if time.monotonic() > deadline:
            return who
        time.sleep(GRACE)
    return None


def _user(fd: int) -> str | None:
    try:
        return locking.user(fd)
    except RefusedError:  # a process that may not be looked into: of the others it is known
        return locking.opener([locking.file_id(fd)])


@dataclass(frozen=True)
class Ends:
    """What an undo exchanges: descriptors of the image that is there now and of the undo copy, and the image's name.

    ``old_name`` is the name that the original had, where the job gave the image another one.
    """

    name: bytes
    new: int
    old: int
    old_name: bytes | None = None


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
    one.append(journal.UNDO, job=request.job, generation=request.generation, new=Stamp.of(os.fstat(ends.new)))
    undo_name = journal.file_name(one.job, "orig")
    try:
        gone, back = Stamp.of(os.fstat(ends.new)), Stamp.of(os.fstat(ends.old))
        facts = {"before_bytes": gone.allocated_size, "made_bytes": back.allocated_size, "made_inode": back.inode}
        io.wait_for_go(request.generation, **facts)
        locking.keep_writers_away(ends.new)
        locking.keep_writers_away(ends.old)
        recheck()
        if ends.old_name is None:
            os.rename(undo_name, ends.name, src_dir_fd=one.folder, dst_dir_fd=one.folder)
        else:
            # A link takes no name away from another file. With it the undo is decided; settling it clears the rest.
            os.link(undo_name, ends.old_name, src_dir_fd=one.folder, dst_dir_fd=one.folder, follow_symlinks=False)
        os.fsync(one.folder)
        if (who := outlast_late_openers(ends.new)) is not None:
            io.log(f"{who} still has the replaced file open; what it does there is not in the image", "warning")
    except PermissionError as error:
        raise RefusedError("immutable", "the image is protected (chattr +i), so it cannot be replaced") from error
    except FileExistsError as error:
        raise RefusedError("target_exists", "another file has the original's name by now; move it away") from error
    finally:
        settle(one)
