"""Celery's transport for Redis, as kombu has it, but for one thing: a broker that dies does not end the worker.

When Redis goes while a message is being acknowledged, Celery gives the connection up, and then has its channel put the
message back. The channel asks the connection for the address to do so, and the connection has been taken from it by
then: an ``AttributeError``, which is none of the errors after which Celery connects again (kombu 5.7, ``Channel.close``
by way of ``restore_unacked``). Here it is a lost connection, which it is. The message is lost with it, or comes twice:
both are harmless, because a message only says that a job's row is worth a look.
"""

from typing import Any

from kombu.transport import redis
from redis.exceptions import ConnectionError as LostConnectionError


class Channel(redis.Channel):
    """A channel that says so when its connection has been given up."""

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        if self.connection.client is None:
            raise LostConnectionError("the connection to the broker has been given up")
        found: dict[str, Any] = super()._connparams(asynchronous=asynchronous)  # type: ignore[misc]  # not in its stubs
        return found


class Transport(redis.Transport):
    """Redis with such channels."""

    Channel = Channel
