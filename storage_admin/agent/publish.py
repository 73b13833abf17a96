"""A new file gets a name that no other file has: what a conversion beside the original ends in.

The journal is that of a swap that keeps no undo copy, so that :mod:`storage_admin.agent.settle` treats both alike:
before the name leads to the new file, all is put back; from then on it is finished.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Callable

from storage_admin.agent import journal
from storage_admin.agent.journal import Journal, Stamp
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.pools import display
from storage_admin.agent.protocol import HostError, RefusedError, Request, b64
from storage_admin.agent.settle import settle, stat_in
from storage_admin.agent.swap import Swapped


class Publication:
    """A new file that will get a name of its own. Use it as a context manager, like :class:`swap.Replacement`.

    Args:
        folder: descriptor of the folder that it comes into.
        name: that it will have; nothing may have it.
        original: descriptor of the image that it is made from.
        request: whose work it is.

    Raises:
        RefusedError: ``target_exists``.
        OSError: the files cannot be made.
    """

    def __init__(self, folder: int, name: bytes, original: int, request: Request) -> None:
        self.folder, self.name = folder, name
        self.generation = request.generation
        self.new_name = journal.file_name(request.job, "new")
        self._refuse_taken()
        self._journal = Journal.create(
            folder,
            request.job,
            generation=self.generation,
            name_b64=b64(name),
            original=Stamp.of(os.fstat(original)),
            undo_hours=0,
        )
        self.new = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self.new = os.open(self.new_name, flags, 0o600, dir_fd=folder)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Publication:  # noqa: PYI034 - Self is younger than Python 3.9
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

    def _refuse_taken(self) -> None:
        if stat_in(self.folder, self.name) is not None:
            raise RefusedError("target_exists", f"there is a {display(self.name)} already; choose another name")

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
            self._refuse_taken()
            raise
        os.fsync(self.folder)
        new = Stamp.of(os.fstat(self.new))
        self._journal.append(journal.DONE, new=new)
        settle(self._journal)
        return Swapped(new, 0)
