"""Write an overlay's data into its base."""

from __future__ import annotations

import contextlib
from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request
from storage_admin.agent.rewrite.base import COMMON, Wish, opened
from storage_admin.agent.rewrite.chain import Chain
from storage_admin.agent.rewrite.committing import Commit


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Merge an overlay that nobody uses into its base, where that stands; then ask whether guests may be led to it.

    Args:
        request: its ``args`` are :data:`base.COMMON`; in ``pools`` is looked for what else needs the base.
        io: the controller. Until it says ``go``, or ends, nobody can begin to write through the overlay.

    Returns:
        Allocated bytes of the base before and after, and what that freed (less than nothing); ``virtual_size``.

    Raises:
        RefusedError, HostError, StoppedError: the overlay reads as before. Where the base has been written to, it reads
            as the overlay does, or a journal is left that a recovery finishes.
    """
    wish = Wish.parse(request.args, Arguments(request.args, COMMON))
    with opened(wish) as chain:
        if not wish.ancestors:
            raise RefusedError(INVALID, "an image without a backing file has nothing to merge into")
        with contextlib.closing(Chain(wish.ancestors[0], wish.ancestors[1:])) as below:
            return Commit(request, io, wish, chain, below).run()
