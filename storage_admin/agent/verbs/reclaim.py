"""Win back the space that an image does not need."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.arguments import Arguments
from storage_admin.agent.copying import Compress, Copy
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Request
from storage_admin.agent.rewrite import COMMON, Recipe, Rewrite, Wish, opened
from storage_admin.agent.verbs import in_place

METHODS = frozenset({"compress", "copy", "in_place"})
_COMPRESSIONS = frozenset({"auto", "zlib", "zstd"})


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Make an image smaller.

    Args:
        request: its ``args`` are :data:`rewrite.COMMON`, ``method`` and ``compression`` (for ``compress``).
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``compression`` where it compressed.

    Raises:
        RefusedError, HostError, StoppedError: the image is as it was.
    """
    args = Arguments(request.args, COMMON | {"method", "compression"})
    method = args.choice("method", METHODS, "compress")
    compression = args.choice("compression", _COMPRESSIONS, "auto")
    wish = Wish.parse(request.args, args)
    recipe: Recipe = Compress(compression) if method == "compress" else Copy()
    with opened(wish) as chain:
        if method == "in_place":
            known = wish.children_known
            dug = in_place.reclaim(io, chain, children_known=known, bandwidth=wish.bandwidth, idle_io=wish.idle_io)
            return {"method": method, **dug}
        return Rewrite(request, io, wish, recipe, chain).run()
