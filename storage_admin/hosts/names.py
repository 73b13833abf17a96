"""Names of files: bytes on a hypervisor, text on a screen, and a short key in an index."""

import hashlib

from storage_admin.agent.protocol import display

__all__ = ["display", "path_key", "raw", "shown"]


def raw(path: str) -> bytes:
    """A path as it is on its host; what is no UTF-8 there, Python's texts have as surrogates."""
    return path.encode("utf-8", "surrogateescape")


def shown(told: str, longest: int | None = None) -> str:
    """What a host told, fit for a column and a screen: it may hold bytes that are no text.

    Args:
        longest: characters that are left of it; ``None`` for all.
    """
    return display(raw(told))[:longest]


def path_key(raw: bytes) -> str:
    """A digest of a path, 32 characters: an index takes no path of 4,096 bytes."""
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
