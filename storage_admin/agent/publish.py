"""A new file gets a name that no other file has: what a conversion ends in.

Beside the original (:class:`Publication`) the journal is that of a swap that keeps no undo copy, so that
:mod:`storage_admin.agent.settle` treats both alike: before the name leads to the new file, all is put back; from then
on it is finished. In the original's place (:class:`Succession`) the original's own name goes as well; at any moment at
least one of both names leads to a whole image, and from the moment that the new one does, it is finished.
"""

from __future__ import annotations

import os
from typing import Callable

from storage_admin.agent import attributes, journal, locking
from storage_admin.agent.journal import Stamp
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.pools import display
from storage_admin.agent.protocol import HostError, RefusedError, Request, b64
from storage_admin.agent.settle import retire_old_name, settle, stat_in, unlink
from storage_admin.agent.swap import WRITER, NewFile, Swapped


class Publication(NewFile):
    """A new file that will get a name of its own; nothing may have that name.

    Args:
        folder, name, original, request: as for :class:`swap.NewFile`.

    Raises:
        RefusedError: ``target_exists``.
        OSError: the files cannot be made.
    """

    def __init__(self, folder: int, name: bytes, original: int, request: Request) -> None:
        _refuse_taken(folder, name)
        super().__init__(folder, name, original, request, undo_hours=0)

    def swap(self, io: AgentIO, recheck: Callable[[], None]) -> Swapped:
        """Give the new file its name.

        Args:
            io: the controller, which has to say ``go``.
            recheck: raises where the original, its base or their users changed.

        Raises:
            StoppedError: the controller did not say ``go``; nothing was changed.
            RefusedError: what ``recheck`` raised, or ``target_exists``; nothing was changed.
        """
        os.fsync(self.new)
        self._journal.append(journal.READY, new=Stamp.of(os.fstat(self.new)))
        io.wait_for_go(self.generation, **self.facts())
        recheck()
        made = stat_in(self.folder, self.new_name)
        if made is None or not made.same_file(Stamp.of(os.fstat(self.new))):
            raise HostError("the temporary file was exchanged by somebody else")
        try:
            # Unlike a rename, a link never takes a name away from another file.
            os.link(self.new_name, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder, follow_symlinks=False)
        except FileExistsError:
            _refuse_taken(self.folder, self.name)
            raise
        os.fsync(self.folder)
        new = Stamp.of(os.fstat(self.new))
        self._journal.append(journal.DONE, new=new)
        settle(self._journal)
        return Swapped(new, None)


class Succession(NewFile):
    """A new file under a new name, which takes over from an image; that one's own name goes.

    Args:
        folder, name, original, request, undo_hours: as for :class:`swap.NewFile`; the original is in that folder.
        old_name: the name of the original.

    Raises:
        RefusedError: ``target_exists``.
        OSError: the files cannot be made.
    """

    def __init__(
        self, folder: int, name: bytes, original: int, request: Request, undo_hours: float, old_name: bytes
    ) -> None:
        _refuse_taken(folder, name)
        self.old_name = old_name
        super().__init__(folder, name, original, request, undo_hours, old_name_b64=b64(old_name))

    def _prepare(self) -> None:
        attributes.copy_flags(self.original, self.new)

    def swap(self, io: AgentIO, recheck: Callable[[], None]) -> Swapped:
        """Give the new file its name, and take the original's away.

        Args:
            io: the controller, which has to say ``go``.
            recheck: raises where the original, its base or their users changed; called under the image locks.

        Raises:
            StoppedError: the controller did not say ``go``; nothing was changed.
            RefusedError: what ``recheck`` raised, ``target_exists`` or ``immutable``; nothing was changed.
        """
        os.fsync(self.new)
        self._journal.append(journal.READY, new=Stamp.of(os.fstat(self.new)))
        io.wait_for_go(self.generation, **self.facts())
        locking.keep_writers_away(self.original)
        locking.keep_writers_away(self.new)
        recheck()
        self.check_names(self.old_name)
        before = Stamp.of(os.fstat(self.original))
        try:
            self._link(self.old_name, journal.file_name(self.job, "orig"))
            self._link(self.new_name, self.name)
            if not retire_old_name(self.folder, self.old_name, before):
                unlink(self.folder, self.new_name)
                self._take_back(WRITER, lambda: None)  # it has its name still
            unlink(self.folder, self.new_name)
        except FileExistsError:
            _refuse_taken(self.folder, self.name)
            raise
        except PermissionError as error:
            raise RefusedError(
                "immutable", "the image or its folder is protected (chattr +i), so it cannot be replaced"
            ) from error
        os.fsync(self.folder)
        new = Stamp.of(os.fstat(self.new))
        self._journal.append(journal.DONE, new=new, undo=Stamp.of(os.fstat(self.original)))
        self._let_late_openers_win(
            io, before, new, lambda: self._link(journal.file_name(self.job, "orig"), self.old_name)
        )
        settled = settle(self._journal)
        return Swapped(new, settled.undo_bytes if settled.undo_waits else None)

    def _link(self, name: bytes, other: bytes) -> None:
        """Another name for a file, on the disk before anything follows."""
        os.link(name, other, src_dir_fd=self.folder, dst_dir_fd=self.folder, follow_symlinks=False)
        os.fsync(self.folder)


def _refuse_taken(folder: int, name: bytes) -> None:
    if stat_in(folder, name) is not None:
        raise RefusedError("target_exists", f"there is a {display(name)} already; choose another name")
