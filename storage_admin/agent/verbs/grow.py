"""Make an image larger, or smaller."""

from __future__ import annotations

import os
import time
from typing import Any

from storage_admin.agent.host import space
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite.base import COMMON, Rewrite, Wish, opened
from storage_admin.agent.rewrite.chain import Chain
from storage_admin.agent.rewrite.file_copies import Grow
from storage_admin.agent.rewrite.shrinking import Shrink

_SECTOR = 512


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Enlarge an image: a qcow2 by protocol P, a raw one where it stands, as nothing of it is written anew.

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``size``: the new virtual size in bytes.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``virtual_size``; of a raw image nothing is swapped.

    Raises:
        RefusedError, HostError, StoppedError: the image is as it was.
    """
    args = Arguments(request.args, COMMON | {"size"})
    size = args.take("size", int)
    if not 0 < size < 1 << 63 or size % _SECTOR:
        raise RefusedError(INVALID, f"size is a positive multiple of {_SECTOR} bytes")
    wish = Wish.parse(request.args, args)
    with opened(wish) as chain:
        if chain.image.facts.format != "raw":
            return Rewrite(request, io, wish, Grow(size), chain).run()
        return _lengthen(io, wish, chain, size)


def _lengthen(io: AgentIO, wish: Wish, chain: Chain, size: int) -> dict[str, Any]:
    """A longer file: one step of the filesystem's, before which and after which the image is whole."""
    started, image = time.monotonic(), chain.image
    io.progress("checking", 0, None, "checking the image and its users")
    links.refuse_unsafe(chain, children_known=wish.children_known, carried={"hard_linked"})
    if size <= image.stamp.file_size:
        raise RefusedError(INVALID, f"{image.shown} has {image.stamp.file_size} bytes already, and only grows")
    before = space.allocated(image.fd)
    chain.refuse_in_use()
    chain.refuse_stale()
    with open(f"/proc/self/fd/{image.fd}", "r+b", buffering=0) as file:
        os.ftruncate(file.fileno(), size)
        os.fsync(file.fileno())
    after = space.allocated(image.fd)
    return {
        "method": "in_place",
        "before_bytes": before,
        "after_bytes": after,
        "held_bytes": 0,
        "made_bytes": 0,
        "freed_bytes": before - after,
        "dev": image.stamp.dev,
        "inode": image.stamp.inode,
        "swapped": False,
        "seconds": round(time.monotonic() - started, 3),
        "undo": None,
        "virtual_size": size,
    }


def shrink(request: Request, io: AgentIO) -> dict[str, Any]:
    """Take away the end of an image that its partition table and filesystems prove to be unused, by protocol P.

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``size``: the new virtual size in bytes, or null for the least
            that is proven.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``virtual_size`` and ``needed_bytes``.

    Raises:
        RefusedError, HostError, StoppedError: the image is as it was.
    """
    args = Arguments(request.args, COMMON | {"size"})
    size = args.size("size")
    if size is not None and size % _SECTOR:
        raise RefusedError(INVALID, f"size is a multiple of {_SECTOR} bytes")
    wish = Wish.parse(request.args, args)
    with opened(wish) as chain:
        return Rewrite(request, io, wish, Shrink(size), chain).run()
