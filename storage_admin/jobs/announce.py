"""What others are told when a job has ended, and what the audit trail keeps of it."""

from typing import Any

from storage_admin.accounts.roles import Actor, Role
from storage_admin.accounts.services import audit
from storage_admin.agent.protocol import unb64
from storage_admin.events import services as events
from storage_admin.hosts.names import display
from storage_admin.jobs import kinds
from storage_admin.jobs.models import Job

#: What is told of a result where it has it; sizes in bytes.
BYTES = ("before_bytes", "predicted_after_bytes", "after_bytes", "held_bytes", "freed_bytes")
#: What else the trail keeps of a result: words and numbers, none of them long.
_KEPT = (
    "held_bytes", "freed_bytes", "trimmed_bytes", "disk", "format", "path", "swapped", "of_job", "undone_job",
    "left_as", "task", "effect",
)  # fmt: skip


def tell_end(job_id: int) -> None:
    """Puts ``job.finished`` into the outbox, and what the job has changed into the audit trail. Call it once for each
    end, within the transaction that ends the job, after the row says so.

    A job that was called interrupted and turns out to have succeeded is told of twice: what is told last holds.
    """
    job = Job.objects.select_related("host").defer("plan", "commands", "host__capabilities").get(pk=job_id)
    if not kinds.only_looked(job):
        before, after = _change(job)
        # By whom it was asked for; no role is asked for any more.
        audit(Actor(job.created_by, Role.VIEWER), f"{job.kind} ended", job.target_label, before=before, after=after)
    if events.is_awaited(events.JOB_FINISHED):
        events.emit(events.JOB_FINISHED, host=job.host.slug, data=in_short(job))


def _change(job: Job) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """What was before a job and what is after it, as far as its row tells: nothing of its log or its plan."""
    result = job.result or {}
    before: dict[str, Any] = {}
    after: dict[str, Any] = {"job": job.pk, "host": job.host.slug, "state": str(job.state)}
    if job.error_code:
        after["code"] = job.error_code
    # One that was cut off has no result; what it had done in place until then stands in its line of the ledger.
    known = result if "before_bytes" in result else {"before_bytes": job.before_bytes, "after_bytes": job.after_bytes}
    # A new file beside the image leaves that as it is.
    if known["before_bytes"] is not None and job.options.get("replace") is not False:
        before["allocated_bytes"] = known["before_bytes"]
    if known.get("after_bytes") is not None:
        after["allocated_bytes"] = known["after_bytes"]
    if "copy_bytes" in result:
        before["undo_bytes"], after["undo_bytes"] = result["copy_bytes"], 0
    if "path" in result and "path_b64" in job.kept:
        before["path"] = display(unb64(job.kept["path_b64"]))
    if isinstance(result.get("before"), dict):
        before |= result["before"]
        after |= result.get("now") or {}
    if isinstance(result.get("recovered"), list):
        outcomes = [str(found.get("outcome")) for found in result["recovered"]]
        after["recovered"] = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    after |= {name: result[name] for name in _KEPT if result.get(name) is not None}
    return before or None, after


def in_short(job: Job) -> dict[str, Any]:
    """A job as receivers are told of it: nothing of its options, and nothing that a tool has printed."""
    result = job.result or {}
    return {
        "id": job.pk,
        "kind": job.kind,
        "state": job.state,
        "host": job.host.slug,
        "host_name": job.host.name,
        "target": {"kind": job.target_kind, "id": job.target_id, "label": job.target_label},
        **{name: result.get(name) for name in BYTES},
        "error_code": job.error_code or None,
        "created_by": job.created_by,
        "created": job.created.isoformat(),
        "started": job.started.isoformat() if job.started else None,
        "finished": job.finished.isoformat() if job.finished else None,
        "url": f"/jobs/{job.pk}/",
    }
