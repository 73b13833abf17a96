"""Write an image onto a block device, as a logical volume."""

from __future__ import annotations

import contextlib
from typing import Any

from storage_admin.agent.host.devices import Device
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, Arguments, RefusedError, Request, unb64
from storage_admin.agent.rewrite.base import COMMON, Wish, opened
from storage_admin.agent.rewrite.device_write import DeviceWrite


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Write what a guest reads of an image onto a device that nobody uses, and compare both.

    Args:
        request: its ``args`` are :data:`base.COMMON`; ``device_b64`` (a path below ``/dev``); ``overwrite``: also where
            the device holds something; ``owners``: pairs of a path (base64) and whose it is: devices that are not
            written to.
        io: the controller. Once it has said ``go``, what was on the device is lost.

    Returns:
        ``virtual_size`` and ``device_bytes``, in bytes, and ``seconds``.

    Raises:
        RefusedError: ``device_in_use``, ``target_exists``, ``not_enough_space``, ``immutable``; as any rewrite.
        HostError, StoppedError: the image is as it was; after ``go`` the device may hold a part of it.
    """
    args = Arguments(request.args, COMMON | {"device_b64", "overwrite", "owners"})
    wish, overwrite = Wish.parse(request.args, args), args.get("overwrite", bool, False)
    try:
        owners = [(unb64(path), str(whose)) for path, whose in args.get("owners", list, [])]
    except (TypeError, ValueError, AttributeError) as error:
        raise RefusedError(INVALID, "owners are pairs of a path and whose it is") from error
    with opened(wish) as chain, contextlib.closing(Device.open(args.path("device_b64"), to_write=True)) as device:
        return DeviceWrite(request, io, wish, chain, device, overwrite, owners).run()
