"""A new file gets a name that no other file has: what a conversion ends in.

Beside the original (:class:`Publication`), or without one (:class:`Birth`), the journal is that of a swap that keeps
no undo copy, so that :mod:`storage_admin.agent.swap.settle` treats all alike: before the name leads to the new file,
all is put back; from then on it is finished. In the original's place (:class:`Succession`) the original's own name goes
as well; at any moment at least one of both names leads to a whole image, and from the moment that the new one does, it
is finished.
"""

from __future__ import annotations

import os

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import HostError, RefusedError, Request, b64, display
from storage_admin.agent.swap import exchange, journal
from storage_admin.agent.swap.journal import Stamp
from storage_admin.agent.swap.outcome import stat_in
from storage_admin.agent.swap.settle import settle
from storage_admin.agent.swap.swap import Looks, NewFile, Replacement, Swapped


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

    def swap(self, io: AgentIO, looks: Looks) -> Swapped:
        """Give the new file its name. The original keeps its own, so that nothing happens to who opens it meanwhile."""
        self.written()
        io.wait_for_go(self.generation, **self.facts())
        looks.thorough()
        self.check_made()
        self.dress()
        for name, fd in self.parts:
            self._link(fd, name)
        self._check_parts()
        self._link(self.new, self.name)
        new = Stamp.of(os.fstat(self.new))
        self._journal.append(journal.DONE, new=new)
        settle(self._journal)
        return Swapped(new, new.allocated_size)

    def _link(self, fd: int, name: bytes) -> None:
        try:
            exchange.link(fd, self.folder, name)
        except FileExistsError:
            _refuse_taken(self.folder, name)
            raise

    def _check_parts(self) -> None:
        """Each part has its name by now, so that all are there once the first one has; raises HostError."""
        for name, fd in self.parts:
            if not Stamp.of(os.fstat(fd)).same_file(stat_in(self.folder, name)):
                raise HostError(f"{display(name)} was replaced by someone else")


class Birth(Publication):
    """A new file that is made from no other: it is of the agent's user alone, as a new volume of libvirt's is.

    Args:
        folder, name, request: as for :class:`swap.NewFile`.
    """

    def __init__(self, folder: int, name: bytes, request: Request) -> None:
        # The journal tells of a folder where it would tell of the original: no name of an image leads to it.
        super().__init__(folder, name, folder, request)

    def dress(self) -> None:
        """Leave it as it was made: mode 0600."""

    def facts(self) -> dict[str, int]:
        """As of any new file; nothing was there before."""
        return super().facts() | {"before_bytes": 0}


class Succession(Replacement):
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

    def swap(self, io: AgentIO, looks: Looks) -> Swapped:
        """Give the new file its name, and take the original's away."""
        try:
            return super().swap(io, looks)
        except FileExistsError:
            _refuse_taken(self.folder, self.name)
            raise


def _refuse_taken(folder: int, name: bytes) -> None:
    if stat_in(folder, name) is not None:
        raise RefusedError("target_exists", f"{display(name)} already exists; choose another name")
