"""The moment in which one file takes over from another: what is looked at before, while and after it happens.

While it lasts, a door (``open_gate.py``) is shut before both files. Behind it everything is compared with the plan for
the last time, then the names change, then is looked at what came out. Whoever has knocked by then found the old file
under the name: it gets that again before he is let in. Where a host lets the agent keep no door, who opened the old
file in the moment is looked for afterwards, for a while; what was written by then shows in the file's time and size.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable

from storage_admin.agent.folders.pools import held
from storage_admin.agent.host import attributes, locking
from storage_admin.agent.host.open_gate import Doors
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import BOTH_KEPT, STRANGERS_KEPT, HostError, RefusedError, Request, StoppedError
from storage_admin.agent.swap import fence
from storage_admin.agent.swap.exchange import StrangerError, TakeOver
from storage_admin.agent.swap.fence import Held
from storage_admin.agent.swap.journal import FLAGS, Stamp
from storage_admin.agent.swap.outcome import same_content, stamp_now, unlink

#: Seconds for which is waited for those who looked the name up before it changed and are on their way to the file.
GRACE = 0.3
#: Seconds after which who still has the old file open is not one that was refused by the locks and goes away.
PASSING_OPENER = 10.0
#: Seconds for which is tried again where somebody who passes by knocks before anything has changed.
PATIENCE = 10.0
WRITER = "someone who wrote to it"
_KNOCKED = "someone who waits for it"


class BothUsedError(HostError):
    """Both files are in use, or may be: neither is removed, the one that the job made has the image's name."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, BOTH_KEPT)


@dataclass(frozen=True)
class TakenOver:
    """The files right afterwards, before anybody else could open them by their names."""

    came: Stamp
    went: Stamp


@dataclass(frozen=True)
class Guard:
    """Who keeps guests away where no door can be kept: the controller, by their locks at the hypervisor.

    Args:
        held: the guests that it has locked.
        generation: of the request, for what is asked of it.
        keep: where guests may use either file afterwards, whether the one that came keeps the name.
    """

    held: Held
    generation: int
    keep: bool = True

    @classmethod
    def of(cls, request: Request, *, keep: bool = True) -> Guard:
        """As a request says."""
        return cls(Held.of(request.args), request.generation, keep)

    def refuse_alone(self, doors: Doors) -> None:
        """Refuse on a node of Proxmox VE where there are neither doors nor locks: its hypervisors take no image locks.

        Raises:
            RefusedError: ``guests_unknown``.
        """
        if not doors.shut and not self.held.guests and fence.is_node():
            raise RefusedError(
                "guests_unknown",
                "QEMU of Proxmox VE takes no image locks, this storage (on a network, or without fanotify) does "
                "not let the agent hold back other programs, and no guest was locked. A guest could start during "
                "the swap. Move the disk to local storage first",
            )

    def refuse(self, doors: Doors, moves: TakeOver) -> None:
        """The same in the moment of the swap; raises as :meth:`refuse_alone` and :meth:`Held.refuse_unlocked`."""
        self.refuse_alone(doors)
        if self.held.guests:
            self.held.refuse_unlocked(*moves.public_names)

    def user_elsewhere(self, moves: TakeOver, io: AgentIO) -> str | None:
        """Who on another host has found the file that went by its name; asks the controller, who asks all of them.

        Raises:
            BothUsedError: that is not known, or both files are used: neither is removed.
        """
        if not self.held.is_asked_for:
            return None
        try:
            if self.held.guests:
                self.held.refuse_unlocked(*moves.public_names)
            io.wait_for_go(self.generation, exchanged=1)
        except StoppedError:
            raise self._unsure(moves, "the dashboard could not confirm it for all hosts") from None
        except (RefusedError, HostError) as error:
            if error.code == "image_in_use":
                return "a program on another host"
            raise self._unsure(moves, error.detail) from error
        return None

    def keep_both(self, moves: TakeOver) -> None:
        """Leave the image's name to the file that may keep it, and the other one beside it; raises HostError."""
        if self.keep:
            moves.finish()
        elif not moves.back():
            raise _stranger(False)

    def _unsure(self, moves: TakeOver, what: str) -> BothUsedError:
        self.keep_both(moves)
        return BothUsedError(
            f"it is not known whether other hosts used the files during the swap: {what}. Both files are kept, one "
            "of them as the undo copy. Compare them"
        )


def take_over(
    moves: TakeOver,
    going: int,
    coming: int,
    look: Callable[[], None],
    io: AgentIO,
    guard: Guard,
    dress: Callable[[], None] | None = None,
) -> TakenOver:
    """Let one file take over from another.

    Args:
        moves: the steps.
        going: descriptor of the file that goes, with the image locks on it.
        coming: of the one that comes, likewise.
        look: raises where anything differs from the plan or somebody uses a file; opens none of both.
        io: the controller.
        guard: who keeps guests away beside the doors.
        dress: gives the file that comes the owner and mode of the other one, once nothing speaks against it any more;
            until then, and where it does not take over, it is this user's alone.

    Raises:
        RefusedError: what ``look`` raised, ``stale_plan`` or ``image_in_use``; the names are as they were.
        BothUsedError: it is done, and somebody uses the file that went.
        HostError: strangers' files came in between, and all of them are under some name.
        FileExistsError: the new name is taken; nothing was changed.
        OSError: the host failed; settling the journal puts right what is half done.
    """

    def look_behind(doors: Doors) -> None:
        guard.refuse(doors, moves)
        if not doors.shut:
            io.log("no door can be kept before the image here: who opens it in the moment of the swap is looked for "
                   "afterwards", "warning")  # fmt: skip
        look()
        if dress is not None and not doors.knocked():
            dress()
            look()

    def give_up() -> None:
        if dress is not None:
            attributes.cover(coming)

    with shut(look_behind, going, coming, give_up) as (doors, before):
        return _take_over(moves, going, coming, io, guard, doors, before)


@contextlib.contextmanager
def shut(
    look: Callable[[Doors], None], going: int, coming: int | None = None, give_up: Callable[[], None] = lambda: None
) -> Iterator[tuple[Doors, Stamp]]:
    """Behind shut doors, once everything was compared there and nobody has knocked meanwhile.

    Args:
        look: raises where anything differs from the plan or somebody uses a file; opens none of both.
        going: descriptor of the file that is about to lose its name.
        coming: of the one that gets it, if any.
        give_up: called behind the doors before they are opened again and nothing has happened.

    Yields:
        The doors, and the first file as it was before the look.

    Raises:
        RefusedError: ``image_in_use``, where somebody opens it again and again; what ``look`` raised.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        with Doors(going, coming) as doors:
            # Before the look, which compares with the plan: what was written in between would be forgiven else.
            before = Stamp.of(os.fstat(going))
            passed = False
            try:
                look(doors)
                passed = not doors.knocked()
            finally:
                if not passed:
                    give_up()
                    doors.keep_out()
            if passed:
                yield doors, before
                return
        if time.monotonic() > deadline:
            raise RefusedError("image_in_use", "programs open the image again and again; stop them and try again")
        time.sleep(0.05)  # who was let in may only pass by


def remove(doors: Doors, fd: int, folder: int, name: bytes) -> None:
    """Unlink a file behind its shut door: who found it by that name does not get one to write to that has none.

    Args:
        fd: its descriptor.
        folder, name: where it is.
    """
    unlink(folder, name)
    if not os.fstat(fd).st_nlink:  # else it has another name, by which anybody may use it
        doors.turn_away(GRACE)


def refuse_unguarded(fd: int, guard: Guard) -> None:
    """What :meth:`Guard.refuse_alone` says of a file, before it is copied for nothing."""
    if fence.is_node():
        with Doors(fd) as doors:
            guard.refuse_alone(doors)


def _take_over(
    moves: TakeOver, going: int, coming: int, io: AgentIO, guard: Guard, doors: Doors, before: Stamp
) -> TakenOver:
    made = Stamp.of(os.fstat(coming))
    try:
        moves.forward(coming)
    except StrangerError as error:
        locking.let_go(going)
        doors.take_back(GRACE)
        raise _stranger(error.settled) from error
    who = late(doors, going, before) or guard.user_elsewhere(moves, io)
    # Once more: who has written elsewhere without locks, and was gone when his host was asked, has left it there.
    if who is None and not same_content(stamp_now(going), before):
        who = WRITER
    if who is None:
        moves.finish()
        if doors.shut:
            locking.let_go(coming)  # a guest that waits is let in, not refused
        # Only now, and before anybody else is let in: an undo compares with it.
        return TakenOver(stamp_now(coming), stamp_now(going))
    if not doors.shut and (used := _who_uses(coming, made)):
        guard.keep_both(moves)
        raise BothUsedError(
            f"during the swap, the old file was opened by {who}, and the new one by {used}. Both are kept, the "
            "original as the undo copy. Compare them"
        )
    settled = moves.back()
    locking.let_go(going)
    doors.take_back(GRACE)
    if not settled:
        raise _stranger(settled)
    raise RefusedError("image_in_use", f"the image was opened during the swap by {who}; it is unchanged")


def closed(done: TakenOver, folder: int, name: bytes, coming: int, going: int) -> TakenOver | None:
    """Both files as they stay: on NFS the one that came has a name that goes only when nobody has it open any more.

    Args:
        done: the files before that.
        folder, name: where the file that came is.
        coming: its descriptor, which is opened anew by that name; nothing else of this process may have it open.
        going: descriptor of the other one.

    Returns:
        ``None`` where that name does not go soon, or somebody has changed a file meanwhile: nobody knows then.
    """
    try:
        with held(os.open(name, FLAGS, dir_fd=folder)) as anew:
            os.dup2(anew, coming, inheritable=False)
        deadline = time.monotonic() + PASSING_OPENER
        while os.stat(name, dir_fd=folder, follow_symlinks=False).st_nlink > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        came, went = stamp_now(coming), stamp_now(going)
        alone = os.fstat(coming).st_nlink == 1 and came.same_file(done.came)
    except OSError:  # all is done: what is not known stays so
        return None
    same = same_content(came, done.came) and went == done.went
    return TakenOver(came, went) if alone and same else None


def _stranger(settled: bool) -> Exception:
    if settled:
        return RefusedError("stale_plan", "the image was replaced by someone else; scan the host and try again")
    return HostError(
        "during the swap, other files were given the name of the image more than once. All of them are kept: the "
        "last one has the name, the others have names that begin with .sa- in the same folder. Check them yourself",
        STRANGERS_KEPT,
    )


def late(doors: Doors, going: int, before: Stamp) -> str | None:
    """Who found the file that went under its name, and has to find it there again; ``None`` where nobody did.

    Also who only reads: that may be the first half of somebody who writes. QEMU as libvirt starts it
    (``auto-read-only``) opens an image for reading, and then once more, by its name, for writing; libvirt itself has
    read the headers of the chain before. Let in to the old file, it would go on in the new one with what it read there.
    An agent of ours that reads is no such somebody: what it tells of the old file, the scan that follows mends.
    """
    if doors.stranger_knocked(GRACE):
        return _KNOCKED
    who = user(going) if doors.shut else outlast_late_openers(going)
    if who is None and not same_content(stamp_now(going), before):
        return WRITER
    return who


def _who_uses(coming: int, made: Stamp) -> str | None:
    used = locking.opener([locking.file_id(coming)])
    return used or (None if same_content(stamp_now(coming), made) else WRITER)


def outlast_late_openers(old: int) -> str | None:
    """Who opened the old file by its name before the rename asks for its lock moments later, and must not get it.

    Args:
        old: descriptor of the old file, open for reading only.

    Returns:
        Who has it open still, after seconds; ``None`` where nobody has, as far as can be seen.
    """
    time.sleep(GRACE)
    deadline = time.monotonic() + PASSING_OPENER
    while (who := user(old)) is not None:
        if time.monotonic() > deadline:
            return who
        time.sleep(GRACE)
    return None


def user(fd: int) -> str | None:
    """Who has a file open, as far as this process may see."""
    try:
        return locking.user(fd)
    except RefusedError:  # a process that may not be looked into: of the others it is known
        return locking.opener([locking.file_id(fd)])
