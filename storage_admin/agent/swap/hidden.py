"""A logical volume that nobody finds for as long as a job reads it (docs/safety.md, section 2.7)."""

from __future__ import annotations

import contextlib
import fcntl
import struct
from collections.abc import Iterator

from storage_admin.agent.host.devices import Device
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import HostError, RefusedError, Request
from storage_admin.agent.swap import lvm_volumes, volumes
from storage_admin.agent.swap.new_volumes import left_to_recovery, patiently
from storage_admin.agent.swap.volumes import Place, change

#: linux/fs.h: nobody writes to a device from now on, not even who has it open (EPERM; measured on Linux 6.1).
_BLKROSET = 0x125D


@contextlib.contextmanager
def hidden(place: Place, request: Request, io: AgentIO) -> Iterator[Device]:
    """A volume under a name of the job's own, to be read; it has its own name again afterwards, as active as before.

    Its device can only be read as well: a link by its id, which no rename changes, could lead a guest to it.

    Raises:
        RefusedError: ``stale_plan``, ``image_in_use``, ``has_overlays``, ``shared_pool``, ``unsupported_pool``,
            ``busy``, ``target_exists``, ``tool_missing``, ``device_in_use``.
        HostError: LVM does not answer, or, as ``interrupted``, the volume could not be given its name again.
    """
    name = volumes.work_name(request.job)
    with volumes.alone(lvm_volumes, place.group, io.check) as lock:
        lvm_volumes.refuse_shared(place, io)
        one = volumes.unused(lvm_volumes, place, io)
        tag = lvm_volumes.write_journal(one, request.job, io, lock)
        try:
            lvm_volumes.hide(one, io, lock)
            volumes.give_name(lvm_volumes, place, one, name, io, lock)
            now = volumes.find(lvm_volumes, place, name, io)
            if now.active:
                raise RefusedError("image_in_use", f"the volume {one.path} was activated at this moment")
            change(["lvchange", "-ay", "-K", now.path], io, lock)
        except (RefusedError, HostError):
            _give_back(place, name, tag, io, lock)
            raise
    try:
        device = Device.open(f"/dev/{place.group}/{name}".encode())
        try:
            fcntl.ioctl(device.fd, _BLKROSET, struct.pack("i", 1))
            device.refuse_used()
            yield device
        finally:
            device.close()
    finally:
        with left_to_recovery(), volumes.alone(lvm_volumes, place.group, patiently) as lock:
            _give_back(place, name, tag, io, lock)


def _give_back(place: Place, name: str, tag: str, io: AgentIO, lock: int) -> None:
    for one in lvm_volumes.there([place], io):
        if (one.id, one.name) == (place.id, name) and one.active:
            lvm_volumes.hide(one, io, lock)  # its device is one that can only be read
    volumes.put_back(lvm_volumes, place, tag, io, lock)
