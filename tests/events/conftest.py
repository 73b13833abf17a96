"""Webhooks, and tries until nobody tries any more."""

from datetime import datetime

import pytest
from django.utils import timezone

from storage_admin.events import sending
from storage_admin.events.models import Webhook
from tests.factories import WebhookFactory

#: Of the factory's webhooks.
SECRET = "whsec_of-the-tests"


def hook_to(url: str, name: str = "ops", **values: object) -> Webhook:
    return WebhookFactory.create(url=url, name=name, **values)


@pytest.fixture
def hook() -> Webhook:
    """One that leads to nobody."""
    return WebhookFactory.create(name="ops")


def try_until_the_end(now: datetime | None = None) -> datetime:
    """All tries of what waits now, each when it is due; the time of the last one."""
    now = now or timezone.now()
    sending.deliver(now)
    for delay in sending.DELAYS:
        now += delay
        sending.deliver(now)
    return now
