"""Rings for the next step of the policies' runs at once, so that nothing waits for the scheduler."""

import logging

from celery import current_app
from django.db import transaction
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from images.models import PolicyPick, PolicyRun
from storage_admin.jobs.models import Job

logger = logging.getLogger(__name__)

STEP = "images.tasks.advance_policies"


def ring() -> None:
    """Asks for a step once what was written is committed. If nobody hears, the scheduler asks within seconds."""
    transaction.on_commit(_ring)


def ring_after(job: Job) -> None:
    """Asks for a step when a job has ended that a run waits for: its place is free for the next one."""
    if PolicyPick.objects.filter(job=job, run__state=PolicyRun.State.RUNNING).exists():
        _ring()


def _ring() -> None:
    try:
        current_app.send_task(STEP, retry=False, ignore_result=True)
    except (OperationalError, RedisError, OSError) as error:
        logger.warning("the step waits for the scheduler until the broker is back: %s", error)
