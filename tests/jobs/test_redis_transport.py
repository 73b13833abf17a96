"""The line from Celery to Redis, when Redis goes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import current_app
from kombu import Connection, Consumer, Exchange, Message, Queue
from kombu.common import ignore_errors

from storage_admin.brokers import BrokerUrls
from storage_admin.redis_transport import Transport
from tests.harness.services import RedisServer

pytestmark = pytest.mark.services


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


def test_celery_uses_it_under_the_usual_addresses() -> None:
    for url in ("redis://localhost/0", "rediss://localhost/0", "redis+socket:///run/redis.sock"):
        assert isinstance(Connection(url).transport, Transport)
    assert isinstance(current_app.connection_for_write().transport, Transport)


def test_a_message_that_cannot_be_given_back_does_not_stop_who_closes_the_connection(server: RedisServer) -> None:
    connection = Connection(BrokerUrls.parse(server.url).kombu)
    taken: list[Message] = []
    with connection.SimpleQueue("bell") as queue:
        queue.put({"id": 1})
    bell = Consumer(connection.default_channel, [Queue("bell")], on_message=taken.append, accept=["json"])
    bell.consume()
    # As every worker has one, for what it is asked by other programs.
    mailbox = Queue("mailbox", Exchange("mailbox", type="fanout"), auto_delete=True)
    Consumer(connection.channel(), [mailbox]).consume()
    with contextlib.suppress(TimeoutError):
        while True:
            connection.drain_events(timeout=0.3)
    assert len(taken) == 1  # and it listens for the next one
    server.kill()
    # What Celery does when it has noticed that the broker is gone.
    with contextlib.suppress(Exception):
        connection.collect(socket_timeout=1)
    ignore_errors(connection, connection.close)
    with pytest.raises(connection.connection_errors):
        taken[0].ack()
