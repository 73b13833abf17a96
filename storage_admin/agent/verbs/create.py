"""Make a new image: an empty one, or an overlay on an image of this host."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request, host_errors
from storage_admin.agent.rewrite.chain import Chain, Planned
from storage_admin.agent.rewrite.conversion import Target
from storage_admin.agent.rewrite.creation import LOCKABLE, Creation, Wish


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Create an image under a name that no file has.

    Args:
        request: its ``args`` are ``target`` as for :mod:`convert`; ``virtual_size`` in bytes; ``base``, a link of a
            chain, and ``chain``, its ancestors, for an overlay; ``secrets`` with a ``passphrase`` for an encrypted
            image; ``bandwidth_bytes_sec``, ``idle_io``, ``reserve`` and
            ``others_bytes`` as for any rewrite.
        io: the controller.

    Returns:
        ``virtual_size``, ``after_bytes`` (allocated), ``dev``, ``inode``, ``format``, ``name_b64``, ``seconds``.

    Raises:
        RefusedError, HostError, StoppedError: nothing is left of the new file.
    """
    args = Arguments(request.args, Wish.ARGS)
    target, wish = Target.parse(args.take("target", dict)), Wish.parse(args)
    base = args.get("base", dict, {})
    ancestors = [Planned.parse(link) for link in args.get("chain", list, [])]
    if target.replaces or (ancestors and not base):
        raise RefusedError(INVALID, "a new image takes no other one's place; a chain needs its base")
    if wish.keys.by_id and (target.format not in LOCKABLE or (target.options and target.format == "raw")):
        raise RefusedError(INVALID, "only qcow2 and plain raw images are encrypted")
    if not wish.virtual_size:
        raise RefusedError(INVALID, "virtual_size is missing")
    with host_errors():
        chain = Chain(Planned.parse(base), ancestors) if base else None
        try:
            return Creation(request, io, target, wish, chain).run()
        finally:
            if chain is not None:
                chain.close()
