"""Remove persistent dirty bitmaps from an image."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request
from storage_admin.agent.rewrite.base import COMMON, Rewrite, Wish, opened
from storage_admin.agent.rewrite.file_copies import RemoveBitmaps


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Remove some of an image's bitmaps by protocol P; what a guest reads stays the same.

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``names``: of the bitmaps.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``removed``: the names.

    Raises:
        RefusedError, HostError, StoppedError: the image is as it was.
    """
    args = Arguments(request.args, COMMON | {"names"})
    names = args.take("names", list)
    if not all(isinstance(name, str) and name for name in names):
        raise RefusedError(INVALID, "names are those of bitmaps")
    wish = Wish.parse(request.args, args)
    with opened(wish) as chain:
        return Rewrite(request, io, wish, RemoveBitmaps(list(dict.fromkeys(names))), chain).run()
