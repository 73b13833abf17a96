"""Win back the space that an image does not need."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.arguments import Arguments
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Request
from storage_admin.agent.rewrite.chain import Chain
from storage_admin.agent.rewrite.wish import COMMON, Wish, opened
from storage_admin.agent.verbs import in_place

METHODS = frozenset({"compress", "copy", "in_place"})
_COMPRESSIONS = frozenset({"auto", "zlib", "zstd"})


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Make an image smaller.

    Args:
        request: its ``args`` are :data:`wish.COMMON`, ``method`` and ``compression`` (for ``compress``).
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
    with opened(wish) as chain:
        if method == "in_place":
            known = wish.children_known
            dug = in_place.reclaim(io, chain, children_known=known, bandwidth=wish.bandwidth, idle_io=wish.idle_io)
            return {"method": method, **dug}
        return _copied(request, io, wish, chain, compression if method == "compress" else None)


def _copied(request: Request, io: AgentIO, wish: Wish, chain: Chain, compression: str | None) -> dict[str, Any]:
    # All that a swap needs takes as long to load as to dig the holes of a small image, which needs none of it.
    from storage_admin.agent.rewrite.base import Rewrite  # noqa: PLC0415
    from storage_admin.agent.rewrite.copying import Compress, Copy  # noqa: PLC0415

    return Rewrite(request, io, wish, Copy() if compression is None else Compress(compression), chain).run()
