"""Rings for the next step of the policies' runs at once, so that nothing waits for the scheduler."""

from django.db import transaction

from images.models import PolicyPick, PolicyRun
from storage_admin.jobs import routing
from storage_admin.jobs.models import Job

STEP = "images.tasks.advance_policies"


def ring() -> None:
    """Asks for a step once what was written is committed. If nobody hears, the scheduler asks within seconds."""
    transaction.on_commit(_ring)


def ring_after(job: Job) -> None:
    """Asks for a step when a job has ended that a run waits for: its place is free for the next one."""
    if PolicyPick.objects.filter(job=job, run__state=PolicyRun.State.RUNNING).exists():
        _ring()


def _ring() -> None:
    routing.send("the policies' next step", STEP)
