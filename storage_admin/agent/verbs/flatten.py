"""Shorten an image's chain: what its bases hold moves up into it."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request
from storage_admin.agent.rewrite.base import COMMON, Recipe, Rewrite, Wish, opened
from storage_admin.agent.rewrite.rebase_repair import Rebase, Standalone

METHODS = frozenset({"rebase", "convert"})


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Make an overlay stand on a lower image, or on none.

    Args:
        request: its ``args`` are :data:`base.COMMON`; ``method`` (``rebase`` keeps the image's own clusters as they
            are, ``convert`` writes all anew and always makes it stand alone); ``keep`` (for ``rebase``: number of the
            link that becomes the immediate base, counted from the image's base as 1; missing for none).
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`.

    Raises:
        RefusedError, HostError, StoppedError: the image is as it was.
    """
    args = Arguments(request.args, COMMON | {"method", "keep"})
    method, keep = args.choice("method", METHODS, "rebase"), args.maybe("keep", int)
    if method == "convert" and keep is not None:
        raise RefusedError(INVALID, "convert leaves no backing file; only rebase can keep one")
    wish = Wish.parse(request.args, args)
    recipe: Recipe = Rebase(keep) if method == "rebase" else Standalone()
    with opened(wish) as chain:
        return Rewrite(request, io, wish, recipe, chain).run()
