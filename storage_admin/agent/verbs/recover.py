"""Find what jobs left in storage pools, and finish or put back each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from storage_admin.agent import settle
from storage_admin.agent.arguments import Arguments
from storage_admin.agent.journal import Journal, JournalError, file_name, parse_name
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.pools import display
from storage_admin.agent.protocol import INVALID, RefusedError, Request, b64

#: How deep folders are looked into; as deep as a scan goes.
MAX_DEPTH = 8
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class _Folder:
    """An open folder: what its pool is called, its path, and the jobs whose files are in it, with their kinds."""

    pool: Any
    path: bytes
    fd: int
    jobs: dict[str, set[str]]


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Settle every journal in some storage pools that no agent is at work on.

    Args:
        request: ``args``: ``pools`` (each ``id``, ``path_b64``, ``kind``), ``jobs_active`` (ids to leave alone).
        io: the controller.

    Returns:
        ``recovered``: one entry per job with ``job``, ``pool``, ``path_b64``, ``outcome`` (``finished``, ``reverted``,
        ``kept``, ``busy``, ``failed``), ``undo_bytes``, ``before_bytes``, ``after_bytes``, ``dev``, ``inode``,
        ``undo_of``, ``detail``. What is not known is null.
    """
    args = Arguments(request.args, frozenset({"pools", "jobs_active"}))
    active = frozenset(args.get("jobs_active", list, []))
    recovered: list[dict[str, Any]] = []
    seen: set[tuple[int, int]] = set()
    for fields in args.take("pools", list):
        if not isinstance(fields, dict):
            raise RefusedError(INVALID, "a pool has an id, a path and a kind")
        pool = Arguments(fields, frozenset({"id", "path_b64", "kind"}))
        depth = 0 if pool.get("kind", str, "dir") == "libvirt" else MAX_DEPTH
        for folder in _folders(fields.get("id"), pool.path("path_b64"), depth, seen, io):
            for job, kinds in sorted(folder.jobs.items()):
                recovered += _recover(folder, job, kinds, job in active, io)
    return {"recovered": recovered}


def _folders(pool: Any, path: bytes, depth: int, seen: set[tuple[int, int]], io: AgentIO) -> Iterator[_Folder]:
    """The pool's folder and those below it on the same filesystem, no link followed, each closed after its turn."""
    try:
        top = os.open(path, _FOLDER)
    except OSError as error:
        io.log(f"the storage pool {display(path)} cannot be opened: {error.strerror}", "warning")
        return
    yield from _walk(_Folder(pool, path, top, {}), os.fstat(top).st_dev, depth, seen, io)


def _walk(here: _Folder, dev: int, depth: int, seen: set[tuple[int, int]], io: AgentIO) -> Iterator[_Folder]:
    """A folder and those below it; takes over its descriptor."""
    try:
        io.check()
        status = os.fstat(here.fd)
        if (status.st_dev, status.st_ino) in seen or status.st_dev != dev:
            return
        seen.add((status.st_dev, status.st_ino))
        jobs, below = _listing(here.fd)
        yield replace(here, jobs=jobs)
        for name in below if depth else []:
            path = here.path.rstrip(b"/") + b"/" + name
            try:
                fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=here.fd)
            except OSError as error:
                io.log(f"{display(path)} cannot be opened: {error.strerror}", "warning")
                continue
            yield from _walk(_Folder(here.pool, path, fd, {}), dev, depth - 1, seen, io)
    finally:
        os.close(here.fd)


def _listing(fd: int) -> tuple[dict[str, set[str]], list[bytes]]:
    """The jobs that have files in a folder, and the names of the folders in it."""
    jobs: dict[str, set[str]] = {}
    below = []
    with os.scandir(fd) as entries:
        for entry in entries:
            ours = parse_name(os.fsencode(entry.name))
            if ours is not None and entry.is_file(follow_symlinks=False):
                jobs.setdefault(ours[0], set()).add(ours[1])
            elif ours is None and entry.is_dir(follow_symlinks=False) and entry.name != "lost+found":
                below.append(os.fsencode(entry.name))
    return jobs, sorted(below)


def _recover(folder: _Folder, job: str, kinds: set[str], active: bool, io: AgentIO) -> list[dict[str, Any]]:
    if active:
        return [_row(folder, settle.Settled(job, settle.BUSY))]
    try:
        one = Journal.open(folder.fd, job)
    except FileNotFoundError:
        return _recover_orphans(folder, job, kinds, io)
    except JournalError as error:
        io.log(f"{_shown(folder, job, 'journal')} is left alone: {error}", "warning")
        return []
    except RefusedError:
        return [_row(folder, settle.Settled(job, settle.BUSY))]
    try:
        settled = settle.settle(one)
        found = [settled]
        if settled.undo_of is not None and settled.outcome == settle.REVERTED:
            found.append(settle.settle(one))  # the job whose undo was put back: its copy waits again
    except OSError as error:
        io.log(f"{_shown(folder, job, 'journal')} cannot be settled now: {error.strerror}", "error")
        found = [settle.Settled(job, settle.FAILED, detail=f"the host failed: {error.strerror}")]
    finally:
        one.close()
    for settled in found:
        io.log(f"job {settled.job}: {settled.outcome}. {settled.detail}".rstrip())
    return [_row(folder, settled) for settled in found]


def _recover_orphans(folder: _Folder, job: str, kinds: set[str], io: AgentIO) -> list[dict[str, Any]]:
    """Files without a journal: a temporary file is nobody's, an undo copy may be somebody's last."""
    rows = []
    if "new" in kinds and settle.stat_in(folder.fd, file_name(job, "new")) is not None:
        settle.unlink(folder.fd, file_name(job, "new"))
        io.log(f"{_shown(folder, job, 'new')} had no journal and was removed")
        rows.append(_row(folder, settle.Settled(job, settle.REVERTED)))
    copy = settle.stat_in(folder.fd, file_name(job, "orig"))
    if copy is not None:
        detail = f"{_shown(folder, job, 'orig')} is an undo copy without a journal; look at it yourself"
        rows.append(_row(folder, settle.Settled(job, settle.FAILED, undo_bytes=copy.allocated_size, detail=detail)))
    return rows


def _row(folder: _Folder, settled: settle.Settled) -> dict[str, Any]:
    now = settle.stat_in(folder.fd, settled.name) if settled.name is not None else None
    return {
        "job": settled.job,
        "pool": folder.pool,
        "path_b64": b64(folder.path.rstrip(b"/") + b"/" + settled.name) if settled.name is not None else None,
        "outcome": settled.outcome,
        "undo_bytes": settled.undo_bytes,
        "dev": now.dev if now else None,
        "inode": now.inode if now else None,
        "before_bytes": settled.before.allocated_size if settled.before else None,
        "after_bytes": now.allocated_size if now else None,
        "undo_of": settled.undo_of,
        "detail": settled.detail,
    }


def _shown(folder: _Folder, job: str, kind: str) -> str:
    return display(folder.path + b"/" + file_name(job, kind))
