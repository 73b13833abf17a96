"""Find what jobs left in storage pools and in their appliances' folders, and finish or put back each."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from storage_admin.agent.appliance import appliance
from storage_admin.agent.folders import scratch
from storage_admin.agent.folders.pools import held, is_job, open_parent, open_root
from storage_admin.agent.host import private_device, special_mounts, thin
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError, Request, b64, display
from storage_admin.agent.rewrite import committing
from storage_admin.agent.swap import outcome, settle
from storage_admin.agent.swap.journal import Journal, JournalError, file_name, is_commit, parse_name
from storage_admin.agent.swap.outcome import Settled
from storage_admin.agent.verbs import aside_volume, move

#: How deep folders are looked into; as deep as a scan goes.
MAX_DEPTH = 8
#: Over NFS version 3 nothing tells whose lock it is, nor whether its owner lives.
_KEPT_LOCK = (
    "its journal is locked. If no agent works on it any more, the NFS server (version 3) keeps the lock of one "
    "that ended while the export was withdrawn; restart the NFS server"
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class _Folder:
    """An open folder: what its pool is called, its path, and the jobs whose files are in it, with their kinds; the jobs
    whose benchmarks have a folder in it.
    """

    pool: Any
    path: bytes
    fd: int
    jobs: dict[str, set[str]]
    benchmarks: frozenset[str] = frozenset()


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Settle every journal in some storage pools that no agent is at work on, and remove what benchmarks left.

    Args:
        request: ``args``: ``pools`` (each ``id``, ``path_b64``, ``kind``), ``jobs_active`` (ids to leave alone),
            ``jobs_recorded`` (ids of jobs whose swap the controller has on record, so that the journal of a lost undo
            copy may go), ``undo_copies`` (those that should wait, and images that are set aside: each ``job``,
            ``path_b64`` of the image, ``pool_path_b64``), ``images`` (of jobs that were cut off, described in
            the same way: they are looked at), ``merges`` (those of overlays that are to be done again: each ``job``,
            ``overlay_b64`` and ``base_b64``, the files that it may touch), ``merges_over`` (jobs of those whose journal
            may go), ``volumes`` (logical ones that are set aside: :func:`aside_volume.recover`), ``volumes_made``
            (that jobs which were cut off may have made: each ``job``, ``backend``, ``group``, ``name`` and ``id``),
            ``groups`` (volume groups and ZFS pools in which jobs may have left something).
        io: the controller.

    Returns:
        ``recovered``: one entry per job with ``job``, ``pool``, ``path_b64``, ``outcome`` (``finished``, ``reverted``,
        ``kept``, ``lost``, ``busy``, ``failed``), ``undo_bytes``, ``undo_waits``, ``original`` (its stamp),
        ``before_bytes``, ``after_bytes`` (of the image as it is now), ``made_bytes`` (as the job left it),
        ``undone_bytes`` (as its undo found it), ``discarded_bytes`` (what the removal of its undo copy freed), ``dev``,
        ``inode``, ``undo_of``, ``put_back``, ``surely_back``, ``detail``. What is not known is null.
        ``images``: for each of those that is there, ``job``, ``bytes``, ``dev`` and ``inode``.
        ``unread``: pools that could not be opened, or that do not answer; ``silent``: backends of volumes that do not;
        ``away``: which of ``groups`` are not there.
    """
    known = {
        "pools",
        "jobs_active",
        "jobs_recorded",
        "undo_copies",
        "images",
        "merges",
        "merges_over",
        "volumes",
        "volumes_cut_off",
        "volumes_made",
        "groups",
    }
    args = Arguments(request.args, frozenset(known))
    merges = committing.Merges.parse(args)
    active = frozenset(args.get("jobs_active", list, []))
    recorded = frozenset(args.get("jobs_recorded", list, []))
    expected = [_expected(fields) for fields in args.get("undo_copies", list, [])]
    images = [_expected(fields) for fields in args.get("images", list, [])]
    pools = [_pool(fields) for fields in args.take("pools", list)]
    thin.release_left(io)
    _remove_devices(active, io)
    appliance.clear()
    mounts = Mounts.of_this_machine()
    paths = {path for _, path, _ in pools} | {one.pool_path for one in (*expected, *images)}
    away = special_mounts.trusted(sorted(paths), mounts, io.check)
    expected = [one for one in expected if one.pool_path not in away]
    silent = set[str]()
    recovered, groups_away = aside_volume.recover(args, active, silent, io)
    walk = _Walk(io, mounts, away)
    for number, path, depth in pools:
        for folder in walk.folders(number, path, depth):
            for job, kinds in sorted(folder.jobs.items()):
                if job in active:
                    recovered.append(_row(folder, Settled(job, outcome.BUSY)))
                else:
                    recovered += _recover(folder, job, kinds, job in recorded, merges, io)
            for job in sorted(folder.benchmarks):
                recovered += _recover_benchmark(folder, job, job in active, io)
    told = {row["job"] for row in recovered} | {row["undo_of"] for row in recovered} | active
    recovered += [row for one in expected if one.job not in told for row in _without_a_trace(one, io)]
    seen_images = [_look_at(one, io) for one in images if one.pool_path not in away]
    return {
        "recovered": recovered,
        "images": [*(row for row in seen_images if row is not None), *move.made_by(args, silent, io)],
        "unread": walk.unread,
        "silent": sorted(silent),
        "away": groups_away,
    }


def _remove_devices(active: frozenset[str], io: AgentIO) -> None:
    """Take away what killed jobs had of thin volumes (:mod:`private_device`)."""
    for name in private_device.left():
        if name[len(private_device.NAME) :] not in active:
            try:
                private_device.remove(name, 0.0)  # an agent that only looks has it open
                io.log(f"removed the device {name}, which a job had left")
            except HostError as error:
                io.log(error.detail)


@dataclass(frozen=True)
class _Expected:
    """An undo copy, or an image set aside, that should wait: the job, the image's path, its pool's path."""

    job: str
    path: bytes
    pool_path: bytes


def _expected(fields: Any) -> _Expected:
    if not isinstance(fields, dict):
        raise RefusedError(INVALID, "an undo copy has a job, a path and its pool's path")
    args = Arguments(fields, frozenset({"job", "path_b64", "pool_path_b64"}))
    job = args.take("job", str)
    if not is_job(job):
        raise RefusedError(INVALID, "an undo copy's job is no job's id")
    return _Expected(job, args.path("path_b64"), args.path("pool_path_b64"))


def _look_at(one: _Expected, io: AgentIO) -> dict[str, Any] | None:
    """Which file an image is by now, and what it occupies; ``None`` where it cannot be seen."""
    try:
        fd, name = open_parent(one.pool_path, one.path)
    except (OSError, RefusedError) as error:
        io.log(f"the folder of {display(one.path)} cannot be opened: {error}", "warning")
        return None
    with held(fd):
        now = outcome.stat_in(fd, name)
    return None if now is None else {"job": one.job, "bytes": now.allocated_size, "dev": now.dev, "inode": now.inode}


def _without_a_trace(one: _Expected, io: AgentIO) -> list[dict[str, Any]]:
    """What should wait, and is gone with its journal; nothing where the folder cannot be looked into.

    ``inode`` of the row is null where the image is gone as well. Then the folder may be the mount point of a filesystem
    that is not mounted, and the controller has to know better.
    """
    try:
        fd, name = open_parent(one.pool_path, one.path)
    except (OSError, RefusedError) as error:
        io.log(f"the folder of {display(one.path)} cannot be opened: {error}", "warning")
        return []
    with held(fd):
        if any(outcome.stat_in(fd, file_name(one.job, kind)) is not None for kind in ("journal", "orig", "aside")):
            return []  # deeper than recovery looks, or it came this moment
        detail = "its file beside the image and its journal were removed by someone else"
        settled = Settled(one.job, outcome.LOST, name, detail=detail)
        return [_row(_Folder(None, one.path.rpartition(b"/")[0] or b"/", fd, {}), settled)]


def _pool(fields: Any) -> tuple[Any, bytes, int]:
    """A pool's id, its path, and how deep it is looked into."""
    if not isinstance(fields, dict):
        raise RefusedError(INVALID, "a pool has an id, a path and a kind")
    pool = Arguments(fields, frozenset({"id", "path_b64", "kind"}))
    depth = 0 if pool.get("kind", str, "dir") == "libvirt" else MAX_DEPTH
    return fields.get("id"), pool.path("path_b64"), depth


@dataclass
class _Walk:
    """Folders of pools, each once; ``unread`` are the pools that could not be looked into."""

    io: AgentIO
    mounts: Mounts
    away: Collection[bytes]
    unread: list[Any] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def folders(self, pool: Any, path: bytes, depth: int) -> Iterator[_Folder]:
        """The pool's folder and those below it on the same filesystem, no link followed, each closed after its turn."""
        if path in self.away:
            self.io.log(f"the storage pool {display(path)} does not answer and was skipped", "warning")
            self.unread.append(pool)
            return
        try:
            top = open_root(path)
        except (OSError, RefusedError) as error:
            self.io.log(f"the storage pool {display(path)} cannot be opened: {error}", "warning")
            self.unread.append(pool)
            return
        yield from self._below(_Folder(pool, path, top, {}), os.fstat(top).st_dev, depth)

    def _below(self, here: _Folder, dev: int, depth: int) -> Iterator[_Folder]:
        """A folder and those below it; takes over its descriptor."""
        with held(here.fd):
            self.io.check()
            status = os.fstat(here.fd)
            if (status.st_dev, status.st_ino) in self.seen or status.st_dev != dev:
                return
            self.seen.add((status.st_dev, status.st_ino))
            jobs, benchmarks, below = _listing(here.fd)
            yield replace(here, jobs=jobs, benchmarks=benchmarks)
            for name in below if depth else []:
                path = here.path.rstrip(b"/") + b"/" + name
                if self.mounts.may_wait(path):
                    continue  # another filesystem, which could make one wait
                try:
                    fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=here.fd)
                except OSError as error:
                    self.io.log(f"{display(path)} cannot be opened: {error.strerror}", "warning")
                    continue
                yield from self._below(_Folder(here.pool, path, fd, {}), dev, depth - 1)


def _listing(fd: int) -> tuple[dict[str, set[str]], frozenset[str], list[bytes]]:
    """The jobs that have files in a folder, those whose benchmarks have a folder there, and the names of the others."""
    jobs: dict[str, set[str]] = {}
    benchmarks, below = set(), []
    with os.scandir(fd) as entries:
        for entry in entries:
            ours = parse_name(os.fsencode(entry.name))
            if ours is not None and entry.is_file(follow_symlinks=False):
                jobs.setdefault(ours[0], set()).add(ours[1])
            elif ours is None and entry.is_dir(follow_symlinks=False) and entry.name != "lost+found":
                job = scratch.job_of(entry.name)
                if job is not None:
                    benchmarks.add(job)
                else:
                    below.append(os.fsencode(entry.name))
    return jobs, frozenset(benchmarks), sorted(below)


def _recover(
    folder: _Folder, job: str, kinds: set[str], recorded: bool, merges: committing.Merges, io: AgentIO
) -> list[dict[str, Any]]:
    try:
        one = Journal.open(folder.fd, job)
    except FileNotFoundError:
        return _recover_orphans(folder, job, kinds, io)
    except JournalError as error:
        io.log(f"{_shown(folder, job, 'journal')} was skipped: {error}", "warning")
        return []
    except RefusedError:
        mount = Mounts.of_this_machine().of_descriptor(folder.fd)
        kept = _KEPT_LOCK if mount is not None and mount.filesystem == "nfs" else ""
        return [_row(folder, Settled(job, outcome.BUSY, detail=kept))]
    except OSError as error:
        return [_row(folder, _not_now(folder, job, error, io))]
    try:
        settled = _finish_merge(one, merges, io) or settle.settle(one)
        found = [settled]
        if settled.undo_of is not None and settled.outcome == outcome.REVERTED:
            found.append(settle.settle(one))  # the job whose undo was put back: its copy waits again
        if found[-1].outcome == outcome.LOST and recorded:
            one.remove()  # it has nothing more to say, and would ask for a recovery at every scan
    except OSError as error:
        found = [_not_now(folder, job, error, io)]
    finally:
        one.close()
    for settled in found:
        io.log(f"job {settled.job}: {settled.outcome}. {settled.detail}".rstrip())
    return [_row(folder, settled) for settled in found]


def _finish_merge(one: Journal, merges: committing.Merges, io: AgentIO) -> Settled | None:
    """A merge that was cut off is done once more where the controller says so; ``None`` for another journal.

    Whether a guest has been led to the base since, or something else been made of it, only the controller knows: then
    the same work would take what was written since.
    """
    try:
        records = one.records()
    except JournalError:
        return None
    if not is_commit(records):
        return None
    if one.job in merges.again:
        return committing.repeat(one, records, merges.again[one.job], io)
    if one.job in merges.over:
        one.remove()
        return Settled(one.job, outcome.REVERTED, detail="its merge is over; only the journal was left")
    return Settled(one.job, outcome.BUSY, detail="its merge is finished when nobody uses the two images")


def _not_now(folder: _Folder, job: str, error: OSError, io: AgentIO) -> Settled:
    io.log(f"{_shown(folder, job, 'journal')} cannot be settled now: {error.strerror}", "error")
    return Settled(job, outcome.FAILED, detail=f"the host failed: {error.strerror}")


def _recover_orphans(folder: _Folder, job: str, kinds: set[str], io: AgentIO) -> list[dict[str, Any]]:
    """Files without a journal: an empty temporary file is nobody's, any other may be somebody's last."""
    # A client of NFS knows names for some seconds that another machine has removed with their journal just now: where a
    # folder is opened, it asks its server.
    os.close(os.open(b".", _FOLDER, dir_fd=folder.fd))
    rows = []
    made = outcome.stat_in(folder.fd, file_name(job, "new")) if "new" in kinds else None
    if made is not None and made.file_size:
        detail = f"{_shown(folder, job, 'new')} has no journal that says which job it belongs to; check it yourself"
        rows.append(_row(folder, Settled(job, outcome.FAILED, undo_bytes=made.allocated_size, detail=detail)))
    elif made is not None:
        outcome.unlink(folder.fd, file_name(job, "new"))
        io.log(f"{_shown(folder, job, 'new')} had no journal and was removed")
        rows.append(_row(folder, Settled(job, outcome.REVERTED)))
    lost = {"orig": "an undo copy without a journal", "aside": "an image that was set aside, without a journal"}
    for kind, told in lost.items():
        left = outcome.stat_in(folder.fd, file_name(job, kind))
        if left is not None:
            detail = f"{_shown(folder, job, kind)} is {told}; check it yourself"
            settled = Settled(job, outcome.FAILED, undo_bytes=left.allocated_size, detail=detail)
            rows.append(_row(folder, settled))
    return rows


def _recover_benchmark(folder: _Folder, job: str, active: bool, io: AgentIO) -> list[dict[str, Any]]:
    """A benchmark's folder holds nothing that anybody needs; its lock tells whether one is at work there."""
    name = scratch.folder_name(job)
    shown = display(folder.path + b"/" + os.fsencode(name))
    try:
        found = scratch.BUSY if active else scratch.settle(folder.fd, name)
    except OSError as error:
        io.log(f"{shown} cannot be removed now: {error.strerror}", "error")
        return [_row(folder, Settled(job, outcome.FAILED, detail=f"{shown}: {error.strerror}"))]
    if found == scratch.FOREIGN:
        io.log(f"{shown} was skipped, because the agent did not create it", "warning")
        return []
    if found == scratch.BUSY:
        return [_row(folder, Settled(job, outcome.BUSY))]
    detail = f"{shown}, which a benchmark had left, was removed"
    io.log(f"job {job}: {detail}")
    return [_row(folder, Settled(job, outcome.REVERTED, detail=detail))]


def _row(folder: _Folder, settled: Settled) -> dict[str, Any]:
    if settled.name is None:
        return settled.told(None, pool=folder.pool)
    now = outcome.stat_in(folder.fd, settled.name)
    more = {"dev": now.dev, "inode": now.inode, "after_bytes": now.allocated_size} if now else {}
    return settled.told(b64(folder.path.rstrip(b"/") + b"/" + settled.name), pool=folder.pool, **more)


def _shown(folder: _Folder, job: str, kind: str) -> str:
    return display(folder.path + b"/" + file_name(job, kind))
