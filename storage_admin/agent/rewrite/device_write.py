"""What a guest reads of an image is written onto a block device, and compared with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.host.devices import Device
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.programs.confined import Files
from storage_admin.agent.protocol import HostError, RefusedError, Request, display, refusal_of_tool
from storage_admin.agent.qemu import img
from storage_admin.agent.qemu.node import DeviceNode, Node, seldom
from storage_admin.agent.rewrite import chain as links
from storage_admin.agent.rewrite.base import Wish
from storage_admin.agent.rewrite.chain import PROCESS_INTERVAL, Chain
from storage_admin.agent.rewrite.copying import refuse_two_sizes

#: Seconds between two looks at how full that is which a device takes its space of.
_LOOKS = 2.0
#: So much of a device's ends has to be readable.
_ENDS = 1 << 20
#: As blkid calls them, and whose they are: the kernel holds none of them unless something on it is active.
_MEMBERS = {
    "LVM2_member": "a volume group of LVM", "LVM1_member": "a volume group of LVM",
    "DM_snapshot_cow": "a snapshot of the device mapper", "DM_verity_hash": "a device that dm-verity checks",
    "DM_integrity": "a device that dm-integrity checks", "linux_raid_member": "an array (md)",
    "zfs_member": "a pool of ZFS", "stratis": "a pool of Stratis", "vdo": "a volume of VDO", "mpool": "a pool (mpool)",
    "ceph_bluestore": "a cluster of Ceph", "bcache": "a cache (bcache)", "drbd": "a resource of DRBD",
    "drbdmanage_control_volume": "a cluster of DRBD", "drbdproxy_datalog": "a resource of DRBD",
    "VMFS": "a datastore of VMware", "VMFS_volume_member": "a datastore of VMware",
    "oracleasm": "a disk group of Oracle", "xfs_external_log": "a filesystem elsewhere (its log)",
    "jbd": "a filesystem elsewhere (its journal)",
    **dict.fromkeys(("gfs", "gfs2", "ocfs", "ocfs2"), "a filesystem of a cluster"),
    **{
        f"{maker}_raid_member": "an array of the firmware"
        for maker in ("adaptec", "ddf", "hpt37x", "hpt45x", "isw", "jmicron", "lsi_mega", "nvidia", "promise_fasttrack",
                      "silicon_medley", "via")
    },
}  # fmt: skip
#: Where blkid looks whether a device is a whole disk: firmware marks no others.
_ABOUT_DISKS = ("/sys/dev/block", "/sys/devices")
#: What a copy on a device does not carry stays in the image.
_CARRIED = frozenset({"has_internal_snapshots", "hard_linked", "immutable"})


@dataclass
class Source:
    """What is written onto a device.

    Args:
        size: of what a guest reads of it, in bytes.
        bandwidth: bytes a second, at most.
        look, look_again: raise where a guest has come: often, while it is read; and more thoroughly, at the end.
    """

    node: Node
    size: int
    bandwidth: int | None
    look: Callable[[], None]
    look_again: Callable[[], None]
    idle_io: bool

    @classmethod
    def of_image(cls, chain: Chain, wish: Wish) -> Source:
        """An image with its chain."""

        def look_again() -> None:
            chain.refuse_in_use()
            chain.refuse_stale()

        size = chain.image.facts.virtual_size
        return cls(chain.node(), size, wish.bandwidth, chain.refuse_changes, look_again, wish.idle_io)


def refuse_unfit(chain: Chain, wish: Wish, io: AgentIO) -> None:
    """Let only an image be written onto a device that is whole, that nobody uses, and that is as it was planned."""
    shown, size = chain.image.shown, chain.image.facts.virtual_size
    links.refuse_unsafe(chain, children_known=wish.children_known, carried=_CARRIED)
    refuse_two_sizes(chain.image)
    chain.refuse_in_use()
    if size != wish.virtual_size:
        raise RefusedError("stale_plan", f"{shown} was resized since it was scanned; scan the host and try again")
    if chain.image.planned.format in img.CHECKED:
        report = img.check(io, chain.node(), img.Effort.telling(io, "checking", size, wish.idle_io))
        if not report.sound:
            raise RefusedError("dirty_or_corrupt", f"{shown} has {report.corruptions} corruptions; check it first")


def write(source: Source, device: Device, io: AgentIO, *, zeroed: bool, watch: Callable[[], None]) -> None:
    """Write all of it, and compare what comes back from the device.

    Args:
        zeroed: whether the device reads as zeros.
        watch: called every few seconds while a tool works; raises to stop.

    Raises:
        RefusedError: a guest came, or the device is full.
        HostError: it could not be written, or is not equal.
    """
    target, size = DeviceNode(device.fd, "raw", device.path, None, source.size), source.size
    looks = (seldom(source.look), seldom(watch, _LOOKS), seldom(device.refuse_used, PROCESS_INTERVAL))

    def look() -> None:
        for one in looks:
            one()

    def effort(stage: str) -> img.Effort:
        return img.Effort.telling(io, stage, size, source.idle_io, look)

    def look_again() -> None:
        source.look_again()
        device.refuse_used()

    done = img.fill(io, source.node, target, effort("copying"), zeroed=zeroed, bandwidth=source.bandwidth)
    if done.exit_code:
        look_again()
        raise refusal_of_tool(done.stderr) or HostError(f"qemu-img convert failed, {done.words()}")
    io.progress("syncing", 0, None, "writing it to the device")
    os.fsync(device.fd)
    # What is compared comes from the device, not from memory.
    os.posix_fadvise(device.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if not img.compare(io, source.node, target, size, effort("verifying")):
        look_again()
        raise HostError("the device differs from what was to be written")
    look_again()


@dataclass
class DeviceWrite:
    """One run of the verb.

    Args:
        chain: the image, which is only read.
        device: what is written to.
        overwrite: whether it may hold something by now.
        owners: as of :meth:`Device.refuse_owned`.
        age: seconds since somebody named the device.
        watch: raises where what the device takes its space of is full.
    """

    request: Request
    io: AgentIO
    wish: Wish
    chain: Chain
    device: Device
    overwrite: bool
    owners: Sequence[tuple[bytes, str]]
    age: float
    watch: Callable[[], None]

    def run(self) -> dict[str, Any]:
        """All steps; returns and raises as the verb."""
        started, source = time.monotonic(), Source.of_image(self.chain, self.wish)
        self.io.progress("checking", 0, None, "checking the image and the device")
        self.device.refuse_newer(self.age)
        self.device.refuse_owned(self.owners)
        if self.device.size < source.size:
            shown = f"{self.chain.image.shown} has {source.size} bytes"
            raise RefusedError("not_enough_space", f"{shown}, {display(self.device.path)} {self.device.size}")
        refuse_unfit(self.chain, self.wish, self.io)
        self._refuse_member()
        if not self.overwrite and (held := self._held()):
            raise RefusedError(
                "target_exists", f"{display(self.device.path)} holds {held}; choose another device, or overwrite it"
            )
        self.watch()
        self.io.wait_for_go(self.request.generation)
        source.look_again()
        self.device.refuse_used()
        write(source, self.device, self.io, zeroed=False, watch=self.watch)
        return {
            "virtual_size": source.size,
            "device_bytes": self.device.size,
            "seconds": round(time.monotonic() - started, 3),
        }

    def _refuse_member(self) -> None:
        """Refuse a part of a group, an array, a pool or a cluster, which nothing may have open just now; also a disk
        with a partition that is one.
        """
        parts = [(f"/dev/{name}", start, size) for name, start, size in self.device.partitions()]
        for shown, start, size in [(display(self.device.path), 0, self.device.size), *parts]:
            done, told = self._probe(start, size, "-n", ",".join(_MEMBERS))
            if done.exit_code and not _knows_nothing(done):
                words = f"nobody can tell what {shown} is a part of (blkid: {done.words()})"
                raise RefusedError("device_in_use", words)
            if whose := _MEMBERS.get(told.get("TYPE", "")):
                raise RefusedError(
                    "device_in_use",
                    f"{shown} is a part of {whose}, active or not. Choose another device; if nothing needs what is on "
                    f"this one, take it out of there and clear it yourself: wipefs -a {shown}",
                )

    def _held(self) -> str:
        """What is on the device, in a few words, as ``blkid`` knows it; empty where it knows nothing of that."""
        done, told = self._probe(0, self.device.size)
        if _knows_nothing(done):
            return ""
        label = f" ({told['LABEL']})" if "LABEL" in told else ""
        if "TYPE" in told:
            return told["TYPE"] + label
        if "PTTYPE" in told:
            return f"a partition table ({told['PTTYPE']})"
        if done.exit_code:
            return f"something that cannot be told apart (blkid: {done.words()})"
        return "something that blkid knows"

    def _probe(self, start: int, size: int, *options: str) -> tuple[tools.Finished, dict[str, str]]:
        """How ``blkid`` ended, and what it says of a part of the device."""
        for at in (0, max(size - _ENDS, 0)):
            os.pread(self.device.fd, min(_ENDS, size), start + at)  # of what it cannot read, it says nothing
        options = ("-O", str(start), "-S", str(size), *options)
        node = DeviceNode(self.device.fd, "raw", self.device.path)
        done = tools.run(
            ["blkid", "-p", *options, "-o", "export", node.path_by_descriptor()], self.io,
            files=Files(written=[self.device.fd], looked=_ABOUT_DISKS),
            shown=["blkid", "-p", *options, display(self.device.path)],
        )  # fmt: skip
        return done, dict(line.split("=", 1) for line in map(display, done.stdout.splitlines()) if "=" in line)


def _knows_nothing(done: tools.Finished) -> bool:
    return done.exit_code == 2 and not done.stdout
