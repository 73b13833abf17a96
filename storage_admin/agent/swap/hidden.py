"""A volume that nobody finds for as long as a job reads it (docs/volumes.md)."""

from __future__ import annotations

import contextlib
import fcntl
import struct
from collections.abc import Iterator
from typing import Any

from storage_admin.agent.host.devices import Device
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import HostError, RefusedError, Request
from storage_admin.agent.swap import volumes
from storage_admin.agent.swap.new_volumes import patiently
from storage_admin.agent.swap.volumes import Backend, Maker, Place, V, left_to_recovery

#: linux/fs.h: nobody writes to a device from now on, not even who has it open (EPERM; measured on Linux 6.1).
_BLKROSET = 0x125D


@contextlib.contextmanager
def away(
    backend: Backend[V], place: Place, one: V, name: str, job: str, io: AgentIO, lock: int
) -> Iterator[tuple[V, str]]:
    """A volume with its journal and under another name; what fails then, also of what is done with it, puts it back.

    Yields:
        The volume as it is then, and the journal's text.
    """
    text = backend.write_journal(one, job, io, lock)
    try:
        backend.hide(one, io, lock)
        volumes.give_name(backend, place, one, name, io, lock)
        yield volumes.find(backend, place, name, io), text
    except (RefusedError, HostError):
        with left_to_recovery():
            volumes.put_back(backend, place, text, io, lock)
        raise


@contextlib.contextmanager
def hidden(backend: Maker[Any], place: Place, request: Request, io: AgentIO) -> Iterator[Device]:
    """A volume under a name of the job's own, to be read; it has its own name again afterwards, used as before.

    Its device can only be read as well: a link by its id, which no rename changes, or a number, may lead a guest to it.

    Raises:
        RefusedError: ``stale_plan``, ``image_in_use``, ``has_overlays``, ``shared_pool``, ``unsupported_pool``,
            ``busy``, ``target_exists``, ``tool_missing``, ``device_in_use``.
        HostError: the backend does not answer, or, as ``interrupted``, the volume could not be given its name again.
    """
    name = volumes.work_name(request.job)
    with volumes.alone(backend, place.group, io.check) as lock:
        backend.refuse_shared(place, io)
        one = volumes.unused(backend, place, io)
        with away(backend, place, one, name, request.job, io, lock) as (now, journal):
            backend.appear(now, io, lock)
    try:
        with contextlib.closing(Device.open(backend.device(now))) as device:
            fcntl.ioctl(device.fd, _BLKROSET, struct.pack("i", 1))
            device.refuse_used()
            yield device
    finally:
        with left_to_recovery(), volumes.alone(backend, place.group, patiently) as lock:
            backend.hide(volumes.find(backend, place, name, io), io, lock)  # its device is one that can only be read
            volumes.put_back(backend, place, journal, io, lock)
