"""Ringing is never worth waiting for: a job's row is there, and the sweeper rings again."""

import socket
import threading
from pathlib import Path

import pytest
from celery import current_app
from django.conf import settings

from storage_admin.jobs import routing

pytestmark = pytest.mark.sql


@pytest.mark.django_db
def test_a_broker_that_hangs_up_is_tried_a_few_times_and_not_for_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = 0
    with socket.socket(socket.AF_UNIX) as broker:
        broker.bind(str(tmp_path / "s"))
        broker.listen()
        broker.settimeout(0.2)
        stopped = threading.Event()

        def hang_up() -> None:
            nonlocal attempts
            while not stopped.is_set():
                try:
                    broker.accept()[0].close()
                except TimeoutError:
                    continue
                attempts += 1

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            with current_app.connection_for_write(f"redis+socket://{tmp_path}/s") as connection:
                # As the product connects: by the options of its settings, which Celery hands to each connection.
                assert connection.transport_options == settings.CELERY_BROKER_TRANSPORT_OPTIONS
                monkeypatch.setattr(current_app, "producer_or_acquire", lambda *_: connection.Producer())
                routing.ring_now(1)
        finally:
            stopped.set()
            thread.join()
    assert 1 <= attempts <= 6
    assert "stays queued until the broker is back" in caplog.text
