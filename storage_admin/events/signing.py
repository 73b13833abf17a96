"""Signatures of what webhooks are sent: HMAC-SHA256 over the time, a dot and the body."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable

#: Secrets start with it, so that a scanner for leaked secrets can find them.
PREFIX = "whsec_"


def new_secret() -> str:
    """256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def signature(keys: Iterable[str], timestamp: int, body: bytes) -> str:
    """The header ``X-Storage-Admin-Signature``: ``t=1700000000,v1=…``, with one ``v1`` for each key.

    Args:
        keys: the secret; during a rotation the one before it too.
        timestamp: seconds since 1970, when it is sent.
    """
    said = f"{timestamp}.".encode() + body
    marks = (hmac.new(key.encode(), said, hashlib.sha256).hexdigest() for key in keys)
    return ",".join([f"t={timestamp}", *(f"v1={mark}" for mark in marks)])
