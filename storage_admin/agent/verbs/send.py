"""Send the bytes of an image's file to the controller."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import DATA, INVALID, Arguments, HostError, RefusedError, Request, b64
from storage_admin.agent.qemu.node import seldom
from storage_admin.agent.rewrite.base import COMMON, Wish, opened

_PIECE = 1 << 20


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Send a part of the file of an image that nobody uses, as it is, without what it stands on.

    Args:
        request: its ``args`` are :data:`base.COMMON` without a chain, ``offset`` and ``length`` in bytes.
        io: the controller: it gets ``data`` events, each with ``b64``, or with a number of ``zeros``.

    Returns:
        ``bytes`` that were sent, and their ``sha256``.

    Raises:
        RefusedError: ``image_in_use`` or ``stale_plan``, also in the middle: what was sent is worth nothing then.
        HostError, StoppedError: the same.
    """
    args = Arguments(request.args, COMMON | {"offset", "length"})
    at, length = args.get("offset", int, 0), args.take("length", int)
    wish, digest = Wish.parse(request.args, args), hashlib.sha256()
    with opened(wish, base_lost=True) as chain:
        image = chain.image
        end = at + length
        if at < 0 or length < 0 or end > image.stamp.file_size:
            raise RefusedError(INVALID, f"{image.shown} has {image.stamp.file_size} bytes")
        chain.refuse_in_use()
        watch = seldom(chain.refuse_changes, since=time.monotonic())
        while at < end:
            piece = os.pread(image.fd, min(_PIECE, end - at), at)
            if not piece:
                raise HostError(f"{image.shown} became shorter while it was read")
            digest.update(piece)
            at += len(piece)
            io.emit(DATA, **({"b64": b64(piece)} if piece.strip(b"\0") else {"zeros": len(piece)}))
            io.check()
            watch()
        chain.refuse_stale()
    return {"bytes": length, "sha256": digest.hexdigest()}
