"""Webhooks that lead to real receivers."""

from collections.abc import Callable

import pytest

from storage_admin import sealing
from storage_admin.events.models import Webhook

SECRET = "whsec_of-the-tests"
MakeHook = Callable[..., Webhook]


@pytest.fixture
def make_hook() -> MakeHook:
    """Makes a webhook; ``make_hook(url, name=..., events=[...])``."""

    def make(url: str, name: str = "ops", **values: object) -> Webhook:
        return Webhook.objects.create(
            name=name, url=url, secret_locked=sealing.lock(SECRET), created_by="admin", **values
        )

    return make


@pytest.fixture
def hook() -> Webhook:
    """One that leads to nobody."""
    return Webhook.objects.create(name="ops", url="http://127.0.0.1:9/", secret_locked=b"x", created_by="admin")
