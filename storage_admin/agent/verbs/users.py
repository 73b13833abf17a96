"""The verb ``users``: which files somebody has open on this host, asked for by one that shares the storage."""

from __future__ import annotations

import os
import time
from typing import Any

from storage_admin.agent.folders.pools import held, open_parent
from storage_admin.agent.host import locking
from storage_admin.agent.host.in_use import FileId
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request, display
from storage_admin.agent.swap.moment import GRACE
from storage_admin.agent.swap.outcome import stat_in


def run(request: Request, io: AgentIO) -> dict[str, Any]:  # noqa: ARG001 (as every verb)
    """Look for processes, loop devices and swap that have files open. No lock of them is touched, none is opened.

    The folder is opened first: a client of NFS looks up anew then what has changed in it. So from here on nobody on
    this host finds a file by a name that it had before.

    Args:
        request: ``args``: ``path_b64``, ``pool_path_b64`` of an image; ``inodes`` of the files, in its folder.
        io: the controller.

    Returns:
        ``used``: which of ``inodes`` somebody has open; ``inode`` of the file that has the name, null where none has.

    Raises:
        RefusedError: ``invalid``, ``outside_pool``; ``stale_plan``, where there is no such folder here.
    """
    args = Arguments(request.args, frozenset({"path_b64", "pool_path_b64", "inodes"}))
    pool, path, inodes = args.path("pool_path_b64"), args.path("path_b64"), args.take("inodes", list)
    if not all(type(inode) is int for inode in inodes):
        raise RefusedError(INVALID, "inodes are no numbers")
    try:
        folder, name = open_parent(pool, path)
    except OSError as error:
        raise RefusedError("stale_plan", f"{display(path)} cannot be opened: {error.strerror}") from error
    with held(folder):
        named, dev = stat_in(folder, name), os.fstat(folder).st_dev
    time.sleep(GRACE)  # who has looked the name up before is on his way to the file
    used = [inode for inode in inodes if locking.opener([FileId(dev, inode)])]
    return {"used": used, "inode": None if named is None else named.inode}
