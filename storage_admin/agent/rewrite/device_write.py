"""What a guest reads of an image is written onto a block device, and compared with it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.host.devices import Device
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import HostError, RefusedError, Request, display
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import DeviceNode
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite.base import WATCH_INTERVAL, Wish
from storage_admin.agent.rewrite.chain import PROCESS_INTERVAL, Chain
from storage_admin.agent.rewrite.copying import refuse_two_sizes

#: What a copy on a device does not carry stays in the image.
#: So much of a device's ends has to be readable.
_ENDS = 1 << 20
_CARRIED = frozenset({"has_internal_snapshots", "hard_linked", "immutable"})


@dataclass
class DeviceWrite:
    """One run of the verb.

    Args:
        chain: the image, which is only read.
        device: what is written to.
        overwrite: whether it may hold something by now.
        owners: as of :meth:`Device.refuse_owned`.
    """

    request: Request
    io: AgentIO
    wish: Wish
    chain: Chain
    device: Device
    overwrite: bool
    owners: Sequence[tuple[bytes, str]]
    _looked: float = 0.0
    _looked_at_device: float = 0.0

    def run(self) -> dict[str, Any]:
        """All steps; returns and raises as the verb."""
        started, size = time.monotonic(), self.chain.image.facts.virtual_size
        self.io.progress("checking", 0, None, "checking the image and the device")
        self._refuse(size)
        target = DeviceNode(self.device.fd, "raw", self.device.path, None, size)
        self.io.wait_for_go(self.request.generation)
        self._look_again()
        done = img.fill(
            self.io, self.chain.node(), target, self._effort("copying", size), zeroed=False,
            bandwidth=self.wish.bandwidth,
        )  # fmt: skip
        if done.exit_code:
            self._look_again()
            raise HostError(f"qemu-img convert failed, {done.words()}")
        self.io.progress("syncing", 0, None, "writing it to the device")
        os.fsync(self.device.fd)
        # What is compared comes from the device, not from memory.
        os.posix_fadvise(self.device.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not img.compare(self.io, self.chain.node(), target, size, self._effort("verifying", size)):
            self._look_again()
            raise HostError("the device differs from the image")
        self._look_again()
        return {
            "virtual_size": size,
            "device_bytes": self.device.size,
            "seconds": round(time.monotonic() - started, 3),
        }

    def _refuse(self, size: int) -> None:
        shown = self.chain.image.shown
        links.refuse_unsafe(self.chain, children_known=self.wish.children_known, carried=_CARRIED)
        self.device.refuse_owned(self.owners)
        refuse_two_sizes(self.chain.image)
        self.chain.refuse_in_use()
        if size != self.wish.virtual_size:
            raise RefusedError("stale_plan", f"{shown} was resized since it was scanned; scan the host and try again")
        if self.device.size < size:
            raise RefusedError(
                "not_enough_space", f"{shown} has {size} bytes, {display(self.device.path)} {self.device.size}"
            )
        if self.chain.image.planned.format in img.CHECKED:
            report = img.check(self.io, self.chain.node(), self._effort("checking", size))
            if not report.sound:
                raise RefusedError("dirty_or_corrupt", f"{shown} has {report.corruptions} corruptions; check it first")
        if not self.overwrite and (held := self._held()):
            raise RefusedError(
                "target_exists", f"{display(self.device.path)} holds {held}; choose another device, or overwrite it"
            )

    def _held(self) -> str:
        """What is on the device, in a few words, as ``blkid`` knows it; empty where it knows nothing of that."""
        for at in (0, max(self.device.size - _ENDS, 0)):
            os.pread(self.device.fd, _ENDS, at)  # of what it cannot read, it says nothing
        node = DeviceNode(self.device.fd, "raw", self.device.path)
        done = tools.run(
            ["blkid", "-p", "-o", "export", node.path_by_descriptor()], self.io, files=Files(written=[self.device.fd]),
            shown=["blkid", "-p", display(self.device.path)],
        )  # fmt: skip
        if done.exit_code == 2 and not done.stdout:
            return ""
        told = dict(line.split("=", 1) for line in display(done.stdout).splitlines() if "=" in line)
        label = f" ({told['LABEL']})" if "LABEL" in told else ""
        if "TYPE" in told:
            return told["TYPE"] + label
        if "PTTYPE" in told:
            return f"a partition table ({told['PTTYPE']})"
        if done.exit_code:
            return f"something that cannot be told apart (blkid: {done.words()})"
        return "something that blkid knows"

    def _effort(self, stage: str, size: int) -> img.Effort:
        return img.Effort(
            self.wish.idle_io, self._watch, lambda share: self.io.progress(stage, round(share * size), size)
        )

    def _watch(self) -> None:
        """A guest that starts wins, be it one with the image or with the device."""
        if time.monotonic() - self._looked > WATCH_INTERVAL:
            self._looked = time.monotonic()
            self.chain.refuse_changes()
        if time.monotonic() - self._looked_at_device > PROCESS_INTERVAL:
            self._looked_at_device = time.monotonic()
            self.device.refuse_used()

    def _look_again(self) -> None:
        """The image is as it was planned, and nobody else has the device."""
        self.chain.refuse_in_use()
        self.chain.refuse_stale()
        self.device.refuse_used()
