"""What a path on a host is, while an admin registers it."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from storage_admin.agent import waiting
from storage_admin.agent.mounts import Mounts
from storage_admin.agent.protocol import HostError, RefusedError, b64, unb64
from storage_admin.hosts import asking, transport
from storage_admin.hosts.models import Host


@dataclass(frozen=True)
class Found:
    """A path as its host sees it.

    Args:
        kind: ``folder``, ``other``, ``missing`` or ``unknown``.
        path: without links, of a folder.
        detail: why it cannot be looked at.
    """

    kind: str
    path: bytes = b""
    detail: str = ""


def look(host: Host, path: bytes) -> Found:
    """Looks at a path: itself where the host is this machine, by its agent elsewhere.

    Raises:
        RefusedError: ``host_unreachable``.
    """
    if transport.is_here(host):
        return _here(path) if _answers(path) else Found("unknown", detail="it does not answer")
    try:
        answer = asking.ask(host, "folder", {"path_b64": b64(path)})
    except HostError as error:
        raise RefusedError("host_unreachable", error.detail) from error
    return Found(answer["kind"], unb64(answer["path_b64"]) if answer["path_b64"] else b"", str(answer["detail"]))


def _answers(path: bytes) -> bool:
    """Whether it may be looked at here: of a network filesystem whose server is away, a web process would wait on."""
    try:
        return not Mounts.of_this_machine().waits or not waiting.silent([path], lambda: None)
    except OSError:
        return True  # too long to be a path at all, as looking at it will tell


def _here(path: bytes) -> Found:
    try:
        raw = os.path.realpath(path)
        mode = Path(os.fsdecode(raw)).stat().st_mode
    except FileNotFoundError:
        return Found("missing")
    except OSError as error:
        return Found("unknown", detail=error.strerror or "it cannot be read")
    return Found("folder", raw) if stat.S_ISDIR(mode) else Found("other")
