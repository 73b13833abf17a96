"""What a path on this host is, before somebody registers it as a storage pool."""

from __future__ import annotations

import os
import stat
from typing import Any

from storage_admin.agent.arguments import Arguments
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Request, b64


def run(request: Request, io: AgentIO) -> dict[str, Any]:  # noqa: ARG001 (it is over at once)
    """Look at one path.

    Args:
        request: ``args``: ``path_b64``.
        io: the controller.

    Returns:
        ``kind``: ``folder``, ``other``, ``missing`` or ``unknown``; ``path_b64``: the path without links, of a folder;
        ``detail``: why it cannot be looked at.
    """
    path = Arguments(request.args, frozenset({"path_b64"})).path("path_b64")
    if b"\0" in path:
        return {"kind": "missing", "path_b64": None, "detail": ""}  # no file has such a name
    try:
        real = os.path.realpath(path)
        mode = os.stat(real).st_mode
    except FileNotFoundError:
        return {"kind": "missing", "path_b64": None, "detail": ""}
    except OSError as error:
        return {"kind": "unknown", "path_b64": None, "detail": error.strerror or "it cannot be looked at"}
    if not stat.S_ISDIR(mode):
        return {"kind": "other", "path_b64": None, "detail": ""}
    return {"kind": "folder", "path_b64": b64(real), "detail": ""}
