"""Copy a disk that its guests go on with elsewhere: onto a new volume of LVM or ZFS, or from one into a new file.

The copy is compared with what it was made from before it gets its name. What it was made from stays as it is: a file is
watched, and a volume has no name in that time, so that no guest can start from it (docs/volumes.md).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import Any

from storage_admin.agent.host.devices import Device
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError, Request, host_errors
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import DeviceNode
from storage_admin.agent.rewrite import base, creation
from storage_admin.agent.rewrite.base import COMMON, opened
from storage_admin.agent.rewrite.conversion import Target
from storage_admin.agent.rewrite.device_copy import DeviceCopy
from storage_admin.agent.rewrite.device_write import Source, refuse_unfit, write
from storage_admin.agent.swap.hidden import hidden
from storage_admin.agent.swap.new_volumes import MAKERS, NewVolume, made
from storage_admin.agent.swap.volumes import Maker, Place, Wanted
from storage_admin.agent.verbs.aside_volume import WHERE

#: Bytes that qemu-img measures by (a cluster of a qcow2).
_LARGEST_CLUSTER = 2 << 20
_SPEED = ("bandwidth_bytes_sec", "idle_io", "reserve", "others_bytes")


def file_to_volume(request: Request, io: AgentIO) -> dict[str, Any]:
    """Write what a guest reads of an image onto a new volume.

    Args:
        request: its ``args`` are :data:`base.COMMON` and ``volume``: ``backend``, ``group``, ``group_id``, ``name``,
            and ``pool``: a thin pool of LVM, or empty for a thick volume and one of ZFS.
        io: the controller.

    Returns:
        ``virtual_size`` (of what was copied), ``volume_size``, ``after_bytes`` (what the volume takes of its group or
        pool), ``id`` and ``seconds``; sizes in bytes.

    Raises:
        RefusedError: as any rewrite, and as of :func:`new_volumes.made`.
        HostError, StoppedError: there is no such volume, and the image is as it was; as ``interrupted``, a recovery
            sees to that.
    """
    started, args = time.monotonic(), Arguments(request.args, COMMON | {"volume"})
    wish, (target, wanted) = base.Wish.parse(request.args, args), _wanted(args)
    with opened(wish) as chain:
        size = chain.image.facts.virtual_size
        source = Source.of_image(chain, wish)
        io.progress("checking", 0, None, "checking the image and where it goes")
        refuse_unfit(chain, wish, io)
        needed = _needed(source, target.unit(wanted, io), io) if target.is_sparse(wanted) else size
        with made(target, wanted, size, needed, request, io) as new:
            told = _write(new, source, io)
        new.finish()
    return told | {"seconds": round(time.monotonic() - started, 3)}


def _needed(source: Source, unit: int, io: AgentIO) -> int:
    """The most that an image takes of where all of a unit is taken as soon as anything in it is written."""
    cluster = min(unit & -unit, _LARGEST_CLUSTER)  # each lies in one unit
    measured = img.measure(io, source.node, f"cluster_size={cluster}") * (unit // cluster)
    return min(-(-source.size // unit) * unit, measured)


def volume_to_volume(request: Request, io: AgentIO) -> dict[str, Any]:
    """Write a volume onto a new one, of the same backend or of another one.

    Args:
        request: ``args``: ``backend``, ``group``, ``group_id``, ``name`` and ``id`` of the volume, as the plan has
            them; ``volume`` as of :func:`file_to_volume`; ``bandwidth_bytes_sec``, ``idle_io``, ``reserve``.
        io: the controller.

    Returns:
        As :func:`file_to_volume`.

    Raises:
        RefusedError: as of :func:`hidden.hidden` and :func:`new_volumes.made`.
        HostError, StoppedError: as of :func:`file_to_volume`.
    """
    started, args = time.monotonic(), Arguments(request.args, WHERE | {*_SPEED, "volume"})
    (backend, place), (target, wanted) = _place(args), _wanted(args)
    if replace(wanted.place, id=place.id) == place:
        raise RefusedError("target_exists", f"the volume {place.group}/{place.name} itself has that name")
    bandwidth, idle = args.size("bandwidth_bytes_sec"), args.get("idle_io", bool, True)
    io.progress("checking", 0, None, "checking the volume and where it goes")
    with host_errors(), hidden(backend, place, request, io) as device:
        node, size = DeviceNode(device.fd, "raw", device.path), device.size
        source = Source(node, size, bandwidth, device.refuse_used, device.refuse_used, idle)
        with made(target, wanted, size, size, request, io) as new:
            told = _write(new, source, io)
    new.finish()
    return told | {"seconds": round(time.monotonic() - started, 3)}


def volume_to_file(request: Request, io: AgentIO) -> dict[str, Any]:
    """Read a volume into an image of a name that no file has.

    Args:
        request: ``args``: the volume as of :func:`volume_to_volume`; else as of :func:`create.from_device`.
        io: the controller.

    Returns:
        As of :func:`create.from_device`.

    Raises:
        RefusedError, HostError, StoppedError: nothing is left of the new file; of the volume as of
            :func:`file_to_volume`.
    """
    args = Arguments(request.args, WHERE | creation.Wish.OF_A_SOURCE)
    backend, place = _place(args)
    target, wish = Target.parse(args.take("target", dict)), creation.Wish.parse(args)
    with host_errors(), hidden(backend, place, request, io) as device:
        return DeviceCopy(request, io, target, wish, None, device=device).run()


def made_by(args: Arguments, silent: set[str], io: AgentIO) -> list[dict[str, Any]]:
    """Which of a recovery's ``volumes_made`` are there under the names that they were to have: as ``images``.

    Args:
        silent: as of :func:`aside_volume.recover`; these are not asked again.
    """
    asked, there = args.get("volumes_made", list, []), dict[tuple[str, ...], Any]()
    for name in {one["backend"] for one in asked} - silent:
        try:
            there |= {(name, one.group, one.name, one.id): one for one in MAKERS[name].there([], io)}
        except (RefusedError, HostError) as error:
            silent.add(name)
            io.log(f"volumes of {name} that jobs have made were not looked for: {error.detail}", "warning")
    found = [(one, there.get(tuple(one[key] for key in ("backend", "group", "name", "id")))) for one in asked]
    return [
        {"job": one["job"], "bytes": volume.taken, "dev": None, "inode": volume.id} for one, volume in found if volume
    ]


def _place(args: Arguments) -> tuple[Maker[Any], Place]:
    place = Place.parse(args)
    return _backend(place), place


def _wanted(args: Arguments) -> tuple[Maker[Any], Wanted]:
    wanted = Wanted.parse(args)
    backend = _backend(wanted.place)
    backend.check_new(wanted)
    return backend, wanted


def _backend(place: Place) -> Maker[Any]:
    if place.backend not in MAKERS:
        raise RefusedError(INVALID, f"no volumes of {place.backend} are moved")
    MAKERS[place.backend].check(place)
    return MAKERS[place.backend]


def _write(new: NewVolume, source: Source, io: AgentIO) -> dict[str, Any]:
    """Writes onto the new volume and compares; gives what the verb tells of it, once it has its name."""
    with contextlib.closing(Device.open(new.backend.device(new.one), to_write=True)) as device:
        write(source, device, io, zeroed=new.zeroed, watch=new.watch)
        if not new.zeroed:
            _clear_tail(device, source.size)
    io.progress("swapping", 0, None, "waiting for the go-ahead")
    taken = new.publish(source.look_again)
    return {"virtual_size": source.size, "volume_size": device.size, "after_bytes": taken, "id": new.one.id}


def _clear_tail(device: Device, size: int) -> None:
    """What lies behind the end of the disk was somebody else's: LVM gives whole extents, and does not clear them."""
    block, at = bytes(1 << 20), size
    while at < device.size:
        at += os.pwrite(device.fd, block[: device.size - at], at)
    os.fsync(device.fd)
