"""The only code that puts a file in another one's place.

A kill, a power cut or a full disk at any point leaves the original or the finished result under the image's name.
:mod:`storage_admin.agent.swap.settle` says from the journal and the names alone which of both it is, and clears the
rest.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Callable

from storage_admin.agent.host import attributes, locking, space
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import HostError, RefusedError, Request, b64
from storage_admin.agent.swap import exchange, journal, moment
from storage_admin.agent.swap.fence import Fence
from storage_admin.agent.swap.journal import Journal, JournalError, Stamp, Story
from storage_admin.agent.swap.moment import Guard, refuse_unguarded, take_over
from storage_admin.agent.swap.outcome import REVERTED, Made, stat_in
from storage_admin.agent.swap.settle import settle


@dataclass(frozen=True)
class Swapped:
    """A replacement that is done.

    Args:
        new: the new file.
        made_bytes: what the filesystem gave for it: blocks that it shares took none.
        goes_bytes: what the filesystem gets back when the original goes, or has got back.
        undo_waits: whether the original waits as undo copy.
    """

    new: Stamp
    made_bytes: int
    goes_bytes: int = 0
    undo_waits: bool = False


@dataclass(frozen=True)
class Looks:
    """Both raise where anything is not as it was planned; called under the image locks.

    Args:
        thorough: looks at everything, and may take its time.
        last: right before the swap, behind a shut door: it must not open the image.
    """

    thorough: Callable[[], None]
    last: Callable[[], None]


#: How a file is made that nothing has the name of.
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


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
        self.job, self.generation, self.guard = request.job, request.generation, Guard.of(request)
        self.new_name = journal.file_name(self.job, "new")
        self._journal = Journal.create(
            folder,
            self.job,
            generation=self.generation,
            name_b64=b64(name),
            original=Stamp.of(os.fstat(original)),
            undo_hours=undo_hours,
            records_created=True,
            **more,
        )
        self.new = -1
        self.parts: list[tuple[bytes, int]] = []
        self._shared: dict[str, int] = {}
        try:
            self.new = os.open(self.new_name, _NEW, 0o600, dir_fd=folder)
            self._journal.append(journal.CREATED, new=Stamp.of(os.fstat(self.new)))
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
            for fd in (self.new, *self._part_fds):
                if fd >= 0:
                    os.close(fd)

    def add_part(self, name: bytes) -> int:
        """One more empty file, which gets its name together with the new one, or goes.

        Args:
            name: in the folder, which it will have.

        Returns:
            Its descriptor, which is closed with this.
        """
        fd = os.open(journal.part_name(self.job, len(self.parts)), _NEW, 0o600, dir_fd=self.folder)
        self.parts.append((name, fd))
        self._journal.append(journal.PART, name_b64=b64(name), new=Stamp.of(os.fstat(fd)))
        return fd

    def note_left(self, bases: Sequence[tuple[bytes, Stamp]]) -> None:
        """Write down which images the original stands on that the new one does not: an undo needs them as they are.

        Args:
            bases: path and stamp of each.
        """
        if bases:
            told = [{"path_b64": b64(path), "stamp": asdict(stamp)} for path, stamp in bases]
            self._journal.append(journal.LEFT, bases=told)

    def note_made(self, form: str, was: str) -> None:
        """Write down what the new file is, by which it is known again when its undo copy is to go.

        Args:
            form: its format.
            was: that of the original.
        """
        self._journal.append(journal.MADE, **Made.of(self.new, form, self.name, was).fields())

    def check_made(self) -> None:
        """The new file must have the name that it was made under, and no other; raises HostError."""
        made = stat_in(self.folder, self.new_name)
        if made is None or not made.same_file(Stamp.of(os.fstat(self.new))) or os.fstat(self.new).st_nlink != 1:
            raise HostError("the temporary file was replaced by someone else")
        for place, (_, fd) in enumerate(self.parts):
            made = stat_in(self.folder, journal.part_name(self.job, place))
            if made is None or not made.same_file(Stamp.of(os.fstat(fd))):
                raise HostError("a part was replaced by someone else")

    def dress(self) -> None:
        """Give the new file the original's owner, mode and attributes: it is root's alone until every check is done.

        Raises:
            HostError: they could not be set, or read back otherwise.
        """
        for fd in (self.new, *self._part_fds):
            attributes.copy(self.original, fd)
            os.fsync(fd)

    def facts(self) -> dict[str, int]:
        """What the controller is told before the swap: bytes that both files occupy, and the inode of the new one."""
        made = Stamp.of(os.fstat(self.new))
        before = os.fstat(self.original).st_blocks * 512
        sizes = {"before_bytes": before, "made_bytes": made.allocated_size, "made_inode": made.inode}
        sizes["made_bytes"] += self.parts_bytes
        return sizes | self._shared

    @property
    def _part_fds(self) -> list[int]:
        return [fd for _, fd in self.parts]

    @property
    def parts_bytes(self) -> int:
        """What all parts but the first one occupy."""
        return sum(map(space.allocated, self._part_fds))

    def written(self) -> None:
        """The new file is whole: have it on the disk, and its journal say so."""
        for fd in (*self._part_fds, self.new):
            os.fsync(fd)
        # A sibling on XFS or btrfs has most of its blocks in common with the original.
        self._shared = {
            "goes_shared": space.shared_bytes(self.original), "made_shared": space.shared_bytes(self.new)
        }  # fmt: skip
        more = {"parts_bytes": self.parts_bytes} if self.parts else {}
        self._journal.append(journal.READY, new=Stamp.of(os.fstat(self.new)), **self._shared, **more)

    @abstractmethod
    def swap(self, io: AgentIO, looks: Looks) -> Swapped:
        """Give the new file its name.

        Args:
            io: the controller, which has to say ``go``.
            looks: raise where the original, its base or their users changed.

        Raises:
            StoppedError: the controller did not say ``go``; nothing was changed.
            RefusedError: what a look raised, ``target_exists``, ``stale_plan``, ``image_in_use`` or ``immutable``;
                nothing was changed.
            HostError: others used both files, or put theirs there, in that very moment: nothing was removed.
        """


class Replacement(NewFile):
    """A new file beside an image that will take its place."""

    #: The image's name, where the new file gets another one.
    old_name: bytes | None = None

    def _prepare(self) -> None:
        refuse_unguarded(self.original, self.guard)
        attributes.copy_flags(self.original, self.new)

    def swap(self, io: AgentIO, looks: Looks) -> Swapped:
        image, comes, goes = self.old_name or self.name, os.fstat(self.new).st_ino, os.fstat(self.original).st_ino
        steps = exchange.moves(self.folder, self.job, comes, goes, self.name, self.old_name)
        self.written()
        io.wait_for_go(self.generation, **self.facts())
        with Fence(self.folder, self.original, self.new) as fence:
            looks.thorough()
            self._check_names(image)
            self._journal.append(journal.EXCHANGING, keeps=self.guard.held.is_asked_for)

            def last_look() -> None:
                self._check_names(image)
                looks.last()

            try:
                done = take_over(steps, self.original, self.new, last_look, io, self.guard, self.dress)
            except PermissionError as error:
                raise RefusedError(
                    "immutable", "the image or its folder is protected (chattr +i), so it cannot be replaced"
                ) from error
            late = {"late": True} if fence.closes_late else {}
            self._journal.append(journal.DONE, new=done.came, undo=done.went, **late)
            settled = settle(self._journal)
            if settled.undo_waits:
                fence.let_in()
                closed = moment.closed(done, self.folder, self.name, self.new, self.original) if late else None
                if closed is not None:
                    self._journal.append(journal.DONE, new=closed.came, undo=closed.went)
                fence.outlast_names(self.original, io)
        made = max(done.came.allocated_size - self._shared["made_shared"], 0)
        freed = max(os.fstat(self.original).st_blocks * 512 - self._shared["goes_shared"], 0)
        return Swapped(done.came, made, freed, settled.undo_waits)

    def _check_names(self, image: bytes) -> None:
        """Both names, in the very folder that is worked in, must be of the files that were looked at and made.

        The folder and the image were opened one after the other, and who may rename folders of the pool could have put
        another one there in between.

        Raises:
            RefusedError: ``stale_plan``.
            HostError: the new file was exchanged, or is used.
        """
        named = stat_in(self.folder, image)
        if named is None or not named.same_file(Stamp.of(os.fstat(self.original))):
            raise RefusedError("stale_plan", "the image was replaced by someone else; scan the host and try again")
        self.check_made()
        if locking.locked_bytes(self.new) or locking.opener([locking.file_id(self.new)]):
            raise HostError("the temporary file is in use by another program")


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
            raise RefusedError("stale_plan", "another run of this job has started since; this run is no longer valid")
        if settle(earlier).outcome != REVERTED:
            raise RefusedError("stale_plan", "this job has already replaced the image; recover the host")
    except JournalError:
        settle(earlier)
    finally:
        earlier.close()


def _generation(record: dict[str, Any]) -> int:
    generation = record["generation"]
    return generation if isinstance(generation, int) else 0


def swap_back(one: Journal, story: Story, new: int, old: int, request: Request, io: AgentIO, looks: Looks) -> int:
    """Put an undo copy back into its image's place; what was there is gone afterwards.

    Args:
        one: the journal of the replacement that is undone; removed in the end.
        story: what that tells.
        new, old: descriptors of the image that is there now and of the undo copy.
        request: the undo.
        io: the controller, which has to say ``go``.
        looks: raise where something has changed.

    Returns:
        How many bytes of what was there other files have as well, so that they are not free.

    Raises:
        StoppedError, RefusedError: nothing was changed.
        HostError: others used both files, or put theirs there, in that very moment: nothing was removed.
    """
    gone, back = Stamp.of(os.fstat(new)), Stamp.of(os.fstat(old))
    shared = space.shared_bytes(new)
    one.append(journal.UNDO, job=request.job, generation=request.generation, new=gone, goes_shared=shared)
    steps = exchange.moves(one.folder, one.job, gone.inode, back.inode, story.name, story.old_name, back=True)
    guard = Guard.of(request, keep=False)
    try:
        facts = {"before_bytes": gone.allocated_size, "made_bytes": back.allocated_size, "made_inode": back.inode}
        io.wait_for_go(request.generation, **facts, goes_shared=shared)
        with Fence(one.folder, new, old):
            looks.thorough()
            one.append(journal.EXCHANGING)
            take_over(steps, new, old, looks.last, io, guard)
    except PermissionError as error:
        raise RefusedError("immutable", "the image is protected (chattr +i), so it cannot be replaced") from error
    except FileExistsError as error:
        raise RefusedError("target_exists", "another file has the name of the original now; move it away") from error
    finally:
        settle(one)
    return shared
