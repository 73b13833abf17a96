"""Pack an image into a file for elsewhere: by gzip or zstd, in parts where wanted, or as an OVA archive."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.formats.ova import Appliance
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request
from storage_admin.agent.rewrite.base import COMMON, Rewrite, Wish, opened
from storage_admin.agent.rewrite.conversion import refuse_place
from storage_admin.agent.rewrite.exporting import PACKINGS, Export, Exporting
from storage_admin.agent.rewrite.packed import OVA

#: Bytes of the smallest part.
LEAST_PART = 1 << 20


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Pack an image into a new file.

    Args:
        request: its ``args`` are :data:`base.COMMON`; ``target``: ``pool_path_b64`` and ``path_b64``, of the first part
            where there are several, which ends in ``.001``; ``packing`` (``gzip``, ``zstd``, ``ova``); ``part_bytes``
            or null; ``guest``: ``name``, ``cpus``, ``memory_bytes`` for an OVA.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, and as :attr:`Exporting.result`; the identity is the new file's.

    Raises:
        RefusedError, HostError, StoppedError: nothing is left of the new file, or of its parts.
    """
    args = Arguments(request.args, COMMON | {"target", "packing", "part_bytes", "guest"})
    wish = Wish.parse(request.args, args)
    place = Arguments(args.take("target", dict), frozenset({"pool_path_b64", "path_b64"}))
    guest = Arguments(args.get("guest", dict, {}), frozenset({"name", "cpus", "memory_bytes"}))
    pool_path, path = place.path("pool_path_b64"), place.path("path_b64")
    name, part = refuse_place(pool_path, path), args.size("part_bytes")
    packing = args.choice("packing", PACKINGS, "zstd")
    if part is not None and (part < LEAST_PART or packing == OVA or not name.endswith(b".001")):
        raise RefusedError(
            INVALID, f"parts have at least {LEAST_PART} bytes, the first one's name ends in .001; an OVA has none"
        )
    appliance = Appliance(
        guest.get("name", str, "guest"), guest.get("cpus", int, 1), guest.get("memory_bytes", int, 1 << 30),
        wish.virtual_size,
    )  # fmt: skip
    with opened(wish) as chain:
        return Rewrite(request, io, wish, Exporting(pool_path, path, Export(packing, part, appliance)), chain).run()
