"""Set a volume aside that nobody needs, restore it, or delete it for good: as ``aside`` does with files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError, Request, b64
from storage_admin.agent.swap import lvm_volumes, outcome, rbd_volumes, volumes, zfs_volumes
from storage_admin.agent.swap.hidden import away
from storage_admin.agent.swap.outcome import Settled
from storage_admin.agent.swap.volumes import Backend, Journal, Place, Volume, left_to_recovery

WHERE = frozenset({"backend", "group", "group_id", "name", "id"})
BACKENDS: dict[str, Backend[Any]] = {"lvm": lvm_volumes, "zfs": zfs_volumes, "rbd": rbd_volumes}


def _parse(args: Arguments) -> tuple[Backend[Any], Place]:
    place = Place.parse(args)
    if place.backend not in BACKENDS:
        raise RefusedError(INVALID, f"there are no volumes of {place.backend}")
    BACKENDS[place.backend].check(place)
    return BACKENDS[place.backend], place


def set_aside(request: Request, io: AgentIO) -> dict[str, Any]:
    """Give a volume a name that nobody looks for, with its device taken away.

    Args:
        request: ``args``: ``backend``, ``group``, ``group_id``, ``name`` and ``id`` of the volume, as the plan
            has them.
        io: the controller.

    Returns:
        ``held_bytes``: what it takes, and keeps; ``seconds``.

    Raises:
        RefusedError: ``stale_plan``, ``image_in_use``, ``has_overlays``, ``shared_pool``, ``unsupported_pool``,
            ``busy``, ``target_exists``, ``tool_missing``.
        HostError, StoppedError: the volume has its name; as ``interrupted``, a recovery sees to that.
    """
    started = time.monotonic()
    backend, place = _parse(Arguments(request.args, WHERE))
    with volumes.alone(backend, place.group, io.check) as lock:
        backend.refuse_shared(place, io)
        volumes.unused(backend, place, io)
        io.progress("swapping", 0, None, "waiting for the go-ahead")
        io.wait_for_go(request.generation)
        one: Volume = volumes.unused(backend, place, io)
        name = volumes.aside_name(request.job)
        with away(backend, place, one, name, request.job, io, lock) as (now, _):
            backend.refuse_used(now, io)
            backend.hide(now, io, lock)
    return {"held_bytes": one.taken, "seconds": round(time.monotonic() - started, 3)}


def restore(request: Request, io: AgentIO) -> dict[str, Any]:
    """Give a volume that is set aside its own name again.

    Args:
        request: ``args``: as of :func:`set_aside`, with the volume's own ``name``, and ``aside_job``.
        io: the controller.

    Returns:
        ``after_bytes``: what it takes; ``aside_of``: the job that had set it aside; ``seconds``.

    Raises:
        RefusedError: ``aside_missing``, ``target_exists``, ``shared_pool``, ``tool_missing``.
        HostError, StoppedError: it is set aside still; as ``interrupted``, a recovery sees to what is left to do.
    """
    started = time.monotonic()
    with _waiting(request, io) as (backend, place, one, journal, lock):
        if one.is_going:
            raise RefusedError(
                "aside_missing", f"the deletion of {place.group}/{place.name} has started; recover the host"
            )
        io.progress("swapping", 0, None, "waiting for the go-ahead")
        io.wait_for_go(request.generation)
        volumes.give_name(backend, place, one, journal.own_name, io, lock)
        with left_to_recovery():
            backend.give_back(volumes.find(backend, place, journal.own_name, io), journal, io, lock)
    return {"after_bytes": one.taken, "aside_of": journal.job, "seconds": round(time.monotonic() - started, 3)}


def delete(request: Request, io: AgentIO) -> dict[str, Any]:
    """Delete a volume that is set aside.

    Args:
        request: ``args``: as of :func:`restore`.
        io: the controller.

    Returns:
        ``before_bytes``: what it took; ``freed_bytes``: what its pool has less in use than before, ``None`` where
        nobody told; ``aside_of``; ``seconds``.

    Raises:
        RefusedError: ``aside_missing``, ``image_in_use``, ``has_overlays``, ``shared_pool``, ``busy``,
            ``tool_missing``.
        HostError, StoppedError: it is set aside still; as ``interrupted``, a recovery tells, or finishes it.
    """
    started = time.monotonic()
    with _waiting(request, io) as (backend, place, one, journal, lock):
        backend.refuse_used(one, io)
        io.progress("swapping", 0, None, "waiting for the go-ahead")
        io.wait_for_go(request.generation)
        backend.refuse_used(volumes.find(backend, place, one.name, io), io)
        backend.hide(one, io, lock)
        try:
            freed = backend.remove(one, journal, io, lock)
        except HostError as error:  # some of it may be gone, or all
            raise volumes.unsettled(error) from error
    if freed is None:
        io.log("what the pool got back is not known", "warning")
    return {
        "before_bytes": one.taken,
        "freed_bytes": None if freed is None else max(freed, 0),
        "aside_of": journal.job,
        "seconds": round(time.monotonic() - started, 3),
    }


@contextlib.contextmanager
def _waiting(request: Request, io: AgentIO) -> Iterator[tuple[Backend[Any], Place, Volume, Journal, int]]:
    args = Arguments(request.args, WHERE | {"aside_job"})
    (backend, place), job = _parse(args), args.take("aside_job", str)
    with volumes.alone(backend, place.group, io.check) as lock:
        backend.refuse_shared(place, io)
        found = [one for one in backend.there([place], io) if (one.group, one.id) == (place.group, place.id)]
        journal = found[0].journal if len(found) == 1 and found[0].is_aside else None
        if journal is None or (journal.job, journal.own_name) != (job, place.name):
            raise RefusedError("aside_missing", f"the volume {place.group}/{place.name} is no longer set aside")
        yield backend, place, found[0], journal, lock


@dataclass(frozen=True)
class _Wanted:
    """A volume that should be set aside: where, what the row tells it by, and its path there."""

    place: Place
    inode: str
    path: str


def recover(
    args: Arguments, active: frozenset[str], silent: set[str], io: AgentIO
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """What has become of volumes that were set aside: as ``recover`` tells it of files.

    Args:
        args: the request's ``volumes``: those that should be set aside, each as of :func:`restore` with ``inode`` (what
            the row tells it by) and ``path_b64``; ``volumes_cut_off``: those at which a job was cut off; and
            ``groups``: those that may have volumes of jobs, each ``backend`` and ``group_id``.
        active: jobs that are at work.
        silent: takes the names of backends that do not answer.
        io: the controller.

    Returns:
        What is told, and which of ``groups`` tell nothing of their volumes now.
    """
    wanted: dict[str, _Wanted] = {}
    for fields in args.get("volumes", list, []):
        one = Arguments(fields, WHERE | {"aside_job", "inode", "path_b64"})
        _, place = _parse(one)
        wanted[one.take("aside_job", str)] = _Wanted(place, one.take("inode", str), one.take("path_b64", str))
    cut_off = [_parse(Arguments(fields, WHERE))[1] for fields in args.get("volumes_cut_off", list, [])]
    asked = [Arguments(fields, frozenset({"backend", "group_id"})) for fields in args.get("groups", list, [])]
    away = {(one.take("backend", str), one.take("group_id", str)) for one in asked}
    told = list[dict[str, Any]]()
    for name, backend in BACKENDS.items():
        here = {job: one for job, one in wanted.items() if one.place.backend == name}
        for some, cut in _asked_together(backend, here, [one for one in cut_off if one.backend == name]):
            try:
                # Before its volumes: a group that comes in between is one of the next time.
                groups = backend.groups([*(one.place for one in some.values()), *cut], io)
                told += _recover(backend, some, cut, groups, active, io)
                away -= {(name, group) for group in groups}
            except RefusedError:
                continue  # none of them is on this host
            except HostError as error:
                silent.add(name)
                io.log(f"volumes of {name} that jobs have left were not looked for: {error.detail}", "warning")
    # Of a job that has made its volume, the one that it had copied has its name again as well.
    done = {row["job"] for row in told if row["outcome"] == outcome.FINISHED}
    found = [row for row in told if row["job"] not in done or row["outcome"] != outcome.REVERTED]
    return found, [{"backend": name, "group_id": group} for name, group in sorted(away)]


def _asked_together(
    backend: Backend[Any], wanted: dict[str, _Wanted], cut_off: list[Place]
) -> Iterator[tuple[dict[str, _Wanted], list[Place]]]:
    """All that LVM or ZFS has; what is in one pool of Ceph, of which the host may name others no more."""
    groups = {one.place.group for one in wanted.values()} | {one.group for one in cut_off}
    for group in [""] if backend.is_atomic else sorted(groups):
        some = {job: one for job, one in wanted.items() if group in {"", one.place.group}}
        yield some, [one for one in cut_off if group in {"", one.group}]


def _recover(
    backend: Backend[Any],
    wanted: dict[str, _Wanted],
    cut_off: list[Place],
    groups: set[str],
    active: frozenset[str],
    io: AgentIO,
) -> list[dict[str, Any]]:
    places = [*(one.place for one in wanted.values()), *cut_off]
    there = backend.there(places, io)
    told = [
        _settle(backend, one, one.journal, places, wanted.get(one.journal.job), active, io)
        for one in there
        if one.journal is not None
    ]
    known = {row["job"] for row in told} | active
    names = {(one.id, one.name) for one in there}
    for job, one in wanted.items():
        # Else it waits in there, for all that is known.
        if job not in known and groups & {one.place.group_id, one.place.group.partition("/")[0]}:
            is_back = (one.place.id, one.place.name) in names
            detail = "" if is_back else "the volume is no longer set aside"
            told.append(_row(job, outcome.LOST, one.path, detail=detail, inode=one.inode if is_back else None))
    return told


def _settle(
    backend: Backend[Any],
    one: Volume,
    journal: Journal,
    places: list[Place],
    wanted: _Wanted | None,
    active: frozenset[str],
    io: AgentIO,
) -> dict[str, Any]:
    path = wanted.path if wanted is not None else b64(f"{one.group}/{journal.own_name}".encode())
    if journal.job in active:
        return _row(journal.job, outcome.BUSY, path)
    if one.is_aside and backend.is_atomic:
        return _row(journal.job, outcome.KEPT, path, taken=one.taken)
    try:
        with volumes.alone(backend, one.group) as lock:
            return _settle_alone(backend, one, path, places, wanted, io, lock)
    except RefusedError:
        return _row(journal.job, outcome.BUSY, path)
    except HostError as error:
        return _row(journal.job, outcome.BUSY, path, detail=error.detail)  # it is tried again


def _settle_alone(
    backend: Backend[Any], seen: Volume, path: str, places: list[Place], wanted: _Wanted | None, io: AgentIO, lock: int
) -> dict[str, Any]:
    # What was seen before the lock may be over by now.
    same = (seen.group, seen.id, seen.journal)
    now = [one for one in backend.there(places, io) if (one.group, one.id, one.journal) == same]
    journal = now[0].journal if len(now) == 1 else None
    if journal is None:
        return _row(seen.journal.job if seen.journal else "", outcome.BUSY, path)
    one = now[0]
    if one.is_going and wanted is not None:
        backend.remove(one, journal, io, lock)
        return _row(journal.job, outcome.LOST, path, detail="the deletion had started, and was finished")
    if one.is_aside:
        if not one.is_going:
            backend.tidy(one, journal.own_name, io, lock)
        return _row(journal.job, outcome.KEPT, path, taken=one.taken)
    if one.is_at_work or one.is_new:
        backend.hide(one, io, lock)
    if one.is_new:
        backend.remove(one, journal, io, lock)
        return _row(journal.job, outcome.REVERTED, path)
    if one.is_at_work:
        place = Place("", one.group, "", journal.own_name, one.id)
        volumes.put_back(backend, place, journal.text, io, lock)
        return _row(journal.job, outcome.REVERTED, path, taken=one.taken)
    if one.name != journal.own_name:
        detail = f"{one.path} is marked by a job ({journal.text}), but has another name"
        return _row(journal.job, outcome.FAILED, path, detail=detail)
    backend.give_back(one, journal, io, lock)
    if journal.makes:
        return _row(journal.job, outcome.FINISHED, path, made=one.taken, inode=one.id)
    if wanted is None:
        return _row(journal.job, outcome.REVERTED, path, taken=one.taken)
    return _row(journal.job, outcome.LOST, path, taken=one.taken, inode=wanted.inode)


def _row(
    job: str,
    what: str,
    path: str,
    *,
    detail: str = "",
    taken: int = 0,
    made: int | None = None,
    inode: str | None = None,
) -> dict[str, Any]:
    settled = Settled(job, what, undo_bytes=taken, undo_waits=what == outcome.KEPT, detail=detail, made_bytes=made)
    return settled.told(path, inode=inode, after_bytes=made)
