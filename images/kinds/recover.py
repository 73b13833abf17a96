"""The job kind ``recover``: what interrupted jobs left on a host is finished or put back, and their rows say so."""

from datetime import timedelta
from typing import Any

from django.utils import timezone

from images import rewriting
from images.kinds.scan import HostKind
from images.models import Image
from storage_admin.accounts.roles import Actor
from storage_admin.agent.protocol import b64
from storage_admin.jobs import claims
from storage_admin.jobs.models import Job
from storage_admin.jobs.plans import Plan


class Recover(HostKind):
    """Reads the journals in a host's pools; each tells whether its image was replaced already."""

    name = "recover"
    title = "Recover"
    description = "Finishes or puts back what interrupted jobs left on the host, by their journals."
    verb = "recover"
    single = True

    def plan(self, actor: Actor, target_id: int, options: dict[str, Any]) -> Plan:  # noqa: ARG002 (the same for all)
        host = self.resolve(target_id).host
        return Plan(reason=f"Looks for journals of interrupted jobs in {host.pools.count()} pools.")

    def request(self, job: Job) -> dict[str, Any]:
        active = Job.objects.filter(host=job.host_id, state=Job.State.RUNNING, rewrites=True)
        return {
            "pools": [
                {"id": pool.pk, "path_b64": b64(bytes(pool.path_bytes)), "kind": "dir"} for pool in job.host.pools.all()
            ],
            "jobs_active": list(active.values_list("uid", flat=True)),
        }

    def record(self, job: Job, result: dict[str, Any]) -> dict[str, Any]:
        busy = set()
        for found in result["recovered"]:
            match found["outcome"]:
                case "busy":
                    busy.add(found["job"])
                case "failed":
                    _say(found, found["detail"] or "it could not be recovered; look at its files on the host", "error")
                case _:
                    self._settle(found)
        # Only what had ended before the agent looked: it may not have seen what a later one left.
        settled = Job.objects.filter(host=job.host_id, needs_recovery=True, finished__lt=job.started or job.created)
        at_work = Job.objects.filter(uid__in=busy)
        settled = settled.exclude(pk__in=at_work.values("pk")).exclude(
            target_kind="job", target_id__in=at_work.values("pk")
        )
        settled.exclude(state__in=Job.ACTIVE).update(needs_recovery=False)
        return {
            "recovered": [{key: found[key] for key in ("job", "outcome", "detail")} for found in result["recovered"]]
        }

    @staticmethod
    def _settle(found: dict[str, Any]) -> None:
        lost = Job.objects.select_related("host").filter(uid=found["job"]).first()
        if lost is None or lost.active:
            return
        if found["undo_of"] is not None:
            _settle_undo(lost, found)
        elif found["outcome"] in {"finished", "kept"} and _unrecorded(lost):
            _finished_after_all(lost, found)
        elif found["outcome"] == "reverted" and lost.needs_recovery:
            claims.log(lost, "recovered: the original stands, and what was left beside it is cleared")
        elif found["outcome"] == "kept" and lost.undo_available and not found["undo_bytes"]:
            rewriting.close_undo(lost, Job.UndoState.MISSING, _difference(found))
            claims.log(lost, "its undo copy was deleted by somebody else", "warning")

    def ended(self, job: Job) -> None:
        job.refresh_from_db(fields=["result"])
        # Only what was changed is read again: a scan submits a recovery, so the two must not go round in circles.
        if any(found["outcome"] in {"finished", "reverted"} for found in (job.result or {}).get("recovered", [])):
            rewriting.rescan(job)


def _say(found: dict[str, Any], text: str, level: str) -> None:
    lost = Job.objects.filter(uid=found["job"]).first()
    if lost is not None and not lost.log_lines.filter(text=text).exists():
        claims.log(lost, text, level)


def _unrecorded(lost: Job) -> bool:
    """Whether nobody was left, or able, to write down how the job ended."""
    return lost.state == Job.State.INTERRUPTED or (lost.state == Job.State.FAILED and lost.needs_recovery)


def _finished_after_all(lost: Job, found: dict[str, Any]) -> None:
    """The image was swapped before the worker died: the job has succeeded, and nobody was left to write it down."""
    held = found["undo_bytes"]
    Job.objects.filter(pk=lost.pk).update(
        state=Job.State.SUCCEEDED, error_code="", error_detail="", progress=100.0, stage="", message="",
        result={
            "before_bytes": found["before_bytes"], "after_bytes": found["after_bytes"], "held_bytes": held,
            "predicted_after_bytes": lost.plan.get("predicted_after_bytes"),
            "freed_bytes": 0 if held else _difference(found),
            "freed_at": None if held else timezone.now().isoformat(), "recovered": True, "swapped": True,
        },
    )  # fmt: skip
    claims.log(lost, "recovered: the new image stood in its place already, verified; the job has succeeded")
    image = Image.objects.select_related("pool").filter(pk=lost.target_id).first()
    if image is not None and found["inode"] is not None:
        rewriting.image_replaced(image, found)
    rewriting.keep_undo(lost, held, timedelta(hours=float(lost.options.get("undo_hours", 24))))


def _settle_undo(lost: Job, found: dict[str, Any]) -> None:
    undone = Job.objects.filter(uid=found["undo_of"]).first()
    if found["outcome"] == "finished" and undone is not None:
        rewriting.close_undo(undone, Job.UndoState.UNDONE, 0)
        Job.objects.filter(pk=lost.pk, state=Job.State.INTERRUPTED).update(
            state=Job.State.SUCCEEDED, error_code="", error_detail="", progress=100.0, stage="", message="",
            result={"undone_job": undone.pk, "held_bytes": 0, "freed_bytes": 0, "freed_at": None, "recovered": True},
        )  # fmt: skip
        claims.log(lost, "recovered: the original stood in its place already; the undo has succeeded")
    else:
        claims.log(lost, "recovered: the undo had not happened; the undo copy waits again")


def _difference(found: dict[str, Any]) -> int:
    return int(found["before_bytes"] or 0) - int(found["after_bytes"] or 0)
