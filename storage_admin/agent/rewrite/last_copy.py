"""Whether an undo copy may be the last good copy of an image: only where it is known not to be may it go by itself.

It is known where the image is the very file that the job made, and nothing has changed in it since, or all that did
changed at times when a guest that is known used it, its header is as the job made it, and it still holds at least half
of the copy's data. What nobody can tell speaks for the copy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.folders.pools import held
from storage_admin.agent.formats import UnreadableError
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.measure.likeness import likeness
from storage_admin.agent.protocol import INVALID, Arguments, HostError, Moment, RefusedError, display
from storage_admin.agent.qemu.node import Node
from storage_admin.agent.swap.journal import FLAGS, Journal, JournalError, Stamp, Story, parse_name
from storage_admin.agent.swap.outcome import Identity, Made

#: Seconds before and after a guest's time that count to it: its manager changes the file's owner around it.
AROUND = 60.0
#: A clock may run so much faster than another one: a share of what has passed.
DRIFT = 0.001


@dataclass(frozen=True)
class Evidence:
    """What the controller knows.

    Args:
        by_itself: nobody asked for the removal: the undo window has closed.
        used: from and until when, as seconds before now, known guests and jobs used the image; ``None`` where that is
            not known.
        seen: the image's inode, and the times of its last change and of the last change of that inode in nanoseconds,
            as scans saw them.
    """

    by_itself: bool
    used: list[tuple[float, float]] | None
    seen: list[tuple[int, int, int]]

    @classmethod
    def parse(cls, args: Arguments) -> Evidence:
        """The arguments ``by_itself``, ``used`` and ``seen``; raises RefusedError(``invalid``)."""
        used, seen = args.maybe("used", list), args.get("seen", list, [])
        if not all(_are(one, 2, (int, float)) for one in used or []) or not all(_are(one, 3, (int,)) for one in seen):
            raise RefusedError(INVALID, "used and seen are lists of times")
        return cls(
            args.get("by_itself", bool, False),
            None if used is None else [(float(begin), float(end)) for begin, end in used],
            [(inode, mtime, ctime) for inode, mtime, ctime in seen],
        )


def _are(one: Any, count: int, kinds: tuple[type, ...]) -> bool:
    return isinstance(one, list) and len(one) == count and all(type(value) in kinds for value in one)


def refuse_early(records: list[dict[str, Any]], evidence: Evidence) -> None:
    """Of what goes by itself: its window must have passed on this host as well, by a clock that nobody can set.

    Where the host was booted since, it cannot tell, and the controller's own such clock alone counts.

    Raises:
        RefusedError: ``clock_unsure``.
    """
    made = Made.read(records)
    if not evidence.by_itself or made is None:
        return
    passed, hours = Moment.now().passed(made.at), records[0].get("undo_hours")
    window = float(hours) * 3600 if isinstance(hours, (int, float)) else 0.0
    if passed is not None and passed < window * (1 - DRIFT):
        raise RefusedError(
            "clock_unsure",
            f"the undo copy is not removed yet: it must be kept for {window:.0f} s, but only {passed:.0f} s have "
            "passed on this host, whatever its clock says. Correct the clocks of the host and the dashboard",
        )


def refuse_last(one: Journal, story: Story, copy: int, name: bytes, evidence: Evidence, io: AgentIO) -> None:
    """The copy stays where it is not known that the image has all that matters of it.

    Args:
        one: the job's journal.
        story: what it tells.
        copy: descriptor of the undo copy.
        name: of the image by now, in the same folder.
        evidence: what the controller knows.
        io: the controller.

    Raises:
        RefusedError: ``undo_kept``; ``clock_unsure``, where the host's clock was set since, so that nobody can tell
            when the image was changed.
    """
    made, done = Made.read(one.records()), story.done
    if made is None or done is None or made.inode != done.inode:
        _keep("its job did not record what it wrote, like jobs of earlier versions")
        return
    with _made_file(one.folder, name, made.inode) as (fd, last):
        if os.fstat(fd).st_ino != made.inode:
            _keep(f"{display(name)} is not the file that the job wrote")
        seen = {(mtime, ctime) for inode, mtime, ctime in evidence.seen if inode == made.inode}
        changes = {last, *seen} - {_times(done)}
        if not changes and os.fstat(fd).st_size == done.file_size:
            return
        _refuse_unexplained(made.at, {moment for change in changes for moment in change} - {*_times(done)}, evidence)
        _refuse_unlike(made, fd, name, copy, io)


def _refuse_unexplained(at: Moment, changes: set[int], evidence: Evidence) -> None:
    """Every change must fall into a time when somebody who is known used the image."""
    now = Moment.now()
    if jump := now.jumped(at):
        raise RefusedError(
            "clock_unsure",
            f"the undo copy is not removed: the clock of the host was changed by {jump:+.0f} s since the job, so it "
            "is not known when the image was changed. Correct the clock",
        )
    if evidence.used is None:
        _keep("the image was changed since, and it is not known when its guests ran")
    spans = [(now.wall - begin - AROUND, now.wall - end + AROUND) for begin, end in evidence.used or []]
    for moment in sorted(changes):
        if not any(begin <= moment / 1e9 <= end for begin, end in spans):
            ago = now.wall - moment / 1e9
            _keep(f"the image was changed {ago:.0f} s ago, when no known guest used it")


def _refuse_unlike(made: Made, fd: int, name: bytes, copy: int, io: AgentIO) -> None:
    form = made.identity.format
    try:
        if Identity.of(fd, form, name) != made.identity:
            _keep("the header of the image is not the one that the job wrote")
        found = likeness(io, Node(copy, made.was, b"the undo copy"), Node(fd, form, name))
    except UnreadableError as error:
        _keep(f"the image cannot be read: {error}")
    except HostError as error:
        _keep(f"it cannot be compared with the image: {error.detail}")
    else:
        io.log(f"{found.equal} of {found.looked_at} data blocks of the undo copy are unchanged in the image")
        if not found.half:
            _keep(f"only {found.equal} of {found.looked_at} of its data blocks are unchanged in the image")


def _keep(why: str) -> None:
    raise RefusedError(
        "undo_kept",
        f"the undo copy is not removed, because it may be the last good copy: {why}. Compare both files, then undo "
        "the job or force the removal",
    )


@contextlib.contextmanager
def _made_file(folder: int, name: bytes, inode: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """The image; or the file that the job made, where a later job keeps that as its own undo copy.

    Yields:
        Its descriptor, and when it was changed last by somebody else than such a job.
    """
    later = _kept_by_a_later_job(folder, inode)
    with held(os.open(later[0] if later else name, FLAGS, dir_fd=folder)) as fd:
        yield fd, later[1] if later else _times(Stamp.of(os.fstat(fd)))


def _kept_by_a_later_job(folder: int, inode: int) -> tuple[bytes, tuple[int, int]] | None:
    for entry in map(os.fsencode, os.listdir(folder)):
        ours = parse_name(entry)
        if ours is None or ours[1] != "orig":
            continue
        status = os.stat(entry, dir_fd=folder, follow_symlinks=False)
        if status.st_ino != inode:
            continue
        with contextlib.suppress(JournalError, RefusedError, FileNotFoundError):
            with contextlib.closing(Journal.open(folder, ours[0])) as journal:
                story = Story.of(journal.records())
            # Its own links and renames changed the inode alone, and nobody changed anything afterwards.
            if (
                story.original.inode == inode
                and story.copy is not None
                and _times(story.copy) == _times(Stamp.of(status))
            ):
                return entry, _times(story.original)
    return None


def _times(stamp: Stamp) -> tuple[int, int]:
    return stamp.mtime_ns, stamp.ctime_ns
