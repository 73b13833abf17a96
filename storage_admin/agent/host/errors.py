"""What an error of the host means to an admin, whether a call answered it or a tool printed it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from storage_admin.agent.protocol import HostError, RefusedError

_FULL = {errno.ENOSPC: "the disk was full", errno.EDQUOT: "the quota of the storage is used up"}
_FORBIDDEN = frozenset({errno.EPERM, errno.EACCES, errno.EROFS})


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """What the host says becomes a refusal or an error.

    Raises:
        RefusedError: ``not_enough_space``; ``immutable``; ``pool_changed``, where an NFS server does not know a file
            or folder any more that was open a moment ago.
        HostError: an I/O error.
    """
    try:
        yield
    except OSError as error:
        raise meaning(error.errno) or HostError(f"the host failed: {error.strerror or error}") from error


def meaning(number: int | None) -> RefusedError | None:
    """The refusal that an error's number is; ``None`` where it is none that an admin can act on."""
    if number in _FULL:
        return RefusedError("not_enough_space", f"{_FULL[number]}; free some space and try again")
    if number in _FORBIDDEN:
        told = "a storage of NFS may be exported read-only, without root, or not to this host any more"
        return RefusedError("immutable", f"the host does not allow it: {os.strerror(number)}; {told}")
    if number == errno.ESTALE:
        return RefusedError("pool_changed", STALE)
    return None


#: Of NFS: what the server has exported anew, or replaced, is another folder, whatever its path.
STALE = (
    "the server of the storage does not know the file or its folder any more (stale file handle): it was exported anew "
    "or replaced there. Export it as before, or mount it again, then scan the host"
)

#: Of NFS with ``all_squash``: a journal of the agent's is only believed where it is the agent's own.
SQUASHED = (
    "the server of the storage gives files that root makes to another user (all_squash), so that a job that is cut off "
    "could not be recovered. Export it with no_root_squash"
)


def of_tool(stderr: bytes) -> RefusedError | None:
    """The same, of what a tool printed in English."""
    for number in (*_FULL, errno.EROFS, errno.ESTALE):
        if os.strerror(number).encode() in stderr:
            return meaning(number)
    return None
