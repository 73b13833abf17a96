"""Attach an image to this host as a block device, detach it, and tell what is attached."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Any, Callable

from storage_admin.agent.host import cgroups, locking, nbd
from storage_admin.agent.host.devices import Device
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import Arguments, HostError, RefusedError, Request, display, host_errors
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite.base import COMMON, Wish, opened, refuse_needed
from storage_admin.agent.rewrite.chain import Chain
from storage_admin.agent.rewrite.copying import refuse_two_sizes
from storage_admin.agent.verbs.inside import HARMLESS

#: What an image keeps that is written to.
_KEPT = frozenset({"has_internal_snapshots"})
#: Seconds in which the kernel has to serve a device whose qemu-nbd is ready, and in which that has to close the image.
_CONNECTING, _CLOSING = 60.0, 60.0


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Attach an image that nobody uses, read-only unless it is to be written to.

    qemu-nbd goes on when the agent ends. It has the image locked as a guest has, and is kept from all other files.

    Args:
        request: its ``args`` are :data:`base.COMMON`, ``writable``, ``by`` (who wants it) and, of one that is written
            to, ``pools``: where to look for what else needs it, as for ``set_aside``.
        io: the controller.

    Returns:
        ``device``, ``path``, ``size`` in bytes and ``read_only``; ``attached`` as of :func:`attached`.

    Raises:
        RefusedError: ``nbd_missing``, ``nbd_partitions``, ``busy``; ``has_overlays``; as of every look at a chain.
        HostError, StoppedError: nothing is attached.
    """
    args = Arguments(request.args, COMMON | {"writable", "by"})
    writable, by = args.get("writable", bool, False), args.get("by", str, "")
    wish = Wish.parse(request.args, args)
    with opened(wish) as chain:
        io.progress("checking", 0, None, "checking the image and its users")
        carried = _KEPT if writable else HARMLESS
        links.refuse_unsafe(chain, children_known=wish.children_known, carried=carried)
        # qemu-nbd itself lets others write to raw images. It inherits these descriptors, and with them the locks.
        for link in chain.ancestors if writable else chain.links:
            locking.keep_writers_away(link.fd)
        chain.refuse_in_use()
        image = chain.image
        if writable:
            refuse_two_sizes(image)
            refuse_needed(image, wish.pools, io)
        nbd.load(io)
        note = {"job": request.job, "by": by, "at": time.time(), "dev": image.id.dev, "inode": image.id.inode}
        with nbd.alone():
            name = nbd.take(note)
            try:
                chain.refuse_stale()
                _connect(io, chain, name, writable=writable)
                if not writable:
                    chain.refuse_stale()
                elif not links.still_named(image):  # its header may be another one by now
                    raise RefusedError("stale_plan", f"{image.shown} was replaced by another file; scan the host")
                found = next(one for one in nbd.attached() if one["device"] == name)
                size = image.facts.virtual_size
                # Of a raw image that ends within a sector, qemu-nbd fills that up.
                if not size <= found["size"] < size + 512 or found["read_only"] is writable:
                    raise HostError(f"{name} is not as it should be: {found['size']} bytes, the image has {size}")
                if not cgroups.set_free(found["pid"]):
                    io.log("the device ends with the dashboard's service, as its process stays in that", "warning")
            except BaseException:
                _give_up(name)
                raise
        return {key: found[key] for key in ("device", "path", "size", "read_only")} | {"attached": nbd.attached()}


def _connect(io: AgentIO, chain: Chain, name: str, *, writable: bool) -> None:
    """Have qemu-nbd serve the image; raises HostError."""
    path, node = os.path.join(nbd.FOLDER, name), chain.node()
    options = node.options() | {"read-only": not writable}
    how = [f"--connect={path}", *([] if writable else ["--read-only"]), "-f", node.format]
    how += ["--cache=writeback", "--aio=threads"]
    done = tools.run(
        ["qemu-nbd", "--fork", f"--socket={path}.socket", *how, "json:" + json.dumps(options)],
        io,
        limits=None,
        files=node.files(written=writable, connected=(path, nbd.FOLDER)),
        shown=["qemu-nbd", *how, display(node.path)],
    )
    if done.exit_code:
        chain.refuse_changes()
        raise HostError(f"qemu-nbd failed, {done.words()}")
    deadline = time.monotonic() + _CONNECTING
    while not nbd.is_connected(name):  # it says that it is ready before it has even found its own socket
        if not nbd.servers(name):
            raise HostError(f"qemu-nbd ended before it served {name}")
        if time.monotonic() > deadline:
            raise HostError(f"{name} was not connected within {_CONNECTING:.0f} s")
        time.sleep(0.02)
    os.unlink(f"{path}.socket")  # it is connected there: nobody else is to be


def _give_up(name: str) -> None:
    """End what has just begun, also where it does not serve the device yet, whether the controller listens or not."""
    for pid in nbd.servers(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        _wait_until_gone(pid)
    if not nbd.is_connected(name):  # else somebody else has connected it meanwhile, which a later look puts right
        nbd.give_back(name)


def _wait_until_gone(pid: int) -> None:
    _wait_while(lambda: os.path.exists(f"/proc/{pid}"), f"qemu-nbd ({pid}) has not ended")


def _wait_while(holds: Callable[[], bool], told: str) -> None:
    """Wait for as long as qemu-nbd may need to close an image; raises HostError then, with what is told."""
    deadline = time.monotonic() + _CLOSING
    while holds():
        if time.monotonic() > deadline:
            raise HostError(f"{told} after {_CLOSING:.0f} s")
        time.sleep(0.05)


def detach(request: Request, io: AgentIO) -> dict[str, Any]:
    """Detach an image whose device nobody uses; what was written to that is in the image before.

    Args:
        request: ``args``: ``device`` (its name), ``dev`` and ``inode`` of the image.
        io: the controller.

    Returns:
        ``device``; ``read_only``, as it was; ``attached`` as of :func:`attached`.

    Raises:
        RefusedError: ``stale_plan``: the image is not attached there; ``device_in_use``; ``busy``.
        HostError: what was written could not be kept, or the image is not closed: it stays attached.
    """
    args = Arguments(request.args, frozenset({"device", "dev", "inode"}))
    wanted = (args.take("device", str), args.take("dev", int), args.take("inode", int))
    io.progress("checking", 0, None, "checking who uses the device")
    _found(*wanted)
    with host_errors(), nbd.alone():
        found = _found(*wanted)
        with contextlib.closing(Device.open(os.fsencode(found["path"]), found["pid"])) as device:
            os.fsync(device.fd)
            done = tools.run(["qemu-nbd", "--disconnect", found["path"]], io)
        if done.exit_code:
            raise HostError(f"qemu-nbd failed, {done.words()}")
        _wait_while(lambda: nbd.is_connected(found["device"]), f"{found['device']} is still connected")
        _wait_until_gone(found["pid"])
        nbd.give_back(found["device"])
    return {"device": found["device"], "read_only": found["read_only"], "attached": nbd.attached()}


def _found(device: str, dev: int, inode: int) -> dict[str, Any]:
    """What is told of an attached image; raises RefusedError(``stale_plan``) where it is not attached there."""
    for one in nbd.attached():
        if (one["device"], one["dev"], one["inode"]) == (device, dev, inode):
            return one
    raise RefusedError("stale_plan", "the image is not attached there any more; scan the host")


def attached(request: Request, io: AgentIO) -> dict[str, Any]:  # noqa: ARG001 (as every verb)
    """Tell what is attached to this host now.

    Returns:
        ``nbd``: the code of what stands against attaching here, or empty; ``attached``: :func:`nbd.attached`.
    """
    Arguments(request.args, frozenset())
    return {"nbd": nbd.against(), "attached": nbd.attached()}
