"""Set an image aside that nobody needs, give it its name again, or delete it for good."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from storage_admin.agent import formats
from storage_admin.agent.folders.pools import held, is_job, open_parent
from storage_admin.agent.formats import UnreadableError
from storage_admin.agent.host import locking, space, special_mounts
from storage_admin.agent.host.open_gate import Doors
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError, Request, b64, display, host_errors
from storage_admin.agent.rewrite import volume_chains
from storage_admin.agent.rewrite.chain import refuse_protected
from storage_admin.agent.scan.overlays import LookedAt, Wanted, refuse_needed
from storage_admin.agent.swap import moment, outcome, settle, swap
from storage_admin.agent.swap import set_aside as aside
from storage_admin.agent.swap.journal import FLAGS, Journal, JournalError, Stamp, file_name, is_aside
from storage_admin.agent.swap.outcome import names_left, stamp_now
from storage_admin.agent.swap.settle_aside import AsideStory
from storage_admin.agent.verbs.needed import WHERE, OpenImage, opened

_STAMP = ("dev", "inode", "file_size", "mtime_ns", "ctime_ns")


def set_aside(request: Request, io: AgentIO) -> dict[str, Any]:
    """Give an image the name ``.sa-<job>.aside``, which nobody lists or opens.

    Args:
        request: ``args``: ``path_b64``, ``pool_path_b64``; ``dev``, ``inode``, ``file_size``, ``mtime_ns``,
            ``ctime_ns`` as the plan knew them; ``children_known``: whether all that could stand on it is known;
            ``pools``: where that is looked for again, each ``path_b64``, ``kind`` and ``known_b64`` (fingerprints of
            files that were looked at since they changed).
        io: the controller.

    Returns:
        ``held_bytes``: what the image occupies still; ``dev`` and ``inode``; ``aside_b64``: its name now; ``seconds``.

    Raises:
        RefusedError: ``stale_plan``, ``image_in_use``, ``has_overlays``, ``guests_unknown``, ``hard_linked``,
            ``immutable``, ``external_data_file``, ``unsupported_subformat``, ``in_snapshot_chain``, ``outside_pool``,
            ``busy``.
        HostError, StoppedError: the image has its name.
    """
    started = time.monotonic()
    args = Arguments(request.args, WHERE | {*_STAMP, "children_known", "pools"})
    planned = tuple(args.take(name, int) for name in _STAMP)
    pools = [LookedAt.parse(pool) for pool in args.get("pools", list, [])]
    children_known, path = args.take("children_known", bool), args.path("path_b64")
    with host_errors(), opened(args) as image:
        io.progress("checking", 0, None, "checking the image and its users")

        def look() -> None:
            _refuse(image, planned)
            _refuse_used(image.fd, image.shown)

        def look_everywhere() -> None:
            if not children_known:
                raise RefusedError("guests_unknown", f"the users of {image.shown} are not known; scan the host first")
            look()
            volume_chains.refuse_named(path)
            refuse_needed(pools, image.wanted, io)

        look_everywhere()
        swap.clear_earlier(image.folder, request)
        before = Stamp.of(os.fstat(image.fd))
        one = Journal.create(
            image.folder, request.job, generation=request.generation, name_b64=b64(image.name), original=before,
            aside=True,
        )  # fmt: skip
        try:
            io.progress("swapping", 0, None, "waiting for the go-ahead")
            aside.put_aside(one, image.name, image.fd, request, io, swap.Looks(look_everywhere, look))
        finally:
            settled = settle.settle(one)
            one.close()
        if settled.outcome != outcome.KEPT:
            raise HostError(f"the image was removed at this moment: {settled.detail}")
        return {
            "held_bytes": settled.undo_bytes,
            "dev": before.dev,
            "inode": before.inode,
            "aside_b64": b64(file_name(request.job, "aside")),
            "seconds": round(time.monotonic() - started, 3),
        }


def restore(request: Request, io: AgentIO) -> dict[str, Any]:
    """Give an image that is set aside its own name again.

    Args:
        request: ``args``: ``path_b64`` (the image's own), ``pool_path_b64``, ``aside_job`` (the job that set it aside).
        io: the controller.

    Returns:
        ``dev``, ``inode``, ``after_bytes`` of the image; ``aside_of``: the job that had set it aside; ``seconds``.

    Raises:
        RefusedError: ``aside_missing``, ``target_exists``, ``immutable``, ``stale_plan``, ``busy``.
        HostError, StoppedError: it is set aside still.
    """
    started = time.monotonic()
    args = Arguments(request.args, WHERE | {"aside_job"})
    with host_errors(), _waiting(args) as (one, story, fd):

        def recheck() -> None:
            _refuse_other_file(one, story, fd)
            named = outcome.stat_in(one.folder, story.name)
            if named is not None and not named.same_file(Stamp.of(os.fstat(fd))):
                raise aside.name_is_taken()

        recheck()
        if _content(stamp_now(fd)) != _content(story.original):
            io.log("the image was written to while it was set aside; it is restored as it is now", "warning")
        try:
            aside.put_back(one, story.name, request, io, recheck)
        finally:
            settle.settle(one)
        status = os.fstat(fd)
        return {
            "dev": status.st_dev,
            "inode": status.st_ino,
            "after_bytes": status.st_blocks * 512,
            "aside_of": one.job,
            "seconds": round(time.monotonic() - started, 3),
        }


def delete(request: Request, io: AgentIO) -> dict[str, Any]:
    """Delete an image that is set aside.

    Args:
        request: ``args``: ``path_b64`` (the image's own), ``pool_path_b64``, ``aside_job`` (the job that set it aside),
            ``inode`` (as the controller knows it), ``pools`` (as for :func:`set_aside`).
        io: the controller.

    Returns:
        ``before_bytes``: what it occupied; ``freed_bytes``: what the filesystem got back, 0 where somebody has given
        the file another name; ``aside_of``; ``seconds``.

    Raises:
        RefusedError: ``aside_missing``, ``stale_plan`` (it was written to since it was set aside), ``image_in_use``,
            ``has_overlays``, ``guests_unknown``, ``hard_linked``, ``immutable``, ``busy``.
        HostError, StoppedError: it is set aside still.
    """
    started = time.monotonic()
    args = Arguments(request.args, WHERE | {"aside_job", "inode", "pools"})
    inode, path = args.take("inode", int), args.path("path_b64")
    pools = [LookedAt.parse(pool) for pool in args.get("pools", list, [])]
    with host_errors(), _waiting(args) as (one, story, fd):
        shown = display(story.name)

        def look() -> None:
            _refuse_other_file(one, story, fd)
            now = stamp_now(fd)
            if now.inode != inode or _content(now) != _content(story.original):
                raise RefusedError(
                    "stale_plan", f"{shown} was written to since it was set aside; restore it and check it"
                )
            _refuse_used(fd, shown)

        def look_everywhere() -> None:
            look()
            volume_chains.refuse_named(path)
            refuse_needed(pools, Wanted(locking.file_id(fd), locking.file_id(one.folder), story.name, shown), io)

        look_everywhere()
        before, owned = os.fstat(fd), space.owned(fd)
        try:
            aside.remove(one, fd, request, io, swap.Looks(look_everywhere, look))
            left = names_left(fd)
        finally:
            settle.settle(one)
        if left:
            io.log(f"the file has {left} other names: nothing was freed", "warning")
        return {
            "before_bytes": before.st_blocks * 512,
            "freed_bytes": 0 if left else owned,
            "aside_of": one.job,
            "seconds": round(time.monotonic() - started, 3),
        }


def drop(request: Request, io: AgentIO) -> dict[str, Any]:
    """Delete a file that libvirt made for a copy and left unfinished, or an overlay that was merged.

    Args:
        request: ``args``: ``path_b64``, ``pool_path_b64``; ``since``: seconds since the epoch, before which the copy
            had not begun; ``pools`` (as for :func:`set_aside`), through which is looked for who needs it.
        io: the controller.

    Returns:
        ``freed_bytes``: what the filesystem got back.

    Raises:
        RefusedError: ``stale_plan``: it is older, or not there; ``image_in_use``, ``hard_linked``, ``outside_pool``,
            ``has_overlays``, ``guests_unknown``.
        HostError: the host failed; it is there.
    """
    args = Arguments(request.args, WHERE | {"since", "pools"})
    since, path = args.take("since", int), args.path("path_b64")
    pools = [LookedAt.parse(pool) for pool in args.get("pools", list, [])]
    io.progress("checking", 0, None)
    with host_errors(), opened(args) as image:
        if pools:
            volume_chains.refuse_named(path)
            refuse_needed(pools, image.wanted, io)

        def look(_doors: Doors) -> None:
            status = os.fstat(image.fd)
            if min(status.st_mtime, status.st_ctime) < since:
                raise RefusedError("stale_plan", f"{image.shown} is older than the copy; it is left as it is")
            if status.st_nlink != 1:
                raise RefusedError("hard_linked", f"{image.shown} has {status.st_nlink} names; it is left as it is")
            _refuse_used(image.fd, image.shown)

        with moment.shut(look, image.fd) as (doors, before):
            named = outcome.stat_in(image.folder, image.name)
            if named is None or not named.same_file(before):
                raise RefusedError("stale_plan", f"another file has the name of {image.shown} by now; it is left")
            freed = space.owned(image.fd)
            moment.remove(doors, image.fd, image.folder, image.name)
            return {"freed_bytes": 0 if names_left(image.fd) else freed}


def _refuse(image: OpenImage, planned: tuple[int, ...]) -> None:
    """What has to be true of the image itself, before and in the moment of the change."""
    now, status = stamp_now(image.fd), os.fstat(image.fd)
    if (now.dev, now.inode, *_content(now), now.ctime_ns) != planned:
        raise RefusedError("stale_plan", f"{image.shown} has changed since it was scanned; scan the host and try again")
    named = outcome.stat_in(image.folder, image.name)
    if named is None or not named.same_file(now):
        raise RefusedError("stale_plan", f"{image.shown} was replaced by another file; scan the host and try again")
    if status.st_nlink != 1:
        raise RefusedError(
            "hard_linked",
            f"{image.shown} has {status.st_nlink} names (hard links); the users of the others are "
            "not known, and no space would be freed",
        )
    refuse_protected(image.fd, image.shown)
    _refuse_parts(image, status.st_size)


def _refuse_parts(image: OpenImage, size: int) -> None:
    """An image whose data is in other files would leave them behind."""
    try:
        facts = formats.read(image.fd, size, image.name)
    except UnreadableError:
        return  # it has its bytes in itself, whatever they are
    if facts.data_file is not None:
        raise RefusedError(
            "external_data_file", f"{image.shown} keeps its data in a separate data file, which would stay behind"
        )
    if facts.extents:
        raise RefusedError(
            "unsupported_subformat", f"{image.shown} consists of several files, and the others would stay behind"
        )


def _refuse_used(fd: int, shown: str) -> None:
    special_mounts.refuse_mounted(fd, shown)
    if locking.locked_bytes(fd):
        raise RefusedError("image_in_use", f"{shown} is in use by a guest or a tool of qemu; shut it down first")
    deadline = time.monotonic() + aside.PASSING_READER
    while (who := locking.user(fd)) is not None:
        if time.monotonic() > deadline:
            raise RefusedError("image_in_use", f"{shown} is in use by {who}; stop it first")
        time.sleep(0.2)


@contextlib.contextmanager
def _waiting(args: Arguments) -> Iterator[tuple[Journal, AsideStory, int]]:
    """The journal of an image that is set aside, what it tells, and a descriptor of the image."""
    path, job = args.path("path_b64"), args.take("aside_job", str)
    if not is_job(job):
        raise RefusedError(INVALID, "aside_job is no job's id")
    folder, name = open_parent(args.path("pool_path_b64"), path)
    missing = "this job no longer has an image set aside; scan the host"
    with held(folder), contextlib.closing(settle.waiting(folder, job, "aside_missing", missing)) as one:
        story = _story(one, name)
        try:
            fd = os.open(file_name(job, "aside"), FLAGS, dir_fd=folder)
        except FileNotFoundError as error:
            raise RefusedError("aside_missing", f"{display(name)} was removed by someone else") from error
        with held(fd):
            yield one, story, fd


def _story(one: Journal, name: bytes) -> AsideStory:
    """What the journal tells, after an interrupted run of whatever job was settled."""
    try:
        if not is_aside(one.records()):
            raise RefusedError("aside_missing", "that job did not set anything aside")
        settled = settle.settle(one)
        if settled.undo_of is not None and settled.outcome == outcome.REVERTED:
            settled = settle.settle(one)
        if settled.outcome != outcome.KEPT:
            raise RefusedError("aside_missing", settled.detail or "the image is no longer set aside; scan the host")
        story = AsideStory.of(one.records())
    except JournalError as error:
        raise settle.unreadable("aside_missing", error) from error
    if story.name != name:
        raise RefusedError("stale_plan", f"the job has set {display(story.name)} aside, not this image")
    return story


def _refuse_other_file(one: Journal, story: AsideStory, fd: int) -> None:
    here = Stamp.of(os.fstat(fd))
    named = outcome.stat_in(one.folder, file_name(one.job, "aside"))
    if here.inode != story.original.inode or named is None or not named.same_file(here):
        raise RefusedError(
            "aside_missing", "the file that was set aside was replaced by another one; check it yourself"
        )


def _content(stamp: Stamp) -> tuple[int, int]:
    return stamp.file_size, stamp.mtime_ns
