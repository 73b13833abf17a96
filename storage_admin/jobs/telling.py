"""What others are told when a job has ended."""

from typing import Any

from storage_admin.events import services as events
from storage_admin.jobs.models import Job

#: What is told of a result where it has it; sizes in bytes.
BYTES = ("before_bytes", "predicted_after_bytes", "after_bytes", "held_bytes", "freed_bytes")


def tell_end(job_id: int) -> None:
    """Puts ``job.finished`` into the outbox. Call it within the transaction that ends the job, after the row says so.

    A job that was called interrupted and turns out to have succeeded is told of twice: what is told last holds.
    """
    if events.is_awaited(events.JOB_FINISHED):
        job = Job.objects.select_related("host").defer("plan", "commands", "host__capabilities").get(pk=job_id)
        events.emit(events.JOB_FINISHED, host=job.host.slug, data=in_short(job))


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
