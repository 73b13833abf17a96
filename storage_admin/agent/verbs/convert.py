"""Write an image in another format beside it, or into another pool of this host."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Arguments, Request
from storage_admin.agent.rewrite.base import COMMON, Rewrite, Wish, opened
from storage_admin.agent.rewrite.conversion import Convert, Target


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Convert an image into a new file.

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``target``: ``pool_path_b64``, ``path_b64``, ``format``,
            ``options`` (names and words of qemu-img's creation options), ``replaces``.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`; the identity is the new file's, and ``format`` its format.

    Raises:
        RefusedError, HostError, StoppedError: nothing is left of the new file.
    """
    args = Arguments(request.args, COMMON | {"target"})
    wish, target = Wish.parse(request.args, args), Target.parse(args.take("target", dict))
    with opened(wish) as chain:
        return Rewrite(request, io, wish, Convert(target), chain).run()
