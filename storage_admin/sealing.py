"""Secrets at rest: encrypted with a key that is not in the database.

The key is in ``STORAGE_ADMIN_SECRETS_KEY``, or in the data folder's ``secrets.key``, made at the first need. Workers on
other machines need the same one.
"""

import os
from functools import lru_cache
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings

from storage_admin.key_files import key_in

_VARIABLE = "STORAGE_ADMIN_SECRETS_KEY"


class SealError(Exception):
    """A secret cannot be read; the argument is a sentence that says what to do."""


@lru_cache(maxsize=1)
def _box() -> Fernet:
    given = os.environ.get(_VARIABLE, "").strip()
    path = Path(settings.DATA_DIR) / "secrets.key"
    try:
        return Fernet(given or key_in(path, lambda: Fernet.generate_key().decode()))
    except ValueError:  # also what is no text
        raise SealError(f"The key of the secrets is damaged: put the right one into {_VARIABLE}.") from None


def lock(text: str) -> bytes:
    """A secret as it may be stored; empty for an empty one."""
    return _box().encrypt(text.encode()) if text else b""


def unlock(stored: bytes | memoryview) -> str:
    """The secret.

    Raises:
        SealError: it was encrypted with another key.
    """
    if not stored:
        return ""
    try:
        return _box().decrypt(bytes(stored)).decode()
    except InvalidToken:
        raise SealError(
            f"A stored secret cannot be read with this key. Give the secret again, or set {_VARIABLE}."
        ) from None
