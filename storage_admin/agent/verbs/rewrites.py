"""Verbs that are a recipe of :mod:`storage_admin.agent.rewrite` and its arguments, or little more.

Where they raise RefusedError, HostError or StoppedError, the image is as it was, and nothing is left of a new file.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from storage_admin.agent.appliance.relinking import Unproven
from storage_admin.agent.appliance.sparsify import Sparsify
from storage_admin.agent.formats.ova import Appliance
from storage_admin.agent.host import space
from storage_admin.agent.host.devices import Device
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request, unb64
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.keys import Keys, iter_time
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite.base import COMMON, Recipe, Rewrite, Wish, opened
from storage_admin.agent.rewrite.chain import Chain, Planned
from storage_admin.agent.rewrite.committing import Commit
from storage_admin.agent.rewrite.conversion import Convert, Target, refuse_place
from storage_admin.agent.rewrite.device_write import DeviceWrite
from storage_admin.agent.rewrite.exporting import PACKINGS, Export, Exporting
from storage_admin.agent.rewrite.file_copies import Grow, RemoveBitmaps, Repair
from storage_admin.agent.rewrite.key_slots import KeySlots
from storage_admin.agent.rewrite.packed import OVA
from storage_admin.agent.rewrite.rebasing import Onto, Rebase, Relink, Standalone
from storage_admin.agent.rewrite.shrinking import Shrink
from storage_admin.agent.swap.new_volumes import watch_below

#: Bytes of the smallest part of an export.
LEAST_PART = 1 << 20
_SECTOR = 512


def _by(recipe: Recipe, request: Request, io: AgentIO, args: Arguments) -> dict[str, Any]:
    wish = Wish.parse(request.args, args)
    with opened(wish) as chain:
        return Rewrite(request, io, wish, recipe, chain).run()


def convert(request: Request, io: AgentIO) -> dict[str, Any]:
    """Write an image in another format beside it, or into another pool of this host.

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``target``: ``pool_path_b64``, ``path_b64``, ``format``,
            ``options`` (names and words of qemu-img's creation options), ``replaces``.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`; the identity is the new file's, and ``format`` its format.
    """
    args = Arguments(request.args, COMMON | {"target"})
    return _by(Convert(Target.parse(args.take("target", dict))), request, io, args)


def sparsify(request: Request, io: AgentIO) -> dict[str, Any]:
    """Give the space of deleted data back: an appliance trims the filesystems of a copy.

    Args:
        request: its ``args`` are :data:`base.COMMON`.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``trimmed`` and ``left`` (filesystems, each ``device`` and ``type``) and ``files``:
        how many were compared.

    Raises:
        RefusedError: also ``unclean_inside``, ``nothing_to_free``, ``tool_missing``.
    """
    return _by(Sparsify(), request, io, Arguments(request.args, COMMON))


def bitmaps(request: Request, io: AgentIO) -> dict[str, Any]:
    """Remove some of an image's persistent dirty bitmaps; what a guest reads stays the same.

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``names``: of the bitmaps.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``removed``: the names.
    """
    args = Arguments(request.args, COMMON | {"names"})
    names = args.take("names", list)
    if not all(isinstance(name, str) and name for name in names):
        raise RefusedError(INVALID, "names are those of bitmaps")
    return _by(RemoveBitmaps(list(dict.fromkeys(names))), request, io, args)


def keys(request: Request, io: AgentIO) -> dict[str, Any]:
    """Add a passphrase to an encrypted image, or empty one of its key slots; what a guest reads stays the same.

    Args:
        request: its ``args`` are :data:`base.COMMON`; ``secrets`` with ``passphrase``, and ``new_passphrase`` where one
            is added; ``slot``, which is to be emptied otherwise; ``must_open``: passphrases that have to open the image
            afterwards; ``iter_time``: milliseconds that trying the new one is to take.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``key_slots``: those that hold a key.

    Raises:
        RefusedError: also ``wrong_passphrase``.
    """
    args = Arguments(request.args, COMMON | {"secrets", "slot", "must_open", "iter_time"})
    slot, given, others = args.maybe("slot", int), args.take("secrets", dict), args.get("must_open", list, [])
    if set(given) != {"passphrase", *(["new_passphrase"] if slot is None else [])}:
        raise RefusedError(INVALID, "a passphrase is needed, and a new one or the slot that is to be emptied")
    if not all(isinstance(one, str) for one in [*given.values(), *others]):
        raise RefusedError(INVALID, "a passphrase is text")
    return _by(KeySlots(Keys.of(**given), slot, tuple(others), iter_time(args)), request, io, args)


def check(request: Request, io: AgentIO) -> dict[str, Any]:
    """Look through an image's metadata (``qemu-img check``), and repair it on a copy where that is asked for (``-r``).

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``repair``: ``none``, ``leaks`` or ``all``.
        io: the controller.

    Returns:
        ``found``: ``corruptions``, ``leaks`` and ``errors``; after a repair also all that :meth:`Rewrite.run` tells.
    """
    args = Arguments(request.args, COMMON | {"repair"})
    level = args.choice("repair", frozenset({"none", "leaks", "all"}), "none")
    if level != "none":
        return _by(Repair(level), request, io, args)
    wish = Wish.parse(request.args, args)
    with opened(wish) as chain:
        io.progress("checking", 0, None, "checking the tables")
        if chain.image.planned.format not in img.CHECKED:
            raise RefusedError(
                "unsupported_subformat",
                f"{chain.image.shown} is a {chain.image.planned.format} image, which has no tables to check",
            )
        chain.refuse_in_use()
        effort = img.Effort(wish.idle_io, chain.refuse_changes)
        return {"found": vars(img.check(io, chain.node(alone=True), effort)), "swapped": False}


def export(request: Request, io: AgentIO) -> dict[str, Any]:
    """Pack an image into a file for elsewhere: by gzip or zstd, in parts where wanted, or as an OVA archive.

    Args:
        request: its ``args`` are :data:`base.COMMON`; ``target``: ``pool_path_b64`` and ``path_b64``, of the first part
            where there are several, which ends in ``.001``; ``packing`` (``gzip``, ``zstd``, ``ova``); ``part_bytes``
            or null; ``guest``: ``name``, ``cpus``, ``memory_bytes`` for an OVA.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, and as :attr:`Exporting.result`; the identity is the new file's.
    """
    args = Arguments(request.args, COMMON | {"target", "packing", "part_bytes", "guest"})
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
        args.take("virtual_size", int),
    )  # fmt: skip
    return _by(Exporting(pool_path, path, Export(packing, part, appliance)), request, io, args)


def flatten(request: Request, io: AgentIO) -> dict[str, Any]:
    """Make an overlay stand on a lower image, on none, or on one that was not in its chain: it reads the same.

    Args:
        request: its ``args`` are :data:`base.COMMON`; ``method`` (``rebase`` keeps the image's own clusters as they
            are, ``convert`` writes all anew and always makes it stand alone); for ``rebase`` either ``keep`` (number of
            the link that becomes the immediate base, counted from the image's base as 1) or ``onto`` (another base and
            its own chain, from above, each described as the image is), or neither for none.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`.
    """
    args = Arguments(request.args, COMMON | {"method", "keep", "onto"})
    method, keep = args.choice("method", frozenset({"rebase", "convert"}), "rebase"), args.maybe("keep", int)
    onto = [Planned.parse(link) for link in args.get("onto", list, [])]
    if method == "convert" and (keep is not None or onto):
        raise RefusedError(INVALID, "convert leaves no backing file; only rebase can keep one")
    if keep is not None and onto:
        raise RefusedError(INVALID, "keep and onto exclude each other")
    if not onto:
        return _by(Rebase(keep) if method == "rebase" else Standalone(), request, io, args)
    wish = Wish.parse(request.args, args)
    with opened(wish) as chain, contextlib.closing(Chain(onto[0], onto[1:])) as base:
        return Rewrite(request, io, wish, Onto(base), chain).run()


def relink(request: Request, io: AgentIO) -> dict[str, Any]:
    """Have an image whose base is lost name another one, which whoever asks takes for the lost one.

    Args:
        request: its ``args`` are :data:`base.COMMON` without a chain, and ``onto``: the other base and its own chain,
            from above, each described as the image is; ``force``: also where nothing of the two is alike; or
            ``prove``: only if data and filesystems, which are checked in an appliance, show that it is the lost one.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``compared`` (blocks of the image) and ``alike`` (that the base has as well); of a
        proof ``filesystems`` (each ``device``, ``type``, ``state``: ``sound``, ``damaged`` or ``unknown``, ``why``).
    """
    args = Arguments(request.args, COMMON | {"onto", "force", "prove"})
    onto = [Planned.parse(link) for link in args.take("onto", list)]
    wish = Wish.parse(request.args, args)
    if not onto or wish.ancestors:
        raise RefusedError(INVALID, "onto names the backing file, and the image's own chain is empty")
    with opened(wish, base_lost=True) as chain, contextlib.closing(Chain(onto[0], onto[1:])) as base:
        prove = args.get("prove", bool, False)
        recipe = Unproven(base) if prove else Relink(base, args.get("force", bool, False))
        return Rewrite(request, io, wish, recipe, chain).run()


def grow(request: Request, io: AgentIO) -> dict[str, Any]:
    """Enlarge an image: a qcow2 by protocol P, a raw one where it stands, as nothing of it is written anew.

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``size``: the new virtual size in bytes.
        io: the controller.

    Returns:
        As :meth:`Rewrite.run`, with ``virtual_size``; of a raw image nothing is swapped.
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
        # By its last byte, which is kept if there is one by now: to set its length would cut off what somebody has just
        # appended.
        os.posix_fallocate(file.fileno(), size - 1, 1)
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
    """
    args = Arguments(request.args, COMMON | {"size"})
    size = args.size("size")
    if size is not None and size % _SECTOR:
        raise RefusedError(INVALID, f"size is a multiple of {_SECTOR} bytes")
    return _by(Shrink(size), request, io, args)


def to_device(request: Request, io: AgentIO) -> dict[str, Any]:
    """Write what a guest reads of an image onto a device that nobody uses, and compare both.

    Args:
        request: its ``args`` are :data:`base.COMMON`; ``device_b64`` (a path below ``/dev``); ``overwrite``: also where
            the device holds something; ``owners``: pairs of a path (base64) and whose it is: devices that are not
            written to; ``age``: seconds since somebody named the device.
        io: the controller. Once it has said ``go``, what was on the device is lost.

    Returns:
        ``virtual_size`` and ``device_bytes``, in bytes, and ``seconds``.

    Raises:
        RefusedError: ``device_in_use``, ``target_exists``, ``not_enough_space``, ``immutable``; as any rewrite.
        HostError, StoppedError: the image is as it was; after ``go`` the device may hold a part of it.
    """
    args = Arguments(request.args, COMMON | {"device_b64", "overwrite", "owners", "age"})
    wish, overwrite = Wish.parse(request.args, args), args.get("overwrite", bool, False)
    try:
        owners = [(unb64(path), str(whose)) for path, whose in args.get("owners", list, [])]
    except (TypeError, ValueError, AttributeError) as error:
        raise RefusedError(INVALID, "owners are pairs of a path and whose it is") from error
    with opened(wish) as chain, contextlib.closing(Device.open(args.path("device_b64"), to_write=True)) as device:
        watch, age = watch_below(device.number, wish.reserve, io), args.get("age", float, 0.0)
        return DeviceWrite(request, io, wish, chain, device, overwrite, owners, age, watch).run()


def commit(request: Request, io: AgentIO) -> dict[str, Any]:
    """Merge an overlay that nobody uses into its base, where that stands; then ask whether guests may be led to it.

    Args:
        request: its ``args`` are :data:`base.COMMON`; in ``pools`` is looked for what else needs the base.
        io: the controller. Until it says ``go``, or ends, nobody can begin to write through the overlay.

    Returns:
        Allocated bytes of the base before and after, and what that freed (less than nothing); ``virtual_size``.

    Raises:
        RefusedError, HostError, StoppedError: the overlay reads as before. Where the base has been written to, it reads
            as the overlay does, or a journal is left that a recovery finishes.
    """
    wish = Wish.parse(request.args, Arguments(request.args, COMMON))
    with opened(wish) as chain:
        if not wish.ancestors:
            raise RefusedError(INVALID, "an image without a backing file has nothing to merge into")
        with contextlib.closing(Chain(wish.ancestors[0], wish.ancestors[1:])) as below:
            return Commit(request, io, wish, chain, below).run()
