"""Look at the files on a disk: its operating systems, what is in a folder, the bytes of a file."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from storage_admin.agent.appliance import appliance
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import DATA, INVALID, Arguments, RefusedError, Request, b64
from storage_admin.agent.qemu.node import seldom
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite.base import COMMON, Wish, opened
from storage_admin.agent.verbs.inside import HARMLESS

LOOK, LIST, READ = "look", "list", "read"


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Look at the files of an image that nobody uses, in an appliance (:mod:`storage_admin.agent.appliance`).

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``do``: ``look``, or ``list`` and ``read`` with ``device``, as
            a look has named it, and ``path`` on its filesystem.
        io: the controller; it gets ``data`` events with the bytes of a file.

    Returns:
        Of a look: ``filesystems`` (``device``, ``type``, ``size``, ``free``; ``why`` these are not known) and
        ``systems`` (``root``, ``type``, ``product``, ``distribution``, ``architecture``, ``hostname``). Of a list:
        ``entries`` (``name``, ``mode``, ``size``, ``mtime``, ``uid``, ``gid``), the first 5000 of ``count``. Of a read:
        ``bytes`` and ``sha256``.
        All of it is what the disk says.

    Raises:
        RefusedError: ``tool_missing``; ``unreadable_inside``; as of every look at a chain.
        HostError, StoppedError: likewise.
    """
    args = Arguments(request.args, COMMON | {"do", "device", "path"})
    do = args.choice("do", frozenset({LOOK, LIST, READ}), LOOK)
    where: dict[str, Any] = {}
    if do != LOOK:
        where = {"device": args.take("device", str), "path": args.take("path", str)}
    if any("\0" in one for one in where.values()) or not where.get("path", "/").startswith("/"):
        raise RefusedError(
            INVALID, "the path has to begin with a slash, and neither it nor the device may contain a null byte"
        )
    wish = Wish.parse(request.args, args)
    with opened(wish) as chain:
        links.refuse_unsafe(chain, children_known=True, carried=HARMLESS)
        chain.refuse_in_use()
        watch = seldom(chain.refuse_changes, since=time.monotonic())
        with appliance.on(io, chain.node(), watch) as inside:
            if do != READ:
                told = inside.ask(do, **where)
            else:
                digest, sent = hashlib.sha256(), 0
                for piece in inside.read(**where):
                    digest.update(piece)
                    sent += len(piece)
                    io.emit(DATA, b64=b64(piece))
                    io.check()
                    watch()
                told = {"bytes": sent, "sha256": digest.hexdigest()}
        chain.refuse_stale()
    return told
