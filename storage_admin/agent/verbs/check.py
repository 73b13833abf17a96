"""Look through an image's metadata, and repair it on a copy where that is asked for."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Arguments, RefusedError, Request
from storage_admin.agent.qemu import img
from storage_admin.agent.rewrite.base import COMMON, Rewrite, Wish, opened
from storage_admin.agent.rewrite.file_copies import Repair

LEVELS = frozenset({"none", "leaks", "all"})


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """``qemu-img check``, and ``-r`` by protocol P.

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``repair``: ``none``, ``leaks`` or ``all``.
        io: the controller.

    Returns:
        ``found``: ``corruptions``, ``leaks`` and ``errors``; after a repair also all that :meth:`Rewrite.run` tells.

    Raises:
        RefusedError, HostError, StoppedError: the image is as it was.
    """
    args = Arguments(request.args, COMMON | {"repair"})
    level = args.choice("repair", LEVELS, "none")
    wish = Wish.parse(request.args, args)
    with opened(wish) as chain:
        if level != "none":
            return Rewrite(request, io, wish, Repair(level), chain).run()
        io.progress("checking", 0, None, "checking the tables")
        if chain.image.planned.format not in img.CHECKED:
            raise RefusedError(
                "unsupported_subformat",
                f"{chain.image.shown} is a {chain.image.planned.format} image, which has no tables to check",
            )
        chain.refuse_in_use()
        effort = img.Effort(wish.idle_io, chain.refuse_changes)
        return {"found": vars(img.check(io, chain.node(alone=True), effort)), "swapped": False}
