"""The verb ``users``: who has a file open on this host, asked for by another one that shares the storage."""

from __future__ import annotations

import os
from typing import Any

from storage_admin.agent import locking
from storage_admin.agent.arguments import Arguments
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.pools import display, open_beneath
from storage_admin.agent.protocol import RefusedError, Request


def run(request: Request, io: AgentIO) -> dict[str, Any]:  # noqa: ARG001 (as every verb)
    """Look for processes, loop devices and swap that have a file open. No lock of it is touched.

    Args:
        request: ``args``: ``path_b64``, ``pool_path_b64``.
        io: the controller.

    Returns:
        ``who``: a phrase such as ``process 4711 (qemu-system-x86)``, or null; ``inode`` of the file.

    Raises:
        RefusedError: ``invalid``, ``outside_pool``; ``stale_plan``, where there is no such file here.
    """
    args = Arguments(request.args, frozenset({"path_b64", "pool_path_b64"}))
    pool, path = args.path("pool_path_b64"), args.path("path_b64")
    try:
        fd = open_beneath(pool, path, os.O_RDONLY)
    except OSError as error:
        raise RefusedError("stale_plan", f"{display(path)} cannot be opened: {error.strerror}") from error
    try:
        return {"who": locking.opener([locking.file_id(fd)]), "inode": os.fstat(fd).st_ino}
    finally:
        os.close(fd)
