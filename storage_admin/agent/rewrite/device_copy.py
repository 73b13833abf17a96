"""A block device, as a logical volume, becomes a new image: read as it is, zeros left out, and compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from storage_admin.agent.host.devices import Device
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import DeviceNode, Node
from storage_admin.agent.rewrite.creation import Creation
from storage_admin.agent.swap.swap import NewFile


@dataclass
class DeviceCopy(Creation):
    """One run of the verb.

    Args:
        device: what is read.
    """

    device: Device | None = None

    @property
    def _node(self) -> DeviceNode:
        if self.device is None:
            raise TypeError("there is no device")
        return DeviceNode(self.device.fd, "raw", self.device.path)

    def run(self) -> dict[str, Any]:
        if self.device is None or not self.device.size or self.device.size % 512:
            raise RefusedError(INVALID, "the device has no size in whole sectors")
        self.wish = replace(self.wish, virtual_size=self.device.size)
        return super().run() | {"device_bytes": self.device.size}

    def _refuse(self) -> None:
        if self.device is not None:
            self.device.refuse_used()

    def _needed(self) -> int:
        return img.measure(self.io, self._node, "cluster_size=65536")

    def _make(self, new: NewFile, effort: img.Effort) -> None:
        size = self.wish.virtual_size
        told = img.Effort(effort.idle_io, effort.watch, lambda share: self._tell(round(share * size)))
        written = replace(self._written(new), bandwidth=self.wish.bandwidth)
        self._done(new, "convert", img.convert(self.io, self._node, written, told))

    def _verify(self, new: NewFile) -> None:
        super()._verify(new)
        node = Node(new.new, self.target.format, self.name)
        size = self.wish.virtual_size
        told = img.Effort.telling(self.io, "verifying", size, self.wish.idle_io)
        if not img.compare(self.io, self._node, node, size, told):
            self._refuse()
            raise HostError("the new image differs from the device; something has written to it")
