"""What a journal and the names beside it mean: the original or the result, and what is to be cleared.

It depends on file names and journals alone, so an exception, a cancel and a crash share one path. Files are told apart
by their inode: they are all in one folder, and a device's number may change with a reboot. Nothing is removed but what
the journal knows by its inode; whatever else has a name of the job's own is somebody's, and an admin is told.
"""

from __future__ import annotations

import os
from dataclasses import replace

from storage_admin.agent.protocol import RefusedError, display, unb64
from storage_admin.agent.swap import journal, outcome, settle_aside
from storage_admin.agent.swap.exchange import drop, moves
from storage_admin.agent.swap.journal import Journal, JournalError, Stamp, Story
from storage_admin.agent.swap.outcome import Settled, is_back, stat_in, unlink
from storage_admin.agent.swap.straighten import is_free, straighten


def settle(one: Journal) -> Settled:
    """Finish or put back what a journal tells of, by names and the journal alone.

    Args:
        one: an open journal; it is removed where nothing is left to be kept. That of a lost undo copy stays: it is all
            that tells of the swap until the controller has that on record.

    Returns:
        What became of it.

    Raises:
        OSError: the folder cannot be written or read.
    """
    try:
        records = one.records()
        if journal.is_aside(records):
            return settle_aside.settle(one, records)
        if journal.is_commit(records):
            # It takes qemu to finish that (`rewrite/committing.py`, by a recovery).
            name = unb64(records[0]["name_b64"])
            return Settled(
                one.job, outcome.FAILED, name, detail="a merge was cut off; a recovery of the host finishes it"
            )
        return _with_sizes(_settle(one, story := Story.of(records)), story)
    except JournalError as error:
        return _settle_unreadable(one, str(error))


def _with_sizes(settled: Settled, story: Story) -> Settled:
    """With what the journal says of the space that the job and its undo found and left."""
    made = story.ready or story.done
    undone = story.undone if story.undo_job is not None else None
    return replace(
        settled,
        made_bytes=made.allocated_size + story.parts_bytes if made is not None else None,
        undone_bytes=undone.allocated_size if undone is not None else None,
        discarded_bytes=story.discarded_bytes,
        # What a copy occupies is told as what it is worth.
        undo_bytes=max(settled.undo_bytes - story.goes_shared, 0),
        goes_shared=story.goes_shared,
        made_shared=story.made_shared,
        undone_shared=story.undone_shared,
    )


def waiting(folder: int, job: str, code: str, missing: str) -> Journal:
    """The journal of a job whose file should wait; refuses (``code``) where there is none, which ``missing`` says."""
    try:
        return Journal.open(folder, job)
    except FileNotFoundError as error:
        raise RefusedError(code, missing) from error
    except JournalError as error:
        raise unreadable(code, error) from error


def unreadable(code: str, error: JournalError) -> RefusedError:
    """What a journal that says nothing means for a job that needs it."""
    return RefusedError(code, f"the journal of this job cannot be read: {error}")


def _settle(one: Journal, story: Story) -> Settled:
    if story.undo_job is not None:
        return _settle_undo(one, story)
    if story.done is not None:
        return _settle_done(one, story)
    ready = story.ready
    if ready is not None and (story.exchanging or story.old_name is not None):
        forward = moves(one.folder, one.job, ready.inode, story.original.inode, story.name, story.old_name)
        straighten(forward, story.original, ready)
    named = stat_in(one.folder, story.name)
    if ready is not None and named is not None and named.inode == ready.inode:
        # It has its name, but the last record is missing. Written to since? Then its time and size differ from these.
        before = stat_in(one.folder, story.name_before)
        if story.old_name is not None and before is not None and before.inode == story.original.inode:
            return _two_images(one, story)
        os.fsync(one.folder)
        one.append(journal.DONE, new=replace(named, file_size=ready.file_size, mtime_ns=ready.mtime_ns))
        return replace(_settle_done(one, story), outcome=outcome.FINISHED)
    return _revert(one, story)


def _two_images(one: Journal, story: Story) -> Settled:
    copy = stat_in(one.folder, journal.file_name(one.job, "orig"))
    return Settled(
        one.job,
        outcome.FAILED,
        story.name,
        story.original,
        copy.allocated_size if copy is not None else 0,
        detail="the original was written to under its old name after the new image was created beside it. Both "
        "exist; keep the right one, and remove the other one together with the files of the job",
    )


def _settle_done(one: Journal, story: Story) -> Settled:
    undo_name = journal.file_name(one.job, "orig")
    copy = stat_in(one.folder, undo_name)
    settled = Settled(one.job, outcome.KEPT, story.name, story.original)
    if story.keep_undo:
        if copy is None or copy.inode != story.original.inode:
            return _lost(one, story, copy)
        return replace(settled, undo_bytes=copy.allocated_size, undo_waits=True)
    if copy is not None and copy.inode == story.original.inode:
        if not is_free(one.folder, undo_name, story.original):
            detail = "someone opened the original during the swap, so it is kept; compare both files"
            return replace(settled, undo_bytes=copy.allocated_size, undo_waits=True, detail=detail)
        unlink(one.folder, undo_name)
    made, named = stat_in(one.folder, journal.file_name(one.job, "new")), stat_in(one.folder, story.name)
    if made is not None and not made.same_file(named):
        return _strangers(one, story)
    # A new file that got a name of its own still has the one that it was made under.
    unlink(one.folder, journal.file_name(one.job, "new"))
    _clear_parts(one, story, done=True)
    one.remove()
    return replace(settled, outcome=outcome.FINISHED)


def _lost(one: Journal, story: Story, copy: Stamp | None) -> Settled:
    named = stat_in(one.folder, story.name_before)
    put_back, surely_back = is_back(named, story.original)
    if put_back:
        detail = "someone else has restored the original"
    elif copy is None:
        detail = "the undo copy was removed by someone else"
    else:
        detail = "the undo copy was removed by someone else, and another file has its name; check that file yourself"
    return Settled(
        one.job, outcome.LOST, story.name, story.original, put_back=put_back, detail=detail, surely_back=surely_back
    )


def _revert(one: Journal, story: Story) -> Settled:
    named = stat_in(one.folder, story.name_before)
    cleared = _clear_made(one, story)
    undo_name = journal.file_name(one.job, "orig")
    copy = stat_in(one.folder, undo_name)
    settled = Settled(one.job, outcome.REVERTED, story.name_before, story.original)
    if copy is not None and (named is None or named.inode != copy.inode):
        # Somebody else removed or exchanged the image in the moment before the rename: this is its last name.
        return replace(
            settled,
            outcome=outcome.FAILED,
            undo_bytes=copy.allocated_size,
            detail="the image was removed or replaced by someone else; the original is kept as undo copy",
        )
    if copy is not None:
        unlink(one.folder, undo_name)
    if not cleared:
        return _strangers(one, story)
    one.remove()
    return settled


def _clear_made(one: Journal, story: Story) -> bool:
    """Remove what the job made; whether nothing has that name any more."""
    _clear_parts(one, story, done=False)
    name = journal.file_name(one.job, "new")
    made = stat_in(one.folder, name)
    if made is None:
        return True
    # Created and not written down yet: empty. An older agent never wrote it down, and never exchanged it.
    nameless = not story.made and (made.file_size == 0 or not story.records_created)
    ours = nameless or made.inode in story.made
    if ours:
        unlink(one.folder, name)
    return ours


def _clear_parts(one: Journal, story: Story, *, done: bool) -> None:
    """Remove the parts' names of the job's own; where that is not done, also those that they were to keep.

    As long as a file has the first, its number is no other one's: what has both names is surely the job's.
    """
    for place, (name, inode) in enumerate(story.parts):
        own = journal.part_name(one.job, place)
        made = stat_in(one.folder, own)
        if made is not None and made.inode == inode:
            if not done:
                drop(one.folder, name, journal.file_name(one.job, "001"), inode)  # a number that no part has
            unlink(one.folder, own)
    last = journal.part_name(one.job, len(story.parts))  # perhaps created, and not written down yet
    made = stat_in(one.folder, last)
    if made is not None and not made.file_size:
        unlink(one.folder, last)


def _strangers(one: Journal, story: Story) -> Settled:
    """Somebody's file has a name of the job's own, and keeps it."""
    name = display(journal.file_name(one.job, "new"))
    detail = (
        f"{name} does not belong to this job. It was given this name, or the name of the image, during the swap. "
        "Move it where it belongs"
    )
    return Settled(one.job, outcome.FAILED, story.name_before, story.original, detail=detail)


def _settle_undo(one: Journal, story: Story) -> Settled:
    undo_job, copy_name = str(story.undo_job), journal.file_name(one.job, "orig")
    if story.undone is not None and (story.exchanging or story.old_name is not None):
        made, original = story.undone.inode, story.original.inode
        steps = moves(one.folder, one.job, made, original, story.name, story.old_name, back=True)
        straighten(steps, story.undone, story.original)
    gone = stat_in(one.folder, journal.file_name(one.job, "new"))
    named = stat_in(one.folder, story.name_before)
    if named is not None and named.inode == story.original.inode:
        detail = ""
        copy = stat_in(one.folder, copy_name)
        if copy is not None and copy.inode == story.original.inode:
            unlink(one.folder, copy_name)
        if story.undone is not None and gone is not None and gone.inode == story.undone.inode:
            detail = _remove_undone(one, story.undone)
        elif story.old_name is not None and _is_there(one, story):
            detail = "the new image was used during the undo, and was left in place"
        one.remove()
        return Settled(undo_job, outcome.FINISHED, story.name_before, story.original, undo_of=one.job, detail=detail)
    if gone is not None:
        return replace(_strangers(one, story), job=undo_job, undo_of=one.job)
    one.append(journal.UNDO_REVERTED, job=undo_job)
    copy = stat_in(one.folder, copy_name)
    held = copy.allocated_size if copy is not None else 0
    return Settled(undo_job, outcome.REVERTED, story.name, story.original, held, undo_of=one.job)


def _is_there(one: Journal, story: Story) -> bool:
    named = stat_in(one.folder, story.name)
    return named is not None and story.undone is not None and named.inode == story.undone.inode


def _remove_undone(one: Journal, undone: Stamp) -> str:
    """Once the original has its name again; what somebody has used since the undo began stays."""
    name = journal.file_name(one.job, "new")
    if not is_free(one.folder, name, undone):
        return f"the new image was used during the undo, and is kept as {display(name)}"
    unlink(one.folder, name)
    return ""


def _settle_unreadable(one: Journal, why: str) -> Settled:
    """A journal that was cut off before its first record was whole: nothing else was made by then, or only a copy."""
    for kind in ("orig", "aside"):
        copy = stat_in(one.folder, journal.file_name(one.job, kind))
        if copy is not None:
            return Settled(
                one.job, outcome.FAILED, undo_bytes=copy.allocated_size, detail=f"the journal cannot be used: {why}"
            )
    made = stat_in(one.folder, journal.file_name(one.job, "new"))
    if made is not None and made.file_size:
        return Settled(
            one.job, outcome.FAILED, undo_bytes=made.allocated_size, detail=f"the journal cannot be used: {why}"
        )
    unlink(one.folder, journal.file_name(one.job, "new"))
    one.remove()
    return Settled(one.job, outcome.REVERTED)
