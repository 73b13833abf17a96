"""A sender that is killed in the middle loses nothing: what it had claimed is sent again, with the same number."""

import os
import signal
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection
from django.utils import timezone

from storage_admin.events import sending, services
from storage_admin.events.models import Delivery
from tests.events.conftest import hook_to
from tests.harness.processes import wait_until
from tests.harness.receiver import receiver
from tests.harness.services import database_url
from tests.working import reread

pytestmark = pytest.mark.django_db(transaction=True)
SENDER = """
import django
django.setup()
from storage_admin.events import sending
print("at work", flush=True)
while True:
    sending.deliver()
"""


def test_a_sender_that_is_killed_in_the_middle_loses_nothing() -> None:
    with receiver(slow=0.3) as there:
        hook_to(there.url)
        for number in range(12):
            services.emit("job.finished", data={"id": number})
        environment = os.environ | {
            "DJANGO_SETTINGS_MODULE": "storage_admin.settings",
            "DATABASE_URL": database_url(connection.settings_dict),
            "STORAGE_ADMIN_DATA_DIR": str(settings.DATA_DIR),
        }
        root = Path(__file__).parents[2]
        sender = subprocess.Popen([sys.executable, "-c", SENDER], env=environment, cwd=root, start_new_session=True)
        try:
            wait_until(lambda: len(there.got) >= 4, 60, "four have come")
        finally:
            os.killpg(sender.pid, signal.SIGKILL)  # while the receiver takes its time with one
            sender.wait()
        there.slow = 0.0
        assert len(there.got) < 12
        held = Delivery.objects.get(state="due", attempts=1)
        sending.deliver()
        assert reread(held).state == "due", "nobody knows yet that its sender is dead"
        sending.deliver(timezone.now() + sending.LEASE + timedelta(seconds=1))
    assert set(Delivery.objects.values_list("state", flat=True)) == {"sent"}
    came = Counter(got.headers["X-Storage-Admin-Delivery"] for got in there.got)
    assert len(came) == 12
    assert sum(came.values()) == 13
    assert came[str(held.pk)] == 2
