"""Jobs that were cut off and left nothing beside their images: no journal tells of them any more, or ever did.

An agent that has swapped ends its work also when its worker is gone. Where no undo copy is kept, the last step is to
remove the journal; digging in place needs none. What such a job has done is told by what its agent said before
(``Job.kept``, and what the image occupied), and by the file that is there now.
"""

from typing import Any

from django.db.models import QuerySet

from images.kinds.create import Create
from images.kinds.move import made as to_make
from images.models import Image
from images.rewrite import record
from images.rewrite.kind import Rewriting
from storage_admin.agent.protocol import b64
from storage_admin.hosts.models import StoragePool
from storage_admin.jobs import claims, kinds
from storage_admin.jobs.models import Job


def where(host_id: int) -> list[dict[str, str]]:
    """The files that these jobs may have made or changed: what a recovery has to look at."""
    found = []
    for job in _cut_off(host_id):
        made = made_at(job)
        if made is not None and not made[0].is_of_volumes and ("ready" in job.kept or job.before_bytes is not None):
            pool, path = made
            found.append({"job": job.uid, **pool.place_of(path)})
    return found


def volumes(host_id: int) -> list[dict[str, str]]:
    """The volumes that these jobs may have made, in the same way."""
    found = []
    for job in _cut_off(host_id):
        made = made_at(job)
        if made is not None and made[0].is_of_volumes and "ready" in job.kept and "made_inode" in job.kept["ready"]:
            found.append({"job": job.uid, "id": job.kept["ready"]["made_inode"], **to_make(*made)})
    return found


def where_undone(host_id: int) -> list[dict[str, str]]:
    """Where undos that were cut off have put the originals, of those that have another name than what replaced them."""
    found = []
    for undo in _cut_off_at(host_id, "job").filter(kind="undo"):
        undone = Job.objects.filter(pk=undo.target_id).first()
        image = Image.every.select_related("pool").filter(pk=undone.target_id).first() if undone is not None else None
        paths = record.paths_of(undone) if undone is not None else []
        if image is not None and len(set(paths)) > 1:
            found.append({"job": undo.uid, **image.pool.place_of(paths[0])})
    return found


def undone(undo: Job, lost: Job, seen: dict[str, Any] | None) -> dict[str, Any]:
    """The file that an undo without a trace has put back under the original's name; empty where it is not there.

    Args:
        undo: it was cut off.
        lost: the job that it undoes.
        seen: what is at the original's path, as the agent has found it.
    """
    ready = undo.kept.get("ready")
    if seen is None or ready is None or seen["inode"] != ready["made_inode"]:
        return {}
    path = b64(record.paths_of(lost)[0])
    return {"path_b64": path, "dev": seen["dev"], "inode": seen["inode"], "after_bytes": seen["bytes"]}


def swapped(recovery: Job, found: dict[str, Any]) -> tuple[Job, dict[str, Any]] | None:
    """The job whose new file has its name, though no journal says so, and the row that a journal would have made.

    Args:
        found: the file under the name that the job would have given it: ``job``, ``dev``, ``inode``, ``bytes``.
    """
    job = _one(recovery, found)
    ready = job.kept.get("ready") if job is not None else None
    made = made_at(job) if job is not None else None
    if job is None or ready is None or made is None or ready["made_inode"] != found["inode"]:
        return None
    pool, path = made
    return job, {
        "outcome": "finished", "pool": pool.pk, "path_b64": b64(path), "dev": found["dev"], "inode": found["inode"],
        "before_bytes": ready["before_bytes"], "made_bytes": ready["made_bytes"], "after_bytes": found["bytes"],
        "goes_shared": ready.get("goes_shared", 0), "made_shared": ready.get("made_shared", 0),
        "undo_bytes": 0, "undo_waits": False, "put_back": False, "detail": "", "original": None,
    }  # fmt: skip


def settle_in_place(recovery: Job, found: dict[str, Any]) -> None:
    """Work in place was cut off, and nobody told what it had won until then: the file tells, as it is now."""
    job = _one(recovery, found)
    kind = kinds.get(job.kind) if job is not None and job.target_kind == "image" else None
    image = kind.written(job) if job is not None and isinstance(kind, Rewriting) else None
    if job is None or image is None or job.freed_bytes is not None or image.inode != str(found["inode"]):
        return
    before = job.before_bytes
    if before is not None:
        record.write_line_in_place(job, image.pool, before, found["bytes"])
        claims.log(job, f"recovered: {before - found['bytes']} bytes were freed before the job was interrupted")


def _cut_off(host_id: int) -> QuerySet[Job]:
    return _cut_off_at(host_id, "image", "pool")


def made_at(job: Job) -> tuple[StoragePool, bytes] | None:
    """The pool and the path of what a job makes; ``None`` where nobody knows that, or it makes nothing."""
    kind = kinds.get(job.kind)
    return kind.made_at(job) if isinstance(kind, Rewriting | Create) else None


def _cut_off_at(host_id: int, *target_kinds: str) -> QuerySet[Job]:
    jobs = Job.objects.filter(host=host_id, needs_recovery=True, rewrites=True, target_kind__in=target_kinds)
    return jobs.exclude(state__in=[*Job.ACTIVE, Job.State.SUCCEEDED]).select_related("host")


def _one(recovery: Job, found: dict[str, Any]) -> Job | None:
    """A job that had ended before the agent looked: of a later one it may have seen the middle."""
    began = recovery.started or recovery.created
    return _cut_off(recovery.host_id).filter(uid=found["job"], finished__lt=began).first()
