"""What a scan says about the hypervisor itself: its tools, its storages, and whether guests can exist on it.

And which versions its programs say they are. To say it, some load a hundred libraries, which takes longer than all else
that a scan of unchanged images does. So one is asked once, and again when its file is another one.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.host import nbd
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.programs import confined
from storage_admin.agent.programs.tools import compresses_by_zstd, find_any
from storage_admin.agent.protocol import HostError, machine_id

_TOOLS = ("qemu-img", "qemu-nbd", "setpriv", "ionice", "virsh", "pvesh", "vzctl", "fio", "bonnie++")
#: What runs guests. On Proxmox VE and RHEL it is not named after the machine, and on the latter in no folder of tools.
_EMULATORS = (f"qemu-system-{os.uname().machine}", "kvm", "qemu-kvm", "/usr/libexec/qemu-kvm")
_SAY_VERSIONS = ("qemu-img", "qemu-system", "fio", "bonnie++")

#: Storages of Proxmox VE that are folders, and where one is mounted if its section names no path.
_FOLDERS = frozenset({"btrfs", "cephfs", "cifs", "dir", "glusterfs", "nfs"})
_MOUNTED = frozenset({"cephfs", "cifs", "glusterfs", "nfs"})

_LIBVIRT_SOCKETS = ("libvirt/libvirt-sock", "libvirt/virtqemud-sock", "libvirt/virtlxcd-sock", "libvirt/virtxend-sock")
LIBVIRT_POOLS = ("/etc/libvirt/storage/*.xml", "/run/libvirt/storage/*.xml")
_LIBVIRT_DAEMONS = ("libvirtd", "virtqemud", "virtlxcd", "virtxend")


@dataclass(frozen=True)
class Storage:
    """A storage of Proxmox VE; ``path`` is ``None`` where it is no folder.

    Args:
        mount_point: where something has to be mounted before the folder is the storage; ``None`` where nothing has to.
    """

    name: str
    type: str
    path: str | None
    content: tuple[str, ...]
    disabled: bool
    nodes: tuple[str, ...]
    mount_point: str | None = None


def host_event(etc_pve: str = "/etc/pve", known: Any = None) -> dict[str, Any]:
    """The fields of the ``host`` event.

    Args:
        etc_pve: folder of Proxmox VE's configuration.
        known: ``programs`` of the event before.

    Raises:
        HostError: qemu-img is there and does not tell its version.
    """
    paths = {name: find_any(name) for name in _TOOLS} | {"qemu-system": find_any(*_EMULATORS)}
    asked = Programs([paths[name] for name in _SAY_VERSIONS], known)
    version = asked.qemu_img(paths["qemu-img"])
    proxmox = os.path.isdir(etc_pve)
    return {
        "hostname": socket.gethostname(),
        "machine_id": machine_id(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "kernel": os.uname().release,
        "memory_bytes": memory_bytes(),
        "memory_available_bytes": memory_bytes("MemAvailable"),
        "qemu_img": version,
        "qemu_system": asked.version(paths["qemu-system"], _EMULATOR_VERSION),
        "older_qemus": older_qemus(),
        "zstd": asked.zstd(paths["qemu-img"]),
        # How a tool is kept from what an image's header names; None where it cannot be.
        "confinement": confined.means(),
        "weighing_disks": weighing_disks(),
        "tools": {name: path is not None for name, path in paths.items()},
        "tool_versions": {name: asked.version(paths[name], _TOOL_VERSION) for name in ("fio", "bonnie++")},
        "programs": asked.told,
        "proxmox": proxmox,
        "proxmox_storages": [vars(storage) for storage in proxmox_storages(etc_pve)] if proxmox else [],
        "libvirt": libvirt_state(),
        # The code of what stands against attaching images here, and what is attached.
        "nbd": nbd.against(),
        "attached": nbd.attached(),
    }


def weighing_disks(root: str = "/") -> list[str]:
    """Disks where the I/O weight of a guest counts: their scheduler is BFQ, or the kernel was told of their costs
    (``io.cost.qos``, cgroup-v2).
    """
    found = set()
    for path in glob.glob(os.path.join(root, "sys/block/*/queue/scheduler")):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            if "[bfq]" in file.read():
                found.add(path.split("/")[-3])
    with contextlib.suppress(OSError), open(os.path.join(root, "sys/fs/cgroup/io.cost.qos"), encoding="ascii") as file:
        for line in file:
            numbers, *words = line.split()
            if "enable=1" in words:
                found.add(os.path.basename(os.path.realpath(os.path.join(root, "sys/dev/block", numbers))))
    return sorted(found)


def memory_bytes(which: str = "MemTotal") -> int | None:
    """The host's memory, as its kernel counts it (proc_meminfo(5)); ``MemAvailable`` for what is not in use."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{which}:"):
                return int(line.split()[1]) * 1024
    return None


def tool_versions(names: Sequence[str]) -> dict[str, str | None]:
    """What versions some tools say they are; ``None`` for one that is not installed or does not say."""
    paths = {name: find_any(name) for name in names}
    programs = Programs(paths.values())
    return {name: programs.version(path, _TOOL_VERSION) for name, path in paths.items()}


def proxmox_storages(etc_pve: str = "/etc/pve") -> list[Storage]:
    """The storages of storage.cfg, in their order; none where there is no such file."""
    return [_storage(*definition) for definition in proxmox_definitions(etc_pve)]


def proxmox_definitions(etc_pve: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Type, name and settings of each storage in storage.cfg."""
    try:
        with open(os.path.join(etc_pve, "storage.cfg"), encoding="utf-8", errors="backslashreplace") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return
    kind, name = "", ""
    settings: dict[str, str] = {}
    for line in [*lines, "end: "]:
        heading = re.match(r"(\w+):\s*(\S*)\s*$", line)
        if heading:
            if name:
                yield kind, name, settings
            kind, name, settings = heading[1], heading[2], {}
        elif line[:1].isspace() and line.strip():
            key, _, value = line.strip().partition(" ")
            settings[key] = value.strip()


def _storage(kind: str, name: str, settings: dict[str, str]) -> Storage:
    path = settings.get("path") if kind in _FOLDERS else None
    if path is None and kind in _MOUNTED:
        path = f"/mnt/pve/{name}"
    return Storage(
        name=name,
        type=kind,
        path=path,
        content=tuple(part.strip() for part in settings.get("content", "").split(",") if part.strip()),
        disabled=settings.get("disable", "0" if "disable" not in settings else "1") != "0",
        nodes=tuple(part.strip() for part in settings.get("nodes", "").split(",") if part.strip()),
        mount_point=path if kind in _MOUNTED else _mount_point(path, settings.get("is_mountpoint", "no")),
    )


def _mount_point(path: str | None, told: str) -> str | None:
    """``is_mountpoint`` of a folder: a word for yes or no, or a folder above it (PVE::Storage::DirPlugin)."""
    if told.startswith("/"):
        return told
    return path if told.lower() in ("", "1", "on", "yes", "true") else None


def unmounted(etc_pve: str, mounts: Mounts) -> dict[bytes, str]:
    """The folders of Proxmox VE's storages that are not the storage now, each with where nothing is mounted.

    Args:
        etc_pve: folder of its configuration.
        mounts: of this machine.
    """
    wanted = {one.path: one.mount_point for one in proxmox_storages(etc_pve) if one.path and one.mount_point}
    return {
        os.fsencode(path).rstrip(b"/"): place
        for path, place in wanted.items()
        if not mounts.is_mount_point(os.fsencode(place))
    }


def libvirt_pools() -> Iterator[Any]:
    """The storage pools that libvirt knows here, as elements of XML."""
    from xml.etree import ElementTree as ET  # noqa: PLC0415 (seldom needed, slow to load; what it reads is root's own)

    for path in (path for pattern in LIBVIRT_POOLS for path in glob.glob(pattern)):
        with contextlib.suppress(OSError, ET.ParseError):
            yield from ET.parse(path).iter("pool")  # noqa: S314 (root's own file)


def libvirt_state(root: str = "/") -> str:
    """Whether libvirt could have guests here.

    Returns:
        ``present``: a daemon answers or guests are defined; ``idle``: it is installed and neither is so, hence no guest
        of it can exist; ``absent``: it is not installed.
    """
    defined = any(
        glob.glob(os.path.join(glob.escape(root), place, driver, "*.xml"))
        for place in ("etc/libvirt", "run/libvirt")
        for driver in ("qemu", "libxl", "lxc")
    )
    if defined or any(_answers(os.path.join(root, "run", name)) for name in _LIBVIRT_SOCKETS):
        return "present"
    if root == "/":
        installed = find_any(*_LIBVIRT_DAEMONS) is not None
    else:
        installed = any(os.path.exists(os.path.join(root, "usr/sbin", name)) for name in _LIBVIRT_DAEMONS)
    return "idle" if installed else "absent"


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(2.0)
        try:
            line.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True  # somebody is there and slow, or hidden from this user: guests cannot be excluded
    return True


#: What is said of one whose log does not tell.
UNKNOWN_QEMU = "unknown"
_STARTED = re.compile(rb"starting up libvirt version: .*?, qemu version: (\d+(?:\.\d+)+)([^,\n]*)")
_GONE = " (deleted)"
#: Bytes of a log that are read, from its end: libvirt lets none become larger than 2 MiB.
_LONGEST_LOG = 4 << 20


def older_qemus(root: str = "/") -> dict[str, str]:
    """Guests of libvirt that go on with a QEMU which an update has replaced since they were started, by their names.

    Each with its version as an emulator says it, ``7.2.22 (Debian …)``.

    Its file is gone, so that only a log tells which one it is: libvirt writes there with what it starts a guest
    (``qemuDomainLogAppendMessage``).

    Args:
        root: where ``run``, ``var`` and ``proc`` are looked for.
    """
    found = {}
    for path in glob.glob(os.path.join(glob.escape(root), "run/libvirt/qemu/*.pid")):
        name = os.path.basename(path)[: -len(".pid")]
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            with open(path, encoding="ascii") as file:
                pid = int(file.read())
            if os.readlink(os.path.join(root, "proc", str(pid), "exe")).endswith(_GONE):
                found[name] = _started_with(os.path.join(root, "var/log/libvirt/qemu", f"{name}.log"))
    return found


def _started_with(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LONGEST_LOG))
        if starts := _STARTED.findall(file.read(_LONGEST_LOG)):
            number, package = (part.decode("ascii", "replace").strip() for part in starts[-1])
            return f"{number} ({package})" if package else number
    return UNKNOWN_QEMU


#: Seconds for an answer.
ANSWER_LIMIT = 10.0
_LONGEST_ANSWER = 4096
_TOOL_VERSION = re.compile(rb"(?:fio-|ersion:? |coreutils\) )([0-9]+\.[0-9][0-9a-z.]*)")
#: With the revision of its package: ``7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)``.
_EMULATOR_VERSION = re.compile(rb"QEMU emulator version (\d[ -~]{0,100})")
_QEMU_IMG_VERSION = re.compile(rb"version (\d+\.\d+(?:\.\d+)*)")


class Programs:
    """Programs of this host, by their paths. All are started at once, and answer while something else is done.

    Args:
        paths: of those that will be asked about; ``None`` for one that is not installed.
        known: what :attr:`told` was the last time, as the controller has it.
    """

    def __init__(self, paths: Iterable[str | None], known: Any = None) -> None:
        self._known = known if isinstance(known, dict) else {}
        #: By path, what tells one file from another, and the version that this one says.
        self.told: dict[str, list[str]] = {}
        self._asked: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        for path in paths:
            if path is not None:
                self._ask(path)

    def qemu_img(self, path: str | None) -> str | None:
        """Such as ``7.2.22``; ``None`` where qemu-img is not installed.

        Raises:
            HostError: it is, and does not answer as expected.
        """
        return self.version(path, _QEMU_IMG_VERSION, must=True)

    def zstd(self, path: str | None) -> bool | None:
        """Whether qemu-img compresses with zstd; ``None`` where it is not installed."""
        if path is None:
            return None
        name, stamp = f"{path} with zstd", _stamp(path)
        known = self._known.get(name)
        if not stamp or known not in ([stamp, "yes"], [stamp, "no"]):
            known = [stamp, "yes" if compresses_by_zstd(path) else "no"]
        if stamp:
            self.told[name] = known
        return bool(known[1] == "yes")

    def _ask(self, path: str) -> None:
        stamp, before = _stamp(path), self._known.get(path)
        if stamp and isinstance(before, list) and before[:1] == [stamp] and isinstance(before[-1], str):
            self.told[path] = [stamp, before[-1]]
            return
        with contextlib.suppress(OSError):
            # bonnie++ has no such option, and says its version with how it is used.
            self._asked[path] = (
                stamp,
                subprocess.Popen(
                    [path, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                ),
            )

    def version(self, path: str | None, pattern: re.Pattern[bytes], *, must: bool = False) -> str | None:
        """What a program says, by the pattern's group; ``None`` where it is not installed, or says none.

        Args:
            must: raise HostError where it is installed and says none.
        """
        if path is None or path in self.told:
            return None if path is None else self.told[path][1]
        stamp, process = self._asked.pop(path, ("", None))
        code, said, beside = _answer(process)
        found = pattern.search(said[:_LONGEST_ANSWER]) or (None if must else pattern.search(beside[:_LONGEST_ANSWER]))
        if must and (code or found is None):
            words = (beside or said)[:200].decode("utf-8", "backslashreplace")
            raise HostError(f"{os.path.basename(path)} --version ended with {code}: {words}")
        if found is None:
            return None
        version = found[1].decode("ascii")
        if stamp:
            self.told[path] = [stamp, version]
        return version


def _answer(process: subprocess.Popen[bytes] | None) -> tuple[str, bytes, bytes]:
    """How it ended, empty where well, and what it said on standard output and beside it."""
    if process is None:
        return "no start", b"", b""
    try:
        said, beside = process.communicate(timeout=ANSWER_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        for pipe in (process.stdout, process.stderr):  # which a process that it has started may hold open
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        return "no answer", b"", b""
    return f"exit code {process.returncode}" if process.returncode else "", said, beside


def _stamp(path: str) -> str:
    """What is another for each file; empty for one that cannot be told, and for a script, which may start any other."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        status = os.fstat(fd)
        if os.pread(fd, 4, 0) != b"\x7fELF":
            return ""
    except OSError:
        return ""
    finally:
        os.close(fd)
    return ":".join(map(str, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)))
