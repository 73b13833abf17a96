"""Take a replacement back while its undo copy is there, or give the copy up."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from storage_admin.agent import formats
from storage_admin.agent.folders.pools import held, is_job, open_parent
from storage_admin.agent.formats import UnreadableError
from storage_admin.agent.host import attributes, locking, space, special_mounts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import (
    INVALID,
    OCCUPIED,
    Arguments,
    RefusedError,
    Request,
    b64,
    display,
    host_errors,
    unb64,
)
from storage_admin.agent.rewrite import last_copy
from storage_admin.agent.scan.overlays import LookedAt, Wanted, refuse_needed
from storage_admin.agent.swap import fence, journal, moment, outcome, settle, swap
from storage_admin.agent.swap.fence import Fence
from storage_admin.agent.swap.journal import FLAGS, Journal, JournalError, Stamp, Story, file_name, is_aside
from storage_admin.agent.swap.outcome import names_left, stamp_now

_KNOWN = frozenset({"path_b64", "pool_path_b64", "undo_job"})


@dataclass(frozen=True)
class _Place:
    """Where a job's files are: the image's path and name, a descriptor of its folder, the job's journal."""

    path: bytes
    name: bytes
    folder: int
    journal: Journal


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Restore the original in its place.

    Args:
        request: ``args``: ``path_b64``, ``pool_path_b64``, ``undo_job`` (the job that made the copy), ``force`` (also
            where the image was written to since, which is lost then), ``pools``: where is looked for what needs the
            image as it is now, where that loses its name or its content, as for :func:`aside.set_aside`.
        io: the controller.

    Returns:
        Allocated sizes before (of the image that goes) and after, ``freed_bytes``: what the filesystem got back;
        ``name_b64``: the name that the original has.

    Raises:
        RefusedError: ``undo_missing``, ``undo_written_to``, ``chain_broken`` (a base of the original is gone),
            ``image_in_use``, ``has_overlays``, ``guests_unknown``, ``immutable``, ``stale_plan``, ``busy``.
        HostError, StoppedError: nothing was changed.
    """
    started = time.monotonic()
    args = Arguments(request.args, _KNOWN | fence.ARGS | {"force", "pools"})
    force = args.get("force", bool, False)
    pools = [LookedAt.parse(pool) for pool in args.get("pools", list, [])]
    with _place(args) as place, contextlib.ExitStack() as open_files:
        io.progress("checking", 0, None, "checking the image and its undo copy")
        story = _story(place)
        new = open_files.enter_context(held(_open(place.folder, place.name)))
        old = open_files.enter_context(held(_open(place.folder, file_name(place.journal.job, "orig"))))
        wanted = Wanted(locking.file_id(new), locking.file_id(place.folder), place.name, display(place.path))
        found = Stamp.of(os.fstat(new))

        def look() -> None:
            _refuse(place, story, new, old, force=force)
            if _content(stamp_now(new)) != _content(found):
                raise RefusedError("undo_written_to", "the image was written to at this moment; check it again")

        def look_everywhere() -> None:
            refuse_needed(pools, wanted, io)
            look()

        look_everywhere()
        io.progress("swapping", 0, None, "waiting for the go-ahead")
        looks = swap.Looks(look_everywhere, look)
        shared = swap.swap_back(place.journal, story, new, old, request, io, looks)
        gone, status = os.fstat(new), os.fstat(old)
        before = gone.st_blocks * 512
        return {
            "before_bytes": before,
            "after_bytes": status.st_blocks * 512,
            "held_bytes": 0,
            # Where somebody gave the new image a second name, or wrote to it in the last moment, it lives on.
            "freed_bytes": 0 if names_left(new) else max(before - shared, 0),
            "dev": status.st_dev,
            "inode": status.st_ino,
            "undo_of": place.journal.job,
            "name_b64": b64(story.name_before),
            "seconds": round(time.monotonic() - started, 3),
        }


def discard(request: Request, io: AgentIO) -> dict[str, Any]:
    """Remove an undo copy and its journal.

    Args:
        request: ``args``: ``path_b64``, ``pool_path_b64``, ``undo_job``; ``now_b64``: the name that the image's
            file has by now, where a later job gave it another one; ``format``: as the image is declared, empty where
            that is not known; ``force``: also where the copy may be all that is left; ``by_itself``, ``used`` and
            ``seen`` as in :class:`last_copy.Evidence`.
        io: the controller.

    Returns:
        ``freed_bytes``: what the filesystem got back, 0 where the copy has another name as well; ``original``: the
        stamp of what should be there; ``found``: whether the copy was there; ``put_back``: whether it was not, because
        somebody gave it the image's name again; ``surely_back``: by its size and time as well.

    Raises:
        RefusedError: ``image_in_use``, where somebody uses the copy; ``locks_missing``, as for a swap;
            ``clock_unsure``, where it goes by itself, and too early; unless forced, ``stale_plan``, where the image is
            not there or cannot be read, ``undo_written_to``, where somebody wrote to the copy, or changed anything of
            it and it goes by itself, and ``undo_kept``, where it may be the last good copy.
    """
    args = Arguments(request.args, _KNOWN | {"now_b64", "format", "force", "by_itself", "used", "seen"})
    evidence = last_copy.Evidence.parse(args)
    now, form, force = args.get("now_b64", str, ""), args.get("format", str, ""), args.get("force", bool, False)
    with _place(args) as place:
        story = _story(place)
        undo_name = file_name(place.journal.job, "orig")
        freed, found = 0, False
        named = outcome.stat_in(place.folder, place.name)
        try:
            old = os.open(undo_name, FLAGS, dir_fd=place.folder)
        except FileNotFoundError:
            io.log("the undo copy was already removed by someone else", "warning")
        else:
            found = True
            with held(old):
                status = os.fstat(old)
                if status.st_ino != story.original.inode:
                    raise RefusedError("undo_missing", "the undo copy was replaced by another file; check it yourself")
                _refuse_used(old, "the undo copy")
                last_copy.refuse_early(place.journal.records(), evidence)
                if not force:
                    by_now = unb64(now) or place.name
                    _refuse_needed_still(place, story, old, by_now, form, by_itself=evidence.by_itself)
                    last_copy.refuse_last(place.journal, story, old, by_now, evidence, io)
                freed = _remove(place, old, status, io)
        place.journal.remove()
        told: dict[str, Any] = {"freed_bytes": freed, "found": found, "original": asdict(story.original)}
        put_back, surely_back = (False, False) if found else outcome.is_back(named, story.original)
        return {**told, "put_back": put_back, "surely_back": surely_back}


def _remove(place: _Place, old: int, before: os.stat_result, io: AgentIO) -> int:
    """Unlink the copy; how many bytes the filesystem gets back."""
    with Fence(place.folder, old), moment.shut(lambda _: _refuse_changed(place, old, before), old) as (doors, _):
        freed = space.owned(old) if before.st_nlink == 1 else 0
        # Afterwards nobody could tell any more.
        io.emit(OCCUPIED, freed_bytes=freed)
        place.journal.append(journal.DISCARD, freed_bytes=freed)
        moment.remove(doors, old, place.folder, file_name(place.journal.job, "orig"))
    return freed


def _refuse_changed(place: _Place, old: int, before: os.stat_result) -> None:
    """Also by force the copy stays where it was opened, written to or exchanged while it was looked at."""
    here, named = stamp_now(old), outcome.stat_in(place.folder, file_name(place.journal.job, "orig"))
    if named is None or not named.same_file(here):
        raise RefusedError("undo_missing", "the undo copy was replaced by another file; check it yourself")
    if _content(here) != _content(Stamp.of(before)):
        raise RefusedError("undo_written_to", "the undo copy was written to at this moment; check it again")
    _refuse_used(old, "the undo copy")


def _refuse_needed_still(place: _Place, story: Story, old: int, name: bytes, form: str, *, by_itself: bool) -> None:
    """The copy stays where it holds what nothing else does: the image is gone, or damaged, or the copy written to."""
    copy = stamp_now(old)
    if not outcome.same_content(copy, story.original):
        raise RefusedError(
            "undo_written_to",
            "someone wrote to the undo copy, perhaps a program that had the image open when it was replaced. "
            "Compare both files. If you force the removal, what was written is lost",
        )
    if by_itself:
        _refuse_touched(story, copy)
    stays = (
        "the undo copy is not removed, because it may be all that is left of the image. Check it, or force the removal"
    )
    try:
        fd = os.open(name, FLAGS, dir_fd=place.folder)
    except OSError as error:
        raise RefusedError("stale_plan", f"{display(name)} no longer exists ({error.strerror}): {stays}") from error
    with held(fd):
        looks_like = formats.guess(formats.Reader(fd, os.fstat(fd).st_size), name)
        # What it is declared as may be from before a later job changed that. All damaged files look raw.
        taken_for = {form or looks_like, *({looks_like} - {"raw"})}
        sizes = [size for one in taken_for if (size := _virtual_size(fd, name, one)) is not None]
    if not sizes:
        raise RefusedError("stale_plan", f"{display(name)} can no longer be read: {stays}")
    before = _virtual_size(old, story.name_before, form if story.old_name is None else "")
    if before is not None and max(sizes) < before:
        raise RefusedError("stale_plan", f"{display(name)} has {max(sizes)} bytes for its guest, not {before}: {stays}")


def _virtual_size(fd: int, name: bytes, form: str) -> int | None:
    """What a guest sees of an image in bytes; ``None`` where its header is damaged or cannot be read."""
    status = os.fstat(fd)
    try:
        facts = formats.read(fd, status.st_size, name, form or None)
    except (UnreadableError, OSError):
        return None
    return None if facts.corrupt or not stat.S_ISREG(status.st_mode) else facts.virtual_size


@contextlib.contextmanager
def _place(args: Arguments) -> Iterator[_Place]:
    path, job = args.path("path_b64"), args.take("undo_job", str)
    if not is_job(job):
        raise RefusedError(INVALID, "undo_job is no job's id")
    with host_errors():
        folder, name = open_parent(args.path("pool_path_b64"), path)
        missing = "this job no longer has an undo copy"
        with held(folder), contextlib.closing(settle.waiting(folder, job, "undo_missing", missing)) as one:
            yield _Place(path, name, folder, one)


def _story(place: _Place) -> Story:
    """What the journal tells, after an interrupted run of whatever job was settled; refuses what was not swapped."""
    try:
        if is_aside(place.journal.records()):
            raise RefusedError("undo_missing", "the job has set its image aside; restore that image instead")
        settled = settle.settle(place.journal)
        if settled.outcome == outcome.REVERTED and settled.undo_of is None:
            raise RefusedError("undo_missing", "the job did not replace the image, so there is nothing to undo")
        if settled.outcome == outcome.FINISHED and settled.undo_of is not None:
            raise RefusedError("undo_missing", "the original has already been restored")
        story = Story.of(place.journal.records())
    except JournalError as error:
        raise settle.unreadable("undo_missing", error) from error
    if story.done is None:
        raise RefusedError("stale_plan", f"{settled.detail}; check it yourself")
    if story.name != place.name:
        raise RefusedError("stale_plan", f"the job replaced {display(story.name)}, not this image")
    return story


def _open(folder: int, name: bytes) -> int:
    try:
        return os.open(name, FLAGS, dir_fd=folder)
    except FileNotFoundError as error:
        raise RefusedError("undo_missing", f"{display(name)} was removed by someone else") from error


def _refuse(place: _Place, story: Story, new: int, old: int, *, force: bool) -> None:
    """All that has to be true before and in the moment of the undo."""
    here, copy = stamp_now(new), stamp_now(old)
    done = story.done
    named = outcome.stat_in(place.folder, place.name)
    if done is None or here.inode != done.inode or named is None or named.inode != done.inode:
        raise RefusedError(
            "stale_plan",
            "the image was replaced or removed since the job; if a later job replaced it, undo that one first",
        )
    if not force and story.is_written_to(here):
        raise RefusedError(
            "undo_written_to",
            "the image was written to since the job, and these writes would be lost. Force the undo to accept that",
        )
    undo_named = outcome.stat_in(place.folder, file_name(place.journal.job, "orig"))
    if undo_named is None or undo_named.inode != copy.inode or copy.inode != story.original.inode:
        raise RefusedError("undo_missing", "the undo copy was replaced by another file; check it yourself")
    if story.old_name is not None and outcome.stat_in(place.folder, story.old_name) is not None:
        raise RefusedError("target_exists", f"{display(story.old_name)} exists again; move it away, then undo the job")
    if (copy.file_size, copy.mtime_ns) != (story.original.file_size, story.original.mtime_ns):
        raise RefusedError("undo_missing", "the undo copy was written to and is no longer the original")
    if not force:
        _refuse_touched(story, copy)
    _refuse_without_bases(story, force=force)
    for fd in (new, old):
        if attributes.flags(fd) & (attributes.IMMUTABLE | attributes.APPEND_ONLY):
            raise RefusedError("immutable", "the image or its undo copy is protected (chattr +i or +a)")
        _refuse_used(fd, "the image or its undo copy")


def _refuse_touched(story: Story, copy: Stamp) -> None:
    if story.is_touched(copy):
        raise RefusedError(
            "undo_written_to",
            "the undo copy was changed since the job: its owner, mode or names, or its content with the times set "
            "back. Check it, then force this if you accept that",
        )


def _refuse_without_bases(story: Story, *, force: bool) -> None:
    """The original may stand on images that the new one does not need: by now they may be gone, or others."""
    for path, before in story.left:
        try:
            now = Stamp.of(os.stat(path, follow_symlinks=False))
        except (OSError, ValueError):
            raise RefusedError(
                "chain_broken",
                f"the original has the backing file {display(path)}, which no longer exists. The original could not "
                "be read, but the current image can. Restore that backing file first",
            ) from None
        same = (now.inode, now.file_size, now.mtime_ns) == (before.inode, before.file_size, before.mtime_ns)
        if not same and not force:
            raise RefusedError(
                "undo_written_to",
                f"the original has the backing file {display(path)}, which was changed or replaced since the job, "
                "so the original may read differently now. Force the undo to accept that",
            )


def _content(stamp: Stamp) -> tuple[int, int, int]:
    return stamp.file_size, stamp.mtime_ns, stamp.ctime_ns


def _refuse_used(fd: int, what: str) -> None:
    special_mounts.refuse_mounted(fd, what)
    if locking.locked_bytes(fd):
        raise RefusedError("image_in_use", f"{what} is in use by a guest or a tool of qemu; shut it down and try again")
    if (who := locking.user(fd)) is not None:
        raise RefusedError("image_in_use", f"{what} is in use by {who}; stop it and try again")
