"""Look who needs images of a running guest's chain: asked right before its disk is changed, so little is loaded."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.folders.pools import held, is_ours, open_parent
from storage_admin.agent.host.in_use import FileId
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request, display, host_errors
from storage_admin.agent.scan.overlays import LookedAt, Wanted, refuse_needed
from storage_admin.agent.swap.journal import FLAGS

WHERE = frozenset({"path_b64", "pool_path_b64"})


@dataclass(frozen=True)
class OpenImage:
    """The image: its path for a sentence, its name, descriptors of its folder and of itself."""

    shown: str
    name: bytes
    folder: int
    fd: int

    @property
    def wanted(self) -> Wanted:
        return Wanted(FileId.of(self.fd), FileId.of(self.folder), self.name, self.shown)


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Look who needs images of a running guest's chain, also what was made since the last scan.

    Args:
        request: ``args``: ``images``: files of the chain from above, each ``path_b64`` and ``pool_path_b64``, which may
            need each other; ``first``: place of the first that nobody else may need; ``pools`` (as for
            :func:`aside.set_aside`).
        io: the controller.

    Returns:
        Nothing.

    Raises:
        RefusedError: ``has_overlays``, ``guests_unknown``; ``stale_plan``, ``outside_pool``: one is not there.
        HostError: the host failed.
    """
    args = Arguments(request.args, frozenset({"images", "first", "pools"}))
    pools = [LookedAt.parse(pool) for pool in args.get("pools", list, [])]
    first, chain = args.take("first", int), args.take("images", list)
    with host_errors(), contextlib.ExitStack() as stack:
        if not all(isinstance(one, dict) for one in chain):
            raise RefusedError(INVALID, "an image has a path and a pool")
        images = [stack.enter_context(opened(Arguments(one, WHERE))) for one in chain]
        own = frozenset(image.wanted.id for image in images)
        for image in images[max(first, 0) :]:
            refuse_needed(pools, image.wanted, io, own)
    return {}


@contextlib.contextmanager
def opened(args: Arguments) -> Iterator[OpenImage]:
    """The image that ``path_b64`` in ``pool_path_b64`` names; raises RefusedError."""
    path = args.path("path_b64")
    folder, name = open_parent(args.path("pool_path_b64"), path)
    shown = display(path)
    with held(folder):
        if is_ours(name):
            raise RefusedError(INVALID, f"{shown} has a name that is reserved for files of jobs; rename it first")
        try:
            named = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            raise RefusedError("stale_plan", f"{shown} no longer exists; scan the host and try again") from None
        # Already to open a device or a pipe may do something to who stands behind it.
        if not stat.S_ISREG(named.st_mode):
            raise RefusedError("outside_pool", f"{shown} is not a regular file")
        with held(os.open(name, FLAGS, dir_fd=folder)) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise RefusedError("outside_pool", f"{shown} is not a regular file")
            yield OpenImage(shown, name, folder, fd)
