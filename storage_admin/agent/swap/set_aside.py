"""An image gets another name and its own one back: how it is set aside, restored and deleted.

Nothing is written into the file and nothing of it changes but its names: owner, mode and attributes are those of the
inode. The only code that takes an image's own name away without putting another file there.
"""

from __future__ import annotations

import contextlib
import os
from typing import Callable

from storage_admin.agent.host import space
from storage_admin.agent.host.open_gate import Doors
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import RefusedError, Request
from storage_admin.agent.swap import exchange, journal, moment
from storage_admin.agent.swap.fence import Fence
from storage_admin.agent.swap.journal import Journal, Stamp
from storage_admin.agent.swap.outcome import stat_in
from storage_admin.agent.swap.swap import Looks

#: Seconds within which somebody who only passes by has to be gone.
PASSING_READER = 2.0


def put_aside(one: Journal, name: bytes, fd: int, request: Request, io: AgentIO, looks: Looks) -> None:
    """Give an image its other name, and take its own one away.

    A guest that is started meanwhile is refused by the locks, or waits at the door; whoever opened the image by its
    name just before, or waits for it, keeps it: the name comes back.

    Args:
        one: the journal; settling it tells how this ended, whatever is raised here.
        name: the image's, in the journal's folder.
        fd: descriptor of the image.
        request: whose work it is.
        io: the controller, which has to say ``go``.
        looks: raise where the image or its users changed; called under the image locks.

    Raises:
        StoppedError: the controller did not say ``go``.
        RefusedError: what a look or the fence raised, ``stale_plan``, ``image_in_use`` or ``immutable``.
    """
    io.wait_for_go(request.generation)
    other = journal.file_name(one.job, "aside")
    with Fence(one.folder, fd) as fence:
        looks.thorough()
        with moment.shut(lambda _: looks.last(), fd) as (doors, before):
            try:
                exchange.take(one.folder, name, other)
                _refuse_stranger(one.folder, name, other, fd)
            except FileNotFoundError as error:
                raise RefusedError("stale_plan", "the image no longer exists; scan the host and try again") from error
            except PermissionError as error:
                raise RefusedError(
                    "immutable",
                    "the image or its folder is protected (chattr +i or +a), as templates are, and is not changed",
                ) from error
            _let_late_openers_win(one.folder, name, other, fd, doors, before)
        one.append(journal.ASIDE, aside=Stamp.of(os.fstat(fd)))
        fence.outlast_names(fd, io)


def _refuse_stranger(folder: int, name: bytes, other: bytes, fd: int) -> None:
    """What was renamed must be the file that was looked at; another one gets its name back."""
    renamed = stat_in(folder, other)
    if renamed is None or not renamed.same_file(Stamp.of(os.fstat(fd))):
        if renamed is not None:
            with contextlib.suppress(FileExistsError):  # whose name is taken stays there: settling tells of it
                exchange.give(folder, other, name)
        raise RefusedError("stale_plan", "the image was replaced by someone else; scan the host and try again")


def _let_late_openers_win(folder: int, name: bytes, other: bytes, fd: int, doors: Doors, before: Stamp) -> None:
    """Who opened the image by its name right before that went is a user of it, whatever the locks say."""
    if (who := moment.late(doors, fd, before)) is None:
        return
    try:
        exchange.give(folder, other, name)
    except FileExistsError:
        return  # whose name is taken stays aside: nothing is taken away from another file
    raise RefusedError("image_in_use", f"the image was opened at this moment by {who}; it has its name again")


def put_back(one: Journal, name: bytes, request: Request, io: AgentIO, recheck: Callable[[], None]) -> None:
    """Give an image that is set aside its own name again; the other one goes.

    Args:
        one: its journal; settling it clears the rest.
        name: the image's own.
        request: the restore.
        io: the controller, which has to say ``go``.
        recheck: raises where the file is another one by now.

    Raises:
        StoppedError, RefusedError: nothing was changed; ``target_exists``, where another file has the name.
    """
    one.append(journal.RESTORE, job=request.job, generation=request.generation)
    io.wait_for_go(request.generation)
    recheck()
    other = journal.file_name(one.job, "aside")
    try:
        exchange.give(one.folder, other, name)
    except FileExistsError as error:
        named = stat_in(one.folder, name)  # settling takes the other one away where it has both
        if named is None or not named.same_file(stat_in(one.folder, other)):
            raise name_is_taken() from error
    except PermissionError as error:
        raise RefusedError("immutable", "the file or its folder is protected (chattr +i or +a)") from error


def name_is_taken() -> RefusedError:
    """The refusal where another file has the image's name by now."""
    return RefusedError(
        "target_exists", "another file has the name of the image now; move that file away, then restore the image"
    )


def remove(one: Journal, fd: int, request: Request, io: AgentIO, looks: Looks) -> None:
    """Delete an image that is set aside, for good.

    Args:
        one: its journal; settling it clears the rest.
        fd: descriptor of the image.
        request: the deletion.
        io: the controller, which has to say ``go``.
        looks: raise where the file is another one, was written to or is used; called under the image locks.

    Raises:
        StoppedError, RefusedError: nothing was changed; the latter also as :class:`Fence` raises it.
    """
    one.append(journal.DELETE, job=request.job, generation=request.generation)
    io.wait_for_go(request.generation)
    with Fence(one.folder, fd):
        looks.thorough()
        with moment.shut(lambda _: looks.last(), fd) as (doors, _):
            status = os.fstat(fd)
            freed = space.owned(fd) if status.st_nlink == 1 else 0
            # Afterwards nobody could tell any more.
            one.append(journal.DELETE, job=request.job, generation=request.generation, freed_bytes=freed)
            try:
                moment.remove(doors, fd, one.folder, journal.file_name(one.job, "aside"))
            except PermissionError as error:
                raise RefusedError("immutable", "the file or its folder is protected (chattr +i or +a)") from error
