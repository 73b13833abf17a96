"""Make an image of a block device, as a logical volume."""

from __future__ import annotations

from typing import Any

from storage_admin.agent.host.devices import Device
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request, host_errors
from storage_admin.agent.rewrite.conversion import Target
from storage_admin.agent.rewrite.creation import Wish
from storage_admin.agent.rewrite.device_copy import DeviceCopy


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Read a device that nobody uses into an image of a name that no file has.

    Args:
        request: its ``args`` are ``device_b64`` (a path below ``/dev``), ``target`` as for :mod:`convert`,
            ``bandwidth_bytes_sec``, ``idle_io``, ``reserve`` and ``others_bytes`` as for any rewrite.
        io: the controller.

    Returns:
        As of :mod:`create`, with ``device_bytes``.

    Raises:
        RefusedError, HostError, StoppedError: nothing is left of the new file; the device is only read.
    """
    left_out = {"virtual_size", "base", "chain", "secrets", "iter_time"}
    args = Arguments(request.args, (Wish.ARGS - left_out) | {"device_b64"})
    target, wish = Target.parse(args.take("target", dict)), Wish.parse(args)
    if target.replaces:
        raise RefusedError(INVALID, "a new image takes no other one's place")
    with host_errors():
        device = Device.open(args.path("device_b64"))
        try:
            return DeviceCopy(request, io, target, wish, None, device=device).run()
        finally:
            device.close()
