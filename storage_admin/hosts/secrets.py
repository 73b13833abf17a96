"""Secrets of hosts at rest (:mod:`storage_admin.sealing`); what is wrong with one is told as a host's error."""

from storage_admin import sealing
from storage_admin.agent.protocol import HostError


def lock(text: str) -> bytes:
    """A secret as it may be stored; empty for an empty one.

    Raises:
        HostError: the key is damaged.
    """
    try:
        return sealing.lock(text)
    except sealing.SealError as error:
        raise HostError(str(error)) from None


def unlock(stored: bytes | memoryview) -> str:
    """The secret.

    Raises:
        HostError: it was encrypted with another key.
    """
    try:
        return sealing.unlock(stored)
    except sealing.SealError as error:
        raise HostError(str(error)) from None
