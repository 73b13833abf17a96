"""Guests that start at once from disks in the scratch folder, and how long each takes until it says that it is up.

The domains are transient, and libvirt is asked to end them with the connection that made them (``--autodestroy``): if
the agent is killed, ``virsh`` dies with it, and nothing of them is left. They have no network. All files that libvirt
opens for them are in the scratch folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from storage_admin.agent.bench.signals import URI, Agents, AllUpError, Consoles, Silent, Up
from storage_admin.agent.bench.step import Bench
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, HostError, RefusedError

#: Names of the copies in the scratch folder that a guest is started from directly.
KERNEL, INITRD = "kernel", "initrd"
#: The channel that a guest's agent listens on (qemu-guest-agent, "virtio-serial").
_AGENT_CHANNEL = (
    "<channel type='unix'><source mode='bind'/><target type='virtio' name='org.qemu.guest_agent.0'/></channel>"
)
#: What brings the emulator on Debian, by machine.
_EMULATORS = {"x86_64": "qemu-system-x86", "aarch64": "qemu-system-arm", "ppc64le": "qemu-system-ppc"}
#: Seconds that libvirt may take to end the domains of a connection that was closed.
_GONE = 30.0


@dataclass(frozen=True)
class Machine:
    """What every guest of a storm is.

    Args:
        memory_bytes: of each.
        seconds: that it may take until it is up.
        pattern: that it then shows on its serial console; empty where its guest agent is to answer instead.
        kernel, initrd: whether it is started from :data:`KERNEL` and :data:`INITRD` instead of its disk.
        append: the kernel's command line.
    """

    memory_bytes: int
    seconds: float
    pattern: bytes = b""
    kernel: bool = False
    initrd: bool = False
    append: str = ""


class Storm:
    """Guests that libvirt is to run from a scratch folder.

    Raises:
        RefusedError: ``invalid`` or ``unsupported_pool``, where libvirt cannot be led to the folder; ``tool_missing``,
            where it can run no guests.
    """

    def __init__(self, bench: Bench, machine: Machine) -> None:
        self.bench, self.machine = bench, machine
        try:
            self.folder = bench.scratch.named_path.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RefusedError(INVALID, "libvirt requires a pool whose path is valid UTF-8") from error
        if not self.folder.isprintable() or any(character in self.folder for character in "\"';\\"):
            raise RefusedError(INVALID, "virsh requires a pool whose path has no quotes, semicolons or backslashes")
        self.type = self._type()
        bench.scratch.let_through()

    def _type(self) -> str:
        """``kvm`` where libvirt can, else ``qemu``, which is many times slower."""
        for name in ("kvm", "qemu"):
            asked = ["virsh", "-q", "-c", URI, "domcapabilities", "--virttype", name]
            done = tools.run(asked, Silent(self.bench.io))
            if not done.exit_code:
                if name == "qemu":
                    self.bench.note(
                        "KVM is not available: the guests were emulated, so the times say less about the disk"
                    )
                return name
        package = _EMULATORS.get(os.uname().machine, "qemu-system")
        raise RefusedError(
            "tool_missing",
            f"libvirt cannot run guests on this host ({done.words()}); start libvirtd, or install "
            f"libvirt-daemon-system and {package}",
        )

    def path(self, name: str) -> str:
        """Of a file in the scratch folder, for libvirt."""
        return os.path.join(self.folder, name)

    def run(self, disks: Sequence[str], *, direct: bool, most_bytes: int) -> list[float]:
        """Start one guest for each disk, all at once.

        Args:
            disks: their names in the scratch folder; what follows the last dot is the format.
            direct: whether disks are read and written past the host's cache.
            most_bytes: that the scratch folder may hold meanwhile.

        Returns:
            Seconds after which each was up, since the moment in which the first one was let go.

        Raises:
            RefusedError: ``not_enough_space``: the guests wrote more than that.
            HostError: one did not come up in time, or libvirt did not start it.
            StoppedError: the controller stopped the work.
        """
        names = [f"sa-bench-{self.bench.job}-{number}" for number in range(len(disks))]
        consoles = [f"console-{number}" for number in range(len(disks))]
        for name, disk, console in zip(names, disks, consoles):
            self._write(console, "")
            self._write(f"{name}.xml", self._xml(name, disk, console, direct=direct))
        script = [f'create "{self.path(name)}.xml" --paused --autodestroy' for name in names]
        script += [f"resume {name}" for name in names]
        # Until it ends, the connection and with it the guests stay; it ends at once where there is no first guest.
        script.append(f"event {names[0]} --event lifecycle --loop --timeout {int(self.machine.seconds) + 15}")
        up = self._signal(names, consoles)
        said = bytearray()

        def on_output(chunk: bytes) -> None:
            said.extend(chunk)
            up.let_go(said.count(b" resumed"))

        def watch() -> None:
            self.bench.watch()
            if self.bench.scratch.allocated_bytes() > most_bytes:
                raise RefusedError(
                    "not_enough_space",
                    "the guests wrote more than was reserved for them and were stopped; let each guest write more "
                    "(size)",
                )
            up.look()

        try:
            done = tools.run(
                # A line at a time: when the first guest was let go is known by what virsh says.
                ["stdbuf", "-oL", "virsh", "-c", URI, "; ".join(script)], self.bench.io, limits=None,
                on_output=on_output, watch=watch,
                shown=["virsh", "-c", URI, "create …; resume …", f"({len(names)} guests)"],
            )  # fmt: skip
        except AllUpError:
            return up.seconds()
        finally:
            up.close()
            self._wait_until_gone(names)
        raise HostError(f"libvirt did not start the guests: {done.words()}")

    def _signal(self, names: Sequence[str], consoles: Sequence[str]) -> Up:
        machine = self.machine
        if machine.pattern:
            return Consoles(list(map(self.path, consoles)), machine.seconds, machine.pattern)
        return Agents(names, machine.seconds, self.bench.io)

    def _write(self, name: str, content: str) -> None:
        with os.fdopen(self.bench.scratch.open(name, os.O_WRONLY | os.O_CREAT), "w", encoding="utf-8") as file:
            file.write(content)

    def _wait_until_gone(self, names: Sequence[str]) -> None:
        """libvirt ends them by itself; what it has not ended after a while is ended by name."""
        until = time.monotonic() + _GONE
        while left := self._running(names):
            if time.monotonic() > until:
                for name in left:
                    tools.run(["virsh", "-q", "-c", URI, "destroy", name], Silent(self.bench.io))
                return
            time.sleep(0.1)

    def _running(self, names: Sequence[str]) -> list[str]:
        done = tools.run(["virsh", "-q", "-c", URI, "list", "--all", "--name"], Silent(self.bench.io))
        known = set(done.stdout.decode("utf-8", "replace").split())
        return [name for name in names if name in known]

    def _xml(self, name: str, disk: str, console: str, *, direct: bool) -> str:
        """A domain as libvirt takes it (formatdomain)."""
        machine = self.machine
        form = disk.rsplit(".", 1)[1]
        boots = "<boot dev='hd'/>"
        if machine.kernel:
            boots = f"<kernel>{escape(self.path(KERNEL))}</kernel>"
            boots += f"<initrd>{escape(self.path(INITRD))}</initrd>" if machine.initrd else ""
            boots += f"<cmdline>{escape(machine.append)}</cmdline>" if machine.append else ""
        cache = " cache='none'" if direct else ""
        return (
            f"<domain type='{self.type}'><name>{name}</name><memory unit='b'>{machine.memory_bytes}</memory>"
            f"<vcpu>1</vcpu><os><type arch='{os.uname().machine}'>hvm</type>{boots}</os>"
            "<features><acpi/></features><on_reboot>destroy</on_reboot><on_crash>destroy</on_crash><devices>"
            f"<disk type='file' device='disk'><driver name='qemu' type='{form}'{cache}/>"
            f"<source file={quoteattr(self.path(disk))}/><target dev='vda' bus='virtio'/></disk>"
            f"<serial type='file'><source path={quoteattr(self.path(console))}/><target port='0'/></serial>"
            f"<console type='file'><source path={quoteattr(self.path(console))}/><target type='serial' port='0'/>"
            f"</console>{'' if machine.pattern else _AGENT_CHANNEL}"
            "<controller type='usb' model='none'/><memballoon model='none'/></devices></domain>"
        )
