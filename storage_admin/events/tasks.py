"""What the scheduler rings for: deliveries that are due, and the end of their history."""

import logging
from datetime import timedelta

from celery import current_app, shared_task
from celery.contrib.django.task import DjangoTask
from django.conf import settings
from django.db import transaction
from django.utils import timezone
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from storage_admin.events import sending

logger = logging.getLogger(__name__)


@shared_task(base=DjangoTask, ignore_result=True)
def deliver() -> None:
    """Sends what is due; harmless beside another one."""
    sending.deliver(timezone.now())


@shared_task(base=DjangoTask, ignore_result=True)
def forget() -> None:
    """Deletes what is older than it is kept."""
    sending.forget(timezone.now(), timedelta(days=settings.EVENTS_KEEP_DAYS))


def ring() -> None:
    """Has somebody send now, once the row is committed; if nobody hears, the scheduler rings within seconds."""
    transaction.on_commit(_ring_now)


def _ring_now() -> None:
    try:
        current_app.send_task("storage_admin.events.tasks.deliver", retry=False, ignore_result=True)
    except (OperationalError, RedisError, OSError) as error:
        logger.warning("what is due waits for the scheduler: %s", error)
