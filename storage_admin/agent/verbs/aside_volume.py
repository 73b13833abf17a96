"""Set a logical volume aside that nobody needs, restore it, or delete it for good: as ``aside`` does with files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Arguments, HostError, RefusedError, Request, b64
from storage_admin.agent.swap import settle, volumes
from storage_admin.agent.swap.volumes import Place, Volume

WHERE = frozenset({"group", "group_id", "name", "id"})


def set_aside(request: Request, io: AgentIO) -> dict[str, Any]:
    """Give a volume a name that nobody looks for, with its device taken away.

    Args:
        request: ``args``: ``group``, ``group_id``, ``name`` and ``id`` of the volume, as LVM told them for the plan.
        io: the controller.

    Returns:
        ``held_bytes``: what it takes, and keeps; ``seconds``.

    Raises:
        RefusedError: ``stale_plan``, ``image_in_use``, ``has_overlays``, ``shared_pool``, ``unsupported_pool``,
            ``busy``, ``target_exists``, ``tool_missing``.
        HostError, StoppedError: the volume has its name.
    """
    started = time.monotonic()
    place = Place.parse(Arguments(request.args, WHERE))
    with volumes.alone(place.group) as lock:
        taken = _set_aside(place, request, io, lock)
    return {"held_bytes": taken, "seconds": round(time.monotonic() - started, 3)}


def _set_aside(place: Place, request: Request, io: AgentIO, lock: int) -> int:
    volumes.refuse_shared(place.group, io)

    def look() -> Volume:
        one = volumes.find(place, io, place.name)
        if one.tag:
            raise RefusedError("busy", f"{one.path} carries the tag {one.tag} of another job; recover the host first")
        volumes.refuse_used(one)
        return one

    look()
    io.progress("swapping", 0, None, "waiting for the go-ahead")
    io.wait_for_go(request.generation)
    one = look()
    tag = volumes.tag(one, request.job, io, lock)
    try:
        volumes.deactivate(one, io, lock)
        volumes.give_name(one, volumes.aside_name(request.job), io, lock)
        now = volumes.find(place, io, volumes.aside_name(request.job))
        if now.open:
            raise RefusedError("image_in_use", f"the volume {one.path} was opened at this moment; it keeps its name")
    except (RefusedError, HostError):
        put_back(place, tag, io, lock)
        raise
    return one.taken


def restore(request: Request, io: AgentIO) -> dict[str, Any]:
    """Give a volume that is set aside its own name again.

    Args:
        request: ``args``: as of :func:`set_aside`, with the volume's own ``name``, and ``aside_job``.
        io: the controller.

    Returns:
        ``after_bytes``: what it takes; ``aside_of``: the job that had set it aside; ``seconds``.

    Raises:
        RefusedError: ``aside_missing``, ``target_exists``, ``shared_pool``, ``tool_missing``.
        HostError, StoppedError: it is set aside still.
    """
    started = time.monotonic()
    with _waiting(request, io) as (place, one, lock):
        io.progress("swapping", 0, None, "waiting for the go-ahead")
        io.wait_for_go(request.generation)
        volumes.give_name(one, one.own_name, io, lock)
        _end(volumes.find(place, io, one.own_name), io, lock)
    return {"after_bytes": one.taken, "aside_of": one.job, "seconds": round(time.monotonic() - started, 3)}


def delete(request: Request, io: AgentIO) -> dict[str, Any]:
    """Delete a volume that is set aside.

    Args:
        request: ``args``: as of :func:`restore`.
        io: the controller.

    Returns:
        ``before_bytes``: what it took; ``freed_bytes``: what its group, or thin pool, has less in use than before;
        ``aside_of``; ``seconds``.

    Raises:
        RefusedError: ``aside_missing``, ``image_in_use``, ``has_overlays``, ``shared_pool``, ``busy``,
            ``tool_missing``.
        HostError, StoppedError: it is set aside still.
    """
    started = time.monotonic()
    with _waiting(request, io) as (place, one, lock):
        volumes.refuse_used(one)
        io.progress("swapping", 0, None, "waiting for the go-ahead")
        io.wait_for_go(request.generation)
        volumes.refuse_used(volumes.find(place, io, one.name))
        volumes.deactivate(one, io, lock)
        before = volumes.taken_of(one, io)
        volumes.change(["lvremove", "--yes", one.path], io, lock)
        after = volumes.taken_of(one, io)
    freed = max(before - after, 0) if before is not None and after is not None else 0
    if before is None or after is None:
        io.log("the thin pool is not active, so that what it got back is not known", "warning")
    return {
        "before_bytes": one.taken,
        "freed_bytes": freed,
        "aside_of": one.job,
        "seconds": round(time.monotonic() - started, 3),
    }


@contextlib.contextmanager
def _waiting(request: Request, io: AgentIO) -> Iterator[tuple[Place, Volume, int]]:
    args = Arguments(request.args, WHERE | {"aside_job"})
    place, job = Place.parse(args), args.take("aside_job", str)
    with volumes.alone(place.group) as lock:
        volumes.refuse_shared(place.group, io)
        found = [one for one in volumes.all_volumes(io, place.group_id) if one.id == place.id]
        if len(found) != 1 or not found[0].is_aside or found[0].job != job or found[0].own_name != place.name:
            raise RefusedError("aside_missing", f"the volume {place.group}/{place.name} is no longer set aside")
        yield place, found[0], lock


def put_back(place: Place, tag: str, io: AgentIO, lock: int) -> None:
    """The volume has its name again, its device where it had one, and no tag."""
    for one in volumes.all_volumes(io, place.group_id):
        if one.id == place.id and one.tag == tag:
            if one.is_aside or one.is_at_work:
                volumes.give_name(one, one.own_name, io, lock)
            _end(volumes.find(place, io, one.own_name), io, lock)


def _end(one: Volume, io: AgentIO, lock: int) -> None:
    """A volume that has its own name is as it was: active if it was, and without the tag."""
    if one.was_active and not one.active:
        volumes.change(["lvchange", "-ay", "-K", one.path], io, lock)
    volumes.untag(one, io, lock)


def recover(args: Arguments, active: frozenset[str], io: AgentIO) -> list[dict[str, Any]]:
    """What has become of volumes that were set aside: as ``recover`` tells it of files.

    Args:
        args: the request's ``volumes``: those that should be set aside, each as of :func:`restore` with ``inode`` (what
            the row tells it by) and ``path_b64``.
        active: jobs that are at work.
        io: the controller.
    """
    wanted = {}
    for fields in args.get("volumes", list, []):
        one = Arguments(fields, WHERE | {"aside_job", "inode", "path_b64"})
        wanted[one.take("aside_job", str)] = (Place.parse(one), one.take("inode", str), one.take("path_b64", str))
    try:
        there = volumes.all_volumes(io)
    except RefusedError:
        return []  # no LVM here
    except HostError as error:
        io.log(f"volumes that are set aside were not looked for: {error.detail}", "warning")
        return []
    told = [_settle(one, active, wanted.get(one.job), io) for one in there if one.job]
    known = {row["job"] for row in told} | active
    names = {(one.id, one.name) for one in there}
    for job, (place, inode, path) in wanted.items():
        if job not in known:
            is_back = (place.id, place.name) in names
            detail = "" if is_back else "the volume is no longer set aside"
            told.append(_row(job, settle.LOST, path, detail=detail, inode=inode if is_back else None))
    return told


def _settle(one: Volume, active: frozenset[str], wanted: tuple[Place, str, str] | None, io: AgentIO) -> dict[str, Any]:
    path = b64(f"/dev/{one.group}/{one.own_name}".encode())
    if one.job in active:
        return _row(one.job, settle.BUSY, path)
    if one.is_aside:
        return _row(one.job, settle.KEPT, path, taken=one.taken)
    try:
        with volumes.alone(one.group) as lock:
            return _settle_alone(one, path, wanted, io, lock)
    except RefusedError:
        return _row(one.job, settle.BUSY, path)
    except HostError as error:
        return _row(one.job, settle.FAILED, path, detail=error.detail)


def _settle_alone(
    seen: Volume, path: str, wanted: tuple[Place, str, str] | None, io: AgentIO, lock: int
) -> dict[str, Any]:
    # What was seen before the lock may be over by now.
    now = [one for one in volumes.all_volumes(io) if one.id == seen.id and one.tag == seen.tag]
    if len(now) != 1 or now[0].is_aside:
        return _row(seen.job, settle.BUSY, path)
    one = now[0]
    if one.is_at_work:
        put_back(Place(one.group, "", one.own_name, one.id), one.tag, io, lock)
        return _row(one.job, settle.REVERTED, path, taken=one.taken)
    if one.name != one.own_name:
        return _row(one.job, settle.FAILED, path, detail=f"{one.path} carries the tag {one.tag}, but another name")
    _end(one, io, lock)
    if wanted is None:
        return _row(one.job, settle.REVERTED, path, taken=one.taken)
    return _row(one.job, settle.LOST, path, taken=one.taken, inode=wanted[1])


def _row(
    job: str, outcome: str, path: str, *, detail: str = "", taken: int = 0, inode: str | None = None
) -> dict[str, Any]:
    """As the verb ``recover`` tells it of a file."""
    unknown = (
        "pool", "dev", "original", "before_bytes", "after_bytes", "made_bytes", "undone_bytes", "discarded_bytes",
        "undo_of",
    )  # fmt: skip
    return {
        **dict.fromkeys(unknown), "job": job, "outcome": outcome, "path_b64": path, "undo_bytes": taken,
        "undo_waits": outcome == settle.KEPT, "inode": inode, "goes_shared": 0, "made_shared": 0, "undone_shared": 0,
        "put_back": False, "surely_back": False, "detail": detail,
    }  # fmt: skip
