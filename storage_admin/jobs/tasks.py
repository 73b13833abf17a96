"""Celery's tasks: each carries a job's id at most, and does nothing where the row says that there is nothing to do."""

import gc
import logging
from typing import Any

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from celery.signals import celeryd_after_setup, worker_ready, worker_shutdown, worker_shutting_down
from django.db import Error, connection

from storage_admin.hosts import ssh
from storage_admin.jobs import claims, reaper, routing, runner
from storage_admin.jobs.routing import heart

logger = logging.getLogger(__name__)


@shared_task(base=DjangoTask, ignore_result=True)
def run_job(job_id: int) -> None:
    """Claims and runs the job; harmless when somebody else did."""
    runner.run(job_id)


@shared_task(base=DjangoTask, ignore_result=True)
def reap() -> None:
    """Marks jobs interrupted whose worker is gone, and has their hosts recovered.

    When the database was away, no worker could say that it lives: first each gets the time to.
    """
    heart.beat()
    if heart.is_steady():
        reaper.reap()
    else:
        reaper.recover_hosts()


@shared_task(base=DjangoTask, ignore_result=True)
def sweep() -> None:
    """Rings queued jobs again that nobody heard of."""
    reaper.sweep()


@celeryd_after_setup.connect
def _take_post(instance: Any, **_kwargs: Any) -> None:
    """Whatever the worker was started by: it listens to the queues of its post and to no other."""
    try:
        routing.take_post()
    except Error as error:
        logger.warning("the database is away, so this worker listens to its general queue alone: %s", error)
    finally:
        connection.close()
    instance.app.amqp.queues.select(routing.post().queues)
    claims.threads = instance.concurrency


def settle_memory() -> None:
    """Call it once when a worker starts: what is loaded by then stays, and the garbage collector need not look at it.

    A scan makes a million short-lived objects; a tenth of its time went into looking for cycles among all others.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@worker_ready.connect
def _worker_ready(**_kwargs: Any) -> None:
    settle_memory()
    ssh.clear_leftovers()
    heart.start()
    reaper.reap_dead_workers()
    reaper.sweep()


@worker_shutting_down.connect
def _worker_shutting_down(**_kwargs: Any) -> None:
    runner.stopping.set()


@worker_shutdown.connect
def _worker_shutdown(**_kwargs: Any) -> None:
    heart.stop()
