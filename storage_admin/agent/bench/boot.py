"""How long guests take to come up when several start at once, with their disks laid out in different ways.

The domains are transient, and libvirt is asked to end them with the connection that made them (``--autodestroy``): if
the agent is killed, ``virsh`` dies with it, and nothing of them is left. Their disks are copies in the scratch folder.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from storage_admin.agent import tools
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import INVALID, HostError, RefusedError
from storage_admin.agent.qemu_node import Node

#: Each guest's disk: a raw file of its own; or an overlay on one raw base, or on one qcow2 base.
LAYOUTS = ("raw", "raw+qcow2", "qcow2+qcow2")
MOST_GUESTS = 64
URI = "qemu:///system"
#: Seconds between two looks at the consoles.
_LOOK = 0.02
#: Seconds that libvirt may take to end the domains of a connection that was closed.
_GONE = 30.0
#: Seconds between the first guest that is let go and the last one.
_LET_GO = 10.0
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Machine:
    """What boots.

    Args:
        image: that is copied for the guests, opened for reading; ``None`` for an empty disk.
        disk_bytes: virtual size of an empty disk.
        kernel, initrd: absolute paths, where the guest does not boot from its disk.
        append: the kernel's command line.
        memory_bytes: of each guest.
        pattern: that the guest writes on its serial console once it is up.
        seconds: that it may take.
    """

    pattern: bytes
    seconds: float
    memory_bytes: int = 256 << 20
    image: Node | None = None
    disk_bytes: int = 64 << 20
    kernel: str = ""
    initrd: str = ""
    append: str = ""

    def check(self) -> None:
        """Refuse what libvirt would only refuse later, or what nobody would ever see coming up.

        Raises:
            RefusedError: ``invalid``.
        """
        if self.image is None and not self.kernel:
            raise RefusedError(INVALID, "a guest boots from an image or from a kernel: name one of them")
        if self.image is not None and self.image.format not in {"qcow2", "raw"}:
            raise RefusedError(INVALID, "guests boot from a copy of a qcow2 or a raw image")
        if not self.pattern.strip() or b"\n" in self.pattern:
            raise RefusedError(INVALID, "the text that a guest shows once it is up is one line, and not empty")
        for path in filter(None, (self.kernel, self.initrd)):
            if not os.path.isabs(path) or not os.path.isfile(path):
                raise RefusedError(INVALID, f"there is no file {path} on this host")


class Storm:
    """Guests of one layout, started at once.

    Args:
        job: its id; the domains are named by it.
        folder: the scratch folder, absolute; libvirt's own user has to come through it.
    """

    def __init__(self, io: AgentIO, job: str, folder: bytes, machine: Machine) -> None:
        machine.check()
        self.io, self.job, self.machine = io, job, machine
        try:
            self.folder = folder.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RefusedError(INVALID, "libvirt needs a pool whose path is valid UTF-8") from error
        if any(character in self.folder for character in "\"';\\\n"):
            raise RefusedError(INVALID, "virsh needs a pool whose path has no quotes, semicolons or backslashes")
        asked = ["virsh", "-q", "-c", URI, "domcapabilities", "--virttype", "kvm"]
        self.type = "qemu" if tools.run(asked, _Silent(io)).exit_code else "kvm"

    def path(self, name: str) -> str:
        """Of a file in the scratch folder."""
        return os.path.join(self.folder, name)

    def lay_out(self, layout: str, guests: int) -> list[str]:
        """Make the disks.

        Args:
            layout: one of :data:`LAYOUTS`.

        Returns:
            Their names, in the scratch folder.
        """
        if layout == "raw":
            names = [f"guest-{number}.raw" for number in range(guests)]
            for name in names:
                self._make("raw", name)
            return names
        form = layout.split("+", maxsplit=1)[0]
        base = f"base.{form}"
        self._make(form, base)
        names = [f"guest-{number}.qcow2" for number in range(guests)]
        for name in names:
            self._qemu_img(["create", "-q", "-f", "qcow2", "-b", base, "-F", form, self.path(name)])
        return names

    def _make(self, form: str, name: str) -> None:
        image = self.machine.image
        if image is None:
            self._qemu_img(["create", "-q", "-f", form, self.path(name), str(self.machine.disk_bytes)])
        else:
            self._qemu_img(["convert", "-U", "-O", form, image.argument(), self.path(name)], image)

    def _qemu_img(self, argv: list[str], image: Node | None = None) -> None:
        done = tools.run(
            ["qemu-img", *argv], self.io, limits=None, pass_fds=image.fds() if image is not None else (),
        )  # fmt: skip
        if done.exit_code:
            raise HostError(f"qemu-img {argv[0]} did not succeed, {done.words()}")

    def run(self, disks: Sequence[str]) -> list[float]:
        """Start them all at once.

        Returns:
            Seconds after which each was up, since the moment in which the first one was let go.

        Raises:
            HostError: one did not come up in time, or libvirt did not start it.
        """
        names = [f"sa-bench-{self.job}-{number}" for number in range(len(disks))]
        consoles = [f"console-{number}" for number in range(len(disks))]
        for name, disk, console in zip(names, disks, consoles):
            # libvirt's own user writes there.
            for made, content in ((f"{name}.xml", self._xml(name, disk, console)), (console, "")):
                with open(self.path(made), "w", encoding="utf-8") as file:
                    file.write(content)
        script = [f'create "{self.path(name)}.xml" --paused --autodestroy' for name in names]
        script += [f"resume {name}" for name in names]
        # Until it ends, the connection and with it the guests stay; it ends at once where there is no first guest.
        script.append(f"event {names[0]} --event lifecycle --loop --timeout {int(self.machine.seconds) + 15}")
        watch = _Consoles([self.path(console) for console in consoles], self.machine)
        said = bytearray()

        def on_output(chunk: bytes) -> None:
            said.extend(chunk)
            watch.let_go(said.count(b" resumed"))

        try:
            done = tools.run(
                # A line at a time: when the first guest was let go is known by what virsh says.
                ["stdbuf", "-oL", "virsh", "-c", URI, "; ".join(script)], self.io, limits=None, on_output=on_output,
                watch=watch.look, shown=["virsh", "-c", URI, "create …; resume …", f"({len(names)} guests)"],
            )  # fmt: skip
        except _AllUpError:
            return watch.seconds()
        finally:
            watch.close()
            self._wait_until_gone(names)
        raise HostError(f"libvirt did not start the guests: {done.words()}")

    def _wait_until_gone(self, names: Sequence[str]) -> None:
        """libvirt ends them by itself; what it has not ended after a while is ended by name."""
        until = time.monotonic() + _GONE
        while left := self._running(names):
            if time.monotonic() > until:
                for name in left:
                    tools.run(["virsh", "-q", "-c", URI, "destroy", name], _Silent(self.io))
                return
            time.sleep(0.1)

    def _running(self, names: Sequence[str]) -> list[str]:
        done = tools.run(["virsh", "-q", "-c", URI, "list", "--all", "--name"], _Silent(self.io))
        known = set(done.stdout.decode("utf-8", "replace").split())
        return [name for name in names if name in known]

    def _xml(self, name: str, disk: str, console: str) -> str:
        machine = self.machine
        form = disk.rsplit(".", 1)[1]
        boots = "<boot dev='hd'/>"
        if machine.kernel:
            boots = f"<kernel>{escape(machine.kernel)}</kernel>"
            boots += f"<initrd>{escape(machine.initrd)}</initrd>" if machine.initrd else ""
            boots += f"<cmdline>{escape(machine.append)}</cmdline>" if machine.append else ""
        return (
            f"<domain type='{self.type}'><name>{name}</name><memory unit='b'>{machine.memory_bytes}</memory>"
            f"<vcpu>1</vcpu><os><type arch='{os.uname().machine}'>hvm</type>{boots}</os>"
            "<features><acpi/></features><on_reboot>destroy</on_reboot><on_crash>destroy</on_crash><devices>"
            f"<disk type='file' device='disk'><driver name='qemu' type='{form}'/>"
            f"<source file={quoteattr(self.path(disk))}/><target dev='vda' bus='virtio'/></disk>"
            f"<serial type='file'><source path={quoteattr(self.path(console))}/><target port='0'/></serial>"
            f"<console type='file'><source path={quoteattr(self.path(console))}/><target type='serial' port='0'/>"
            "</console><controller type='usb' model='none'/><memballoon model='none'/></devices></domain>"
        )


class _AllUpError(Exception):
    """Every guest is up: what keeps the connection may end."""


class _Silent:
    """The controller, for what has to be done after it said that it wants no more, and needs not be logged."""

    def __init__(self, io: AgentIO) -> None:
        self.emit, self.emit_raw, self.progress = io.emit, io.emit_raw, io.progress
        self.log, self.wait_for_go = io.log, io.wait_for_go

    def check(self) -> None:
        """Go on."""

    def command(self, argv: Sequence[str], exit_code: int | None) -> None:
        """Say nothing."""


class _Consoles:
    """Looks at all consoles every few milliseconds, in a thread: the main thread is at virsh."""

    def __init__(self, paths: Sequence[str], machine: Machine) -> None:
        self.since: float | None = None
        self._resumed = 0
        self._pattern, self._limit = machine.pattern, machine.seconds
        self._waiting = dict.fromkeys(paths, (0, b""))
        self._up: dict[str, float] = {}
        self._order = list(paths)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def let_go(self, guests: int) -> None:
        """So many run by now."""
        if guests and self.since is None:
            self.since = time.monotonic()
        self._resumed = guests

    def look(self) -> None:
        """Raise once all are up, or when that takes too long."""
        if len(self._up) == len(self._order):
            raise _AllUpError
        if self.since is None:
            return
        late = len(self._order) - self._resumed
        if late and time.monotonic() - self.since > _LET_GO:
            raise HostError(f"libvirt did not start {late} of {len(self._order)} guests")
        if time.monotonic() - self.since > self._limit:
            late = len(self._order) - len(self._up)
            shown = next(iter(self._waiting.values()))[1][-200:].decode("utf-8", "replace").strip()
            raise HostError(
                f"{late} of {len(self._order)} guests did not show {self._pattern.decode('utf-8', 'replace')!r} on "
                f"their serial console within {self._limit:.0f} s; the last that one of them showed: {shown!r}"
            )

    def seconds(self) -> list[float]:
        """How long each took."""
        begin = self.since if self.since is not None else 0.0
        return [self._up[path] - begin for path in self._order]

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK):
            for path, (offset, rest) in list(self._waiting.items()):
                try:
                    with open(path, "rb") as file:
                        file.seek(offset)
                        read = file.read(_CHUNK)
                except OSError:
                    continue
                seen = rest + read
                if self._pattern in seen:
                    self._up[path] = time.monotonic()
                    del self._waiting[path]
                elif read:
                    self._waiting[path] = (offset + len(read), seen[-max(len(self._pattern), 200) :])
