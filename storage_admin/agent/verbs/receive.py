"""Take the bytes of an upload from the controller; give the whole file its name, or remove what came of it."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

from storage_admin.agent import formats
from storage_admin.agent.formats.facts import UnreadableError
from storage_admin.agent.host import cgroups, space
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, KEPT, Arguments, RefusedError, Request, b64, display, host_errors
from storage_admin.agent.qemu.node import WATCH_INTERVAL
from storage_admin.agent.rewrite.incoming import Incoming, write_sparse
from storage_admin.agent.swap import exchange
from storage_admin.agent.swap.journal import Stamp
from storage_admin.agent.swap.outcome import same_content, stamp_now, unlink

#: So many bytes are on the disk before the controller is told of them.
_SYNCED = 32 << 20
_PIECE = 1 << 20


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Write the next bytes of an upload; whatever came behind ``offset`` before is given up.

    Args:
        request: its ``args`` are ``target`` (``pool_path_b64`` and ``path_b64`` of the file that it becomes), ``size``
            of that file, ``offset`` of the first byte that comes, ``sha256`` of all that comes now (else no digest is
            compared), ``reserve`` and ``others_bytes`` as for any rewrite.
        io: the controller, which is asked for the bytes; ``kept`` events tell it how many are on the disk.

    Returns:
        ``offset``: how many are, in the end.

    Raises:
        RefusedError: ``wrong_digest``: what came now counts for nothing; ``stale_plan``, ``busy``,
            ``not_enough_space``, ``invalid``.
        HostError, StoppedError: what the controller was told of stays.
    """
    known = frozenset({"target", "size", "offset", "sha256", "reserve", "others_bytes"})
    args = Arguments(request.args, known)
    size, at = args.take("size", int), args.take("offset", int)
    expected = args.maybe("sha256", str)
    reserve, others = space.Reserve.parse(args), space.Others.parse(args)
    if not 0 <= at <= size:
        raise RefusedError(INVALID, f"the file has {size} bytes")
    with host_errors(), Incoming(args.take("target", dict), request, io, create=at == 0) as part:
        if os.fstat(part.fd).st_size < at:
            raise RefusedError("stale_plan", "a part of what was uploaded so far is gone; upload the file again")
        with space.SpaceClaim(request.job, part.folder) as claim:
            claim.take(size - at, reserve, others)
            digest, kept, looked = hashlib.sha256(), at, time.monotonic()
            # By that the controller says that this request is still the newest: only then something is cut off.
            piece = io.take_data()
            os.ftruncate(part.fd, at)
            while piece:
                if at + len(piece) > size:
                    raise RefusedError(INVALID, f"the file has {size} bytes, and more came")
                digest.update(piece)
                write_sparse(part.fd, piece, at)
                at += len(piece)
                if time.monotonic() - looked > WATCH_INTERVAL:
                    looked = time.monotonic()
                    space.watch(part.folder, reserve)
                    claim.left(size - at)
                if expected is None and at - kept >= _SYNCED and at < size:
                    part.keep(at)
                    kept = at
                    io.emit(KEPT, offset=at)
                piece = io.take_data()
            if expected is not None and digest.hexdigest() != expected.lower():
                raise RefusedError("wrong_digest", f"the SHA-256 of what came is {digest.hexdigest()}; send it again")
            part.keep(at)
    return {"offset": at}


def finish(request: Request, io: AgentIO) -> dict[str, Any]:
    """Read an upload that is whole, compare it with its digest, and give it its name, which no file has.

    Args:
        request: its ``args`` are ``target`` and ``size`` as of :func:`run`, ``sha256`` of the whole file or null,
            ``idle_io``, ``bandwidth_bytes_sec``, and ``inode``, which an earlier agent told of with ``ready``: that one
            may have given the file its name, and nobody has heard of it.
        io: the controller, which has to say ``go``.

    Returns:
        ``sha256``, ``file_size``, ``after_bytes`` (allocated), ``format`` (what the file looks like), ``name_b64``,
        ``inode``, ``seconds``.

    Raises:
        RefusedError: ``wrong_digest``, ``upload_incomplete``, ``target_exists``, ``stale_plan``, ``busy``;
            ``unsupported_subformat``: its header names another file.
        HostError, StoppedError: nothing has that name.
    """
    args = Arguments(request.args, frozenset({"target", "size", "sha256", "inode", "idle_io", "bandwidth_bytes_sec"}))
    size, expected, started = args.take("size", int), args.maybe("sha256", str), time.monotonic()
    idle, bandwidth = args.get("idle_io", bool, False), args.size("bandwidth_bytes_sec")
    target, inode = args.take("target", dict), args.maybe("inode", int)
    with host_errors(), Incoming(target, request, io, create=False, named=inode) as part:
        stamp = Stamp.of(os.fstat(part.fd))
        if stamp.file_size != size:
            raise RefusedError("upload_incomplete", f"{stamp.file_size} of {size} bytes are there; send the rest")
        with cgroups.limited(io, part.folder, idle=idle, bandwidth=bandwidth):
            digest = _digest(part.fd, size, io)
        if expected is not None and digest != expected.lower():
            raise RefusedError("wrong_digest", f"the SHA-256 of what was uploaded is {digest}; upload the file again")
        looks_like = _refuse_names(part.fd, size)
        io.progress("swapping", 0, None, "waiting for the go-ahead")
        io.wait_for_go(request.generation, before_bytes=0, made_bytes=stamp.allocated_size, made_inode=stamp.inode)
        part.check()
        if not same_content(stamp_now(part.fd), stamp):
            raise RefusedError("stale_plan", "somebody changed what was uploaded; upload the file again")
        try:
            exchange.link(part.fd, part.folder, part.name)
        except FileExistsError:
            taken = f"{display(part.name)} already exists; choose another name"
            raise RefusedError("target_exists", taken) from None
        unlink(part.folder, part.part)
        made = Stamp.of(os.fstat(part.fd))
        name = part.name
    return {
        "sha256": digest, "file_size": size, "after_bytes": made.allocated_size, "format": looks_like,
        "name_b64": b64(name), "inode": made.inode, "seconds": round(time.monotonic() - started, 3),
    }  # fmt: skip


def forget(request: Request, io: AgentIO) -> dict[str, Any]:
    """Remove what came of an upload; nothing where nothing did.

    Args:
        request: its ``args`` are ``target`` as of :func:`run`.
        io: the controller.

    Returns:
        ``removed``: whether there was something.

    Raises:
        RefusedError: ``busy``; ``stale_plan`` where something else has its name, which stays.
    """
    args = Arguments(request.args, frozenset({"target"}))
    with host_errors():
        try:
            with Incoming(args.take("target", dict), request, io, create=False) as part:
                unlink(part.folder, part.part)
        except (FileNotFoundError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.code != "stale_plan":
                raise
            return {"removed": False}
    return {"removed": True}


def _digest(fd: int, size: int, io: AgentIO) -> str:
    digest, at = hashlib.sha256(), 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what is on the disk counts, not what is still in memory
    while piece := os.pread(fd, _PIECE, at):
        digest.update(piece)
        at += len(piece)
        io.check()
        io.progress("checking", at, size)
    return digest.hexdigest()


def _refuse_names(fd: int, size: int) -> str:
    """What the file looks like. An image that names other files would have a guest read them."""
    reader = formats.Reader(fd, size)
    looks_like = formats.probe(reader)
    try:
        made = formats.read_as(reader, looks_like)
    except UnreadableError:
        return looks_like  # a scan says what is wrong with it
    if made.backing_file is not None or made.data_file is not None or made.extents:
        raise RefusedError(
            "unsupported_subformat",
            "the header of the image names other files; convert it to an image of its own first (qemu-img convert)",
        )
    return looks_like
