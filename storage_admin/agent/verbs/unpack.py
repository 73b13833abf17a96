"""Make an image of a packed one: an archive, a compressed file, or one in parts."""

from __future__ import annotations

import re
from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request, host_errors
from storage_admin.agent.rewrite.conversion import Target
from storage_admin.agent.rewrite.creation import Wish
from storage_admin.agent.rewrite.packed import Source
from storage_admin.agent.rewrite.unpacking import Unpacking

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Unpack an image under a name that no file has.

    Args:
        request: its ``args`` are ``source`` (``pool_path_b64``, ``path_b64`` of the first file), ``target`` as for
            :mod:`convert`, ``member`` (of an archive: the disk's name), ``sha256`` (that the source has to have),
            ``bandwidth_bytes_sec``, ``idle_io``, ``reserve`` and ``others_bytes`` as for any rewrite.
        io: the controller.

    Returns:
        As of :mod:`create`, with ``packed`` (how), ``packed_bytes``, and ``content_sha256`` of what came out, null for
        a disk of an archive, which qemu writes.

    Raises:
        RefusedError, HostError, StoppedError: nothing is left of the new file; what is packed is only read.
    """
    args = Arguments(
        request.args,
        (Wish.ARGS - {"virtual_size", "base", "chain", "secrets", "iter_time"}) | {"source", "member", "sha256"},
    )
    target = Target.parse(args.take("target", dict))
    place = Arguments(args.take("source", dict), frozenset({"pool_path_b64", "path_b64"}))
    digest = args.maybe("sha256", str) or ""
    if target.replaces or (digest and not _SHA256.fullmatch(digest)):
        raise RefusedError(INVALID, "a new image takes no other one's place; sha256 has 64 hexadecimal digits")
    wish = Wish.parse(args)
    with host_errors():
        source = Source.open(place.path("pool_path_b64"), place.path("path_b64"))
        try:
            work = Unpacking(request, io, target, wish, None, source=source, sha256=digest)
            work.member = args.maybe("member", str) or ""
            return work.run()
        finally:
            source.close()
