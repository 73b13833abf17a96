"""Rings Celery: there is a job. The message is the job's id and nothing else; the queue, its host's or the default."""

import logging

from celery import current_app
from django.db import Error, transaction
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from storage_admin.jobs import routing
from storage_admin.jobs.models import Job

logger = logging.getLogger(__name__)

RUN_JOB = "storage_admin.jobs.tasks.run_job"


def ring(job: Job) -> None:
    """Tells a worker that the job is there, once its row is committed. If nobody hears, the sweeper rings again."""
    transaction.on_commit(lambda: ring_now(job.pk))


def ring_now(job_id: int) -> None:
    """Rings for a job that is committed already."""
    try:
        queue = routing.queue_for(job_id)
    except Error as error:
        logger.warning("job %s stays queued until the database is back: %s", job_id, error)
        return
    send(f"job {job_id}", RUN_JOB, job_id, queue=queue)


def send(what: str, task: str, *args: int, queue: str | None = None) -> None:
    """Asks workers for a task. If the broker is away, whoever looks from time to time finds what is to be done.

    Args:
        what: is to be done, for the log.
    """
    try:
        current_app.send_task(task, args, queue=queue, retry=False, ignore_result=True)
    except (OperationalError, RedisError, OSError) as error:
        logger.warning("%s stays queued until the broker is back: %s", what, error)
