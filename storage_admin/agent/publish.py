"""A new file gets a name that no other file has: what a conversion beside the original ends in.

The journal is that of a swap that keeps no undo copy, so that :mod:`storage_admin.agent.settle` treats both alike:
before the name leads to the new file, all is put back; from then on it is finished.
"""

from __future__ import annotations

import os
from typing import Callable

from storage_admin.agent import journal
from storage_admin.agent.journal import Stamp
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.pools import display
from storage_admin.agent.protocol import HostError, RefusedError, Request
from storage_admin.agent.settle import settle, stat_in
from storage_admin.agent.swap import NewFile, Swapped


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
        io.wait_for_go(self.generation)
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
        return Swapped(new, 0)


def _refuse_taken(folder: int, name: bytes) -> None:
    if stat_in(folder, name) is not None:
        raise RefusedError("target_exists", f"there is a {display(name)} already; choose another name")
