"""Real guests without KVM: Debian's cloud kernel, busybox, and a shell on the serial line that tests talk to.

A guest is up about three seconds after its start. It has its disks as /dev/vda, /dev/vdb, ...
"""

import contextlib
import gzip
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from xml.sax.saxutils import quoteattr

import libvirt

from tests.harness.processes import Daemon

MIB = 1024**2
MODULES = (
    "virtio/virtio_ring", "virtio/virtio", "virtio/virtio_pci_legacy_dev", "virtio/virtio_pci_modern_dev",
    "virtio/virtio_pci", "block/virtio_blk",
)  # fmt: skip

INIT = """#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t devtmpfs dev /dev
for module in {modules}; do insmod /modules/$module.ko; done
stty -F /dev/ttyS0 raw -echo
exec < /dev/ttyS0 > /dev/ttyS0 2>&1
echo "=up"
while read -r line; do
    eval "$line"
    echo "=done $?"
done
poweroff -f
"""

#: The real guest agent, beside the shell. What it must not do stands in the kernel's command line: ``blocked=COMMAND``.
AGENT_MODULE = "char/virtio_console"
AGENT = r"""
mkdir -p /run /sys && mount -t sysfs sys /sys
for word in $(cat /proc/cmdline); do case $word in blocked=*) blocked=${word#blocked=} ;; esac; done
{ until [ -e /dev/vport*p1 ]; do sleep 0.1; done
exec qemu-ga -m virtio-serial -p $(ls /dev/vport*p1) -t /run ${blocked:+-b $blocked}; } >/dev/null 2>&1 </dev/null &
"""


@dataclass(frozen=True)
class Disk:
    """A disk of a guest: its image, and the format that the guest's definition declares."""

    path: Path
    format: str = "qcow2"
    cache: str = "none"
    discard: str = "unmap"
    readonly: bool = False
    #: What the definition itself says that the image stands on.
    backing: Path | None = None
    bus: str = "virtio"
    #: Further attributes of its driver, as ``detect_zeroes='on'``, and further elements, as XML.
    driver: str = ""
    more: str = ""


class Console:
    """The shell on a guest's serial line."""

    def __init__(self, path: Path, seconds: float = 60.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(seconds)
        self._rest = b""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._socket.connect(str(path))
                break
            except OSError:
                assert time.monotonic() < deadline, f"the guest's console {path} is not there"
                time.sleep(0.05)

    def close(self) -> None:
        self._socket.close()

    def wait_until_up(self) -> None:
        """Waits for the shell."""
        self._until(b"=up")

    def run(self, line: str) -> str:
        """What a line of shell printed in the guest.

        Raises:
            AssertionError: it failed.
        """
        self._socket.sendall(line.encode() + b"\n")
        said, code = self._until(b"=done ")
        assert code == b"0", f"in the guest: {line}: exit code {code.decode()}: {said}"
        return said

    def _until(self, mark: bytes) -> tuple[str, bytes]:
        said: list[str] = []
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                line = line.rstrip(b"\r")
                if line.startswith(mark):
                    return "\n".join(said), line.removeprefix(mark)
                said.append(line.decode("utf-8", "replace"))
                continue
            chunk = self._socket.recv(65536)
            assert chunk, f"the guest went away; it said: {said[-20:]} {self._rest!r}"
            self._rest += chunk


class Guest:
    """A running guest."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def write(self, offset_mib: int, length_mib: int, byte: int, disk: str = "vda") -> None:
        """Fills a part of a disk with one byte and waits until it is on the disk."""
        self.console.run(
            f"tr '\\0' '\\{byte:03o}' < /dev/zero | dd of=/dev/{disk} bs=1M iflag=fullblock "
            f"seek={offset_mib} count={length_mib} conv=notrunc,fsync 2>/dev/null"
        )

    def digest(self, offset_mib: int, length_mib: int, disk: str = "vda") -> str:
        """SHA-256 of a part of a disk, as the guest reads it."""
        self.console.run("echo 3 > /proc/sys/vm/drop_caches")
        said = self.console.run(f"dd if=/dev/{disk} bs=1M skip={offset_mib} count={length_mib} 2>/dev/null | sha256sum")
        return said.split()[0]


class LibvirtGuest(Guest):
    """A running domain of libvirt, of type qemu."""

    def __init__(self, console: Console, domain: "libvirt.virDomain") -> None:
        super().__init__(console)
        self.domain = domain

    @property
    def name(self) -> str:
        return str(self.domain.name())

    def stop(self) -> None:
        """Pulls its plug; its definition stays."""
        if self.domain.isActive():
            self.domain.destroy()

    def start(self) -> None:
        """Starts it again. The console of before is gone."""
        self.domain.create()


#: Of fixtures: ``tcg_guest(Disk(path), …)`` is a guest that runs.
Starts = Callable[..., LibvirtGuest]


def initramfs(folder: Path, *, agent: bool = False) -> Path:
    """The guests' initial file system, built once per folder from this machine's busybox and kernel modules.

    Args:
        agent: Debian's qemu-guest-agent runs in it.
    """
    path = folder / f"initramfs{'-agent' if agent else ''}.gz"
    modules = (*MODULES, AGENT_MODULE) if agent else MODULES
    if path.exists():
        return path
    folders = ("bin", "dev", "proc", "modules", "mnt")
    entries: list[tuple[str, int, bytes]] = [(name, 0o040755, b"") for name in folders]
    entries.append(("bin/busybox", 0o100755, _busybox().read_bytes()))
    entries += _with_libraries("/usr/sbin/qemu-ga", "bin/qemu-ga") if agent else []
    drivers = Path("/lib/modules") / _kernel().name.removeprefix("vmlinuz-") / "kernel/drivers"
    entries += [
        (f"modules/{Path(module).name}.ko", 0o100644, (drivers / f"{module}.ko").read_bytes()) for module in modules
    ]
    names = " ".join(Path(module).name for module in modules)
    init = INIT.format(modules=names)
    before, line, after = init.partition("stty ")
    entries.append(("init", 0o100755, (before + (AGENT if agent else "") + line + after).encode()))
    new = folder / f".initramfs.{secrets.token_hex(4)}"
    new.write_bytes(gzip.compress(b"".join(_cpio(*entry) for entry in entries) + _cpio("TRAILER!!!", 0, b""), 1))
    new.chmod(0o644)
    new.rename(path)
    return path


@contextlib.contextmanager
def qemu_guest(folder: Path, disks: Sequence[Disk]) -> Iterator[Guest]:
    """A guest that qemu runs without any libvirt, as Proxmox VE does.

    Args:
        folder: for its console; its path must be short, as socket paths end at 107 bytes.
    """
    console_path = folder / f"console-{secrets.token_hex(3)}"
    argv = [
        "qemu-system-x86_64",
        *_machine(folder),
        "-chardev",
        f"socket,id=line,path={console_path},server=on,wait=off",
    ]
    for disk in disks:
        name = str(disk.path).replace(",", ",,")
        readonly = ",readonly=on" if disk.readonly else ""
        argv += ["-drive", f"file={name},format={disk.format},if=virtio,cache={_drive_cache(disk)}{readonly}"]
    with Daemon([*argv, "-serial", "chardev:line"], folder / "qemu.log", grace=5) as daemon:
        daemon.wait_for(console_path.exists, 30, "the guest's console")
        with contextlib.closing(Console(console_path)) as console:
            console.wait_until_up()
            yield Guest(console)


class Domains:
    """Domains that a test defines in libvirt; leaving the context takes them all away.

    Args:
        folder: reachable for libvirt's user: neither it nor a folder above may be closed to others.
    """

    def __init__(self, uri: str, folder: Path) -> None:
        self._uri = uri
        self._connection = libvirt.open(uri)
        self._folder = folder
        self._domains: list[libvirt.virDomain] = []
        self._consoles: list[Console] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for console in self._consoles:
            console.close()
        for domain in self._domains:
            if domain.isActive():
                domain.destroy()
            if domain.isPersistent():
                domain.undefineFlags(libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA)
        self._connection.close()

    def reconnect(self, guest: "LibvirtGuest | None" = None) -> None:
        """After libvirtd was restarted: the guest's domain, and all others, by a connection to the new one."""
        uids = [domain.UUIDString() for domain in self._domains]
        self._connection = libvirt.open(self._uri)
        self._domains = [self._connection.lookupByUUIDString(uid) for uid in uids]
        if guest is not None:
            guest.domain = self._connection.lookupByUUIDString(guest.domain.UUIDString())

    def define(
        self, disks: Sequence[Disk], name: str = "", *, agent: bool = False, words: str = "", machine: str = "q35",
        override: str = "", on_reboot: str = "destroy",
    ) -> "libvirt.virDomain":  # fmt: skip
        """A domain that does not run.

        Args:
            agent: with a guest agent, and its line to the host.
            words: further ones for its kernel's command line.
            override: what QEMU is told beside the definition, as XML.
            on_reboot: what becomes of it then, in libvirt's word.
        """
        name = name or f"sa-test-{secrets.token_hex(4)}"
        console = self._folder / f"{name}.console"
        xml = _domain_xml(
            name, initramfs(self._folder, agent=agent), console, disks, agent, words, machine, override
        ).replace("<on_reboot>destroy<", f"<on_reboot>{on_reboot}<")
        domain = self._connection.defineXML(xml)
        self._domains.append(domain)
        return domain

    def run(self, disks: Sequence[Disk], name: str = "", **how: Any) -> LibvirtGuest:
        """A domain whose guest is up; ``how`` as of :meth:`define`."""
        domain = self.define(disks, name, **how)
        domain.create()
        console = Console(self._folder / f"{domain.name()}.console")
        self._consoles.append(console)
        console.wait_until_up()
        return LibvirtGuest(console, domain)


def write_pattern(path: Path, form: str, *parts: tuple[int, int, int]) -> None:
    """Writes parts (offset in MiB, length in MiB, byte) into an image without a guest."""
    commands = [word for offset, length, byte in parts for word in ("-c", f"write -q -P {byte} {offset}M {length}M")]
    subprocess.run(["qemu-io", "-f", form, *commands, str(path)], check=True, capture_output=True)


def _machine(folder: Path) -> list[str]:
    return [
        "-machine", "q35,accel=tcg", "-m", "256", "-nodefaults", "-display", "none", "-no-reboot",
        "-kernel", str(_kernel()), "-initrd", str(initramfs(folder)), "-append", _command_line(),
    ]  # fmt: skip


def _command_line() -> str:
    # Nothing that only takes time where each instruction is emulated.
    spared = "nokaslr mitigations=off tsc=reliable no_timer_check cryptomgr.notests rcupdate.rcu_expedited=1"
    return f"console=ttyS0 quiet panic=-1 {spared} random.trust_cpu=on 8250.nr_uarts=1 noreplace-smp"


def _drive_cache(disk: Disk) -> str:
    return f"{disk.cache},discard={disk.discard}"


def _backing_xml(disk: Disk) -> str:
    if disk.backing is None:
        return ""
    source = f"<format type='qcow2'/><source file={quoteattr(str(disk.backing))}/>"
    return f"<backingStore type='file'>{source}<backingStore/></backingStore>"


def _domain_xml(
    name: str, initrd: Path, console: Path, disks: Sequence[Disk], agent: bool, words: str, machine: str, override: str
) -> str:
    drives = "".join(_disk_xml(disk, number) for number, disk in enumerate(disks))
    line = "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>" if agent else ""
    return (
        "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>"
        f"<name>{name}</name><memory unit='MiB'>256</memory><vcpu>1</vcpu>"
        f"<os><type arch='x86_64' machine='{machine}'>hvm</type><kernel>{_kernel()}</kernel><initrd>{initrd}</initrd>"
        f"<cmdline>{_command_line()} {words}</cmdline></os><on_reboot>destroy</on_reboot>"
        f"<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>{drives}{line}"
        f"<serial type='unix'><source mode='bind' path='{console}'/></serial>"
        f"<controller type='usb' model='none'/><memballoon model='none'/></devices>{override}</domain>"
    )


def _disk_xml(disk: Disk, number: int) -> str:
    prefix = "vd" if disk.bus == "virtio" else "sd"
    return (
        f"<disk type='file' device='disk'><driver name='qemu' type='{disk.format}' cache='{disk.cache}'"
        f" discard='{disk.discard}' {disk.driver}/><source file={quoteattr(str(disk.path))}/>{_backing_xml(disk)}"
        f"<target dev='{prefix}{chr(ord('a') + number)}' bus='{disk.bus}'/>"
        f"{'<readonly/>' if disk.readonly else ''}{disk.more}</disk>"
    )


def _kernel() -> Path:
    kernels = sorted(Path("/boot").glob("vmlinuz-*-cloud-amd64"))
    assert kernels, "no kernel for guests: apt install linux-image-cloud-amd64"
    return kernels[-1]


def _with_libraries(program: str, name: str) -> Iterator[tuple[str, int, bytes]]:
    """A program of this machine, with the libraries that it is linked to and the folders they are in."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    files = {name: program} | {path[1:]: path for path in re.findall(r"(/\S+) \(", said)}
    yield from ((folder, 0o040755, b"") for folder in _folders_of(files))
    yield from ((name, 0o100755, Path(path).read_bytes()) for name, path in files.items())


def _folders_of(names: Iterable[str]) -> list[str]:
    """All folders that these names are in, from above."""
    return list(dict.fromkeys(str(one) for name in names for one in [*Path(name).parents][-2::-1] if str(one) != "bin"))


def _busybox() -> Path:
    for path in (Path("/bin/busybox"), Path("/usr/bin/busybox")):
        if path.exists():
            return path
    raise AssertionError("no busybox for guests: apt install busybox-static")


def _cpio(name: str, mode: int, content: bytes) -> bytes:
    """One entry of an archive in the kernel's ``newc`` form (its early-userspace/buffer-format document)."""
    encoded = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded
    return head + b"\0" * (-len(head) % 4) + content + b"\0" * (-len(content) % 4)
