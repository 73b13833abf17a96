"""Make a new image: an empty one, an overlay on an image of this host, or one of a packed image or a block device."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from storage_admin.agent.host.devices import Device
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request, host_errors
from storage_admin.agent.rewrite.chain import Chain, Planned
from storage_admin.agent.rewrite.conversion import Target
from storage_admin.agent.rewrite.creation import LOCKABLE, Creation, Wish
from storage_admin.agent.rewrite.device_copy import DeviceCopy
from storage_admin.agent.rewrite.packed import Source
from storage_admin.agent.rewrite.unpacking import Unpacking

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Create an image under a name that no file has.

    Args:
        request: its ``args`` are ``target`` as for :func:`rewrites.convert`; ``virtual_size`` in bytes; ``base``, a
            link of a chain, and ``chain``, its ancestors, for an overlay; ``secrets`` with a ``passphrase`` for an
            encrypted image; ``bandwidth_bytes_sec``, ``idle_io``, ``reserve`` and ``others_bytes`` as for any rewrite.
        io: the controller.

    Returns:
        ``virtual_size``, ``after_bytes`` (allocated), ``dev``, ``inode``, ``format``, ``name_b64``, ``seconds``.

    Raises:
        RefusedError, HostError, StoppedError: nothing is left of the new file.
    """
    args = Arguments(request.args, Wish.ARGS)
    target, wish = _target(args), Wish.parse(args)
    base = args.get("base", dict, {})
    ancestors = [Planned.parse(link) for link in args.get("chain", list, [])]
    if ancestors and not base:
        raise RefusedError(INVALID, "a chain needs its base")
    if wish.keys.by_id and (target.format not in LOCKABLE or (target.options and target.format == "raw")):
        raise RefusedError(INVALID, "only qcow2 and plain raw images are encrypted")
    if not wish.virtual_size:
        raise RefusedError(INVALID, "virtual_size is missing")
    with host_errors(), contextlib.ExitStack() as stack:
        chain = stack.enter_context(contextlib.closing(Chain(Planned.parse(base), ancestors))) if base else None
        return Creation(request, io, target, wish, chain).run()


def from_device(request: Request, io: AgentIO) -> dict[str, Any]:
    """Read a device that nobody uses, as a logical volume, into an image of a name that no file has.

    Args:
        request: its ``args`` are ``device_b64`` (a path below ``/dev``), ``target`` as for :func:`rewrites.convert`,
            ``bandwidth_bytes_sec``, ``idle_io``, ``reserve`` and ``others_bytes`` as for any rewrite.
        io: the controller.

    Returns:
        As of :func:`run`, with ``device_bytes``.

    Raises:
        RefusedError, HostError, StoppedError: nothing is left of the new file; the device is only read.
    """
    args = Arguments(request.args, Wish.OF_A_SOURCE | {"device_b64"})
    target, wish = _target(args), Wish.parse(args)
    with host_errors(), contextlib.closing(Device.open(args.path("device_b64"))) as device:
        return DeviceCopy(request, io, target, wish, None, device=device).run()


def unpack(request: Request, io: AgentIO) -> dict[str, Any]:
    """Unpack an image, of an archive, a compressed file, or one in parts, under a name that no file has.

    Args:
        request: its ``args`` are ``source`` (``pool_path_b64``, ``path_b64`` of the first file), ``target`` as for
            :func:`rewrites.convert`, ``member`` (of an archive: the disk's name), ``sha256`` (that the source has to
            have), ``bandwidth_bytes_sec``, ``idle_io``, ``reserve`` and ``others_bytes`` as for any rewrite.
        io: the controller.

    Returns:
        As of :func:`run`, with ``packed`` (how), ``packed_bytes``, and ``content_sha256`` of what came out, null for
        a disk of an archive, which qemu writes.

    Raises:
        RefusedError, HostError, StoppedError: nothing is left of the new file; what is packed is only read.
    """
    args = Arguments(request.args, Wish.OF_A_SOURCE | {"source", "member", "sha256"})
    target, wish = _target(args), Wish.parse(args)
    place = Arguments(args.take("source", dict), frozenset({"pool_path_b64", "path_b64"}))
    path = (place.path("pool_path_b64"), place.path("path_b64"))
    member, digest = args.maybe("member", str) or "", args.maybe("sha256", str) or ""
    if digest and not _SHA256.fullmatch(digest):
        raise RefusedError(INVALID, "sha256 has 64 hexadecimal digits")
    with host_errors(), contextlib.closing(Source.open(*path)) as source:
        return Unpacking(request, io, target, wish, None, source=source, member=member, sha256=digest).run()


def _target(args: Arguments) -> Target:
    target = Target.parse(args.take("target", dict))
    if target.replaces:
        raise RefusedError(INVALID, "a new image takes no other one's place")
    return target
