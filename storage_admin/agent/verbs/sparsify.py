"""Give the space of deleted data in an image back, by an appliance that trims its filesystems."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.appliance.sparsify import Sparsify
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Arguments, Request
from storage_admin.agent.rewrite.base import COMMON, Rewrite, Wish, opened


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Trim the filesystems of an image, on a copy that takes its place by protocol P.

    Args:
        request: its ``args`` are :data:`base.COMMON`.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``trimmed`` and ``left`` (filesystems, each ``device`` and ``type``) and ``files``:
        how many were compared.

    Raises:
        RefusedError: ``unclean_inside``, ``nothing_to_free``, ``tool_missing``; as any rewrite.
        HostError, StoppedError: the image is as it was.
    """
    wish = Wish.parse(request.args, Arguments(request.args, COMMON))
    with opened(wish) as chain:
        return Rewrite(request, io, wish, Sparsify(), chain).run()
