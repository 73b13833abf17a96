"""What a scan says about the hypervisor itself: its tools, its storages, and whether guests can exist on it.

And its clocks: the one on the wall, which somebody may set, beside the one that only runs on.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.programs import confined
from storage_admin.agent.programs import found as programs

_SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TOOLS = ("qemu-img", "qemu-nbd", "setpriv", "ionice", "virsh", "pvesh", "vzctl", "fio", "bonnie++")
#: What runs guests, where it is not named after the machine.
_EMULATORS = ("kvm", "qemu-kvm", "/usr/libexec/qemu-kvm")
_SAY_VERSIONS = ("qemu-img", "qemu-system", "fio", "bonnie++")

#: Storages of Proxmox VE that are folders, and where one is mounted if its section names no path.
_FOLDERS = frozenset({"btrfs", "cephfs", "cifs", "dir", "glusterfs", "nfs"})
_MOUNTED = frozenset({"cephfs", "cifs", "glusterfs", "nfs"})

_LIBVIRT_SOCKETS = ("libvirt/libvirt-sock", "libvirt/virtqemud-sock", "libvirt/virtlxcd-sock", "libvirt/virtxend-sock")
_LIBVIRT_DAEMONS = ("libvirtd", "virtqemud", "virtlxcd", "virtxend")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Seconds by which the clock on the wall may have been put right without being called a jump.
STEP = 120.0


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


def host_event(etc_pve: str = "/etc/pve", root: str = "/", known: Any = None) -> dict[str, Any]:
    """The fields of the ``host`` event.

    Args:
        etc_pve: folder of Proxmox VE's configuration.
        root: where ``etc`` and ``run`` are looked for.
        known: ``programs`` of the event before.

    Raises:
        HostError: qemu-img is there and does not tell its version.
    """
    paths = {name: find(name) for name in _TOOLS} | {"qemu-system": _emulator()}
    asked = programs.Programs([paths[name] for name in _SAY_VERSIONS], known)
    version = asked.qemu_img(paths["qemu-img"])
    proxmox = os.path.isdir(etc_pve)
    return {
        "hostname": socket.gethostname(),
        "machine_id": machine_id(root),
        "python": ".".join(map(str, sys.version_info[:3])),
        "kernel": os.uname().release,
        "memory_bytes": memory_bytes(),
        "memory_available_bytes": memory_bytes("MemAvailable"),
        "qemu_img": version,
        "qemu_system": asked.emulator(paths["qemu-system"]),
        # qemu writes zstd clusters since 5.1, and distributions build it in.
        "zstd": None if version is None else tuple(map(int, version.split(".")[:2])) >= (5, 1),
        # How a tool is kept from what an image's header names; None where it cannot be.
        "confinement": confined.means(),
        "weighing_disks": weighing_disks(root),
        "tools": {name: path is not None for name, path in paths.items()},
        "tool_versions": {name: asked.tool(paths[name]) for name in ("fio", "bonnie++")},
        "programs": asked.told,
        "proxmox": proxmox,
        "proxmox_storages": [vars(storage) for storage in proxmox_storages(etc_pve)] if proxmox else [],
        "libvirt": libvirt_state(root),
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


def find(name: str) -> str | None:
    """The path of a tool, also where the caller's PATH leaves out the system's folders."""
    # By hand: shutil is slow to load, and the agent starts for every scan.
    folders = ("",) if "/" in name else (os.environ.get("PATH", "") + ":" + _SEARCH_PATH).split(":")
    return next((path for path in (os.path.join(folder, name) for folder in folders) if _is_program(path)), None)


def _is_program(path: str) -> bool:
    return os.path.isabs(path) and os.path.isfile(path) and os.access(path, os.X_OK)


def machine_id(root: str = "/") -> str | None:
    """The id of this installation (machine-id(5)); ``None`` where it has none."""
    for name in ("etc/machine-id", "var/lib/dbus/machine-id"):
        try:
            with open(os.path.join(root, name), encoding="ascii") as file:
                found = file.read().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if found:
            return found
    return None


def memory_bytes(which: str = "MemTotal") -> int | None:
    """The host's memory, as its kernel counts it (proc_meminfo(5)); ``MemAvailable`` for what is not in use."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{which}:"):
                return int(line.split()[1]) * 1024
    return None


def _emulator() -> str | None:
    # On Proxmox VE and RHEL it is only known by the second name, and on the latter it is in no folder of tools.
    return next(filter(None, map(find, (f"qemu-system-{os.uname().machine}", *_EMULATORS))), None)


def tool_versions(names: Sequence[str]) -> dict[str, str | None]:
    """What versions some tools say they are; ``None`` for one that is not installed or does not say."""
    return programs.tool_versions({name: find(name) for name in names})


def proxmox_storages(etc_pve: str = "/etc/pve") -> list[Storage]:
    """The storages of storage.cfg, in their order; none where there is no such file."""
    try:
        with open(os.path.join(etc_pve, "storage.cfg"), encoding="utf-8", errors="backslashreplace") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    storages: list[Storage] = []
    kind, name = "", ""
    settings: dict[str, str] = {}
    for line in [*lines, "end: "]:
        heading = re.match(r"(\w+):\s*(\S*)\s*$", line)
        if heading:
            if name:
                storages.append(_storage(kind, name, settings))
            kind, name, settings = heading[1], heading[2], {}
        elif line[:1].isspace() and line.strip():
            key, _, value = line.strip().partition(" ")
            settings[key] = value.strip()
    return storages


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
        installed = any(find(name) for name in _LIBVIRT_DAEMONS)
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


@dataclass(frozen=True)
class Moment:
    """A point in time.

    Args:
        boot_id: of the boot of the machine in which it was.
        boottime: seconds since that boot, with those in which the machine slept.
        wall: seconds since 1970, by the clock on the wall.
    """

    boot_id: str
    boottime: float
    wall: float

    @classmethod
    def now(cls) -> Moment:
        """This moment."""
        return cls(_BOOT_ID.read_text("ascii").strip(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time())

    @classmethod
    def parse(cls, fields: Any) -> Moment:
        """The moment that :meth:`fields` took apart; raises KeyError, TypeError or ValueError."""
        return cls(str(fields["boot_id"]), float(fields["boottime"]), float(fields["wall"]))

    def fields(self) -> dict[str, Any]:
        """As a journal has it."""
        return asdict(self)

    def passed(self, before: Moment) -> float | None:
        """Seconds since an earlier moment; ``None`` where the machine was booted since, so that nothing can tell."""
        return self.boottime - before.boottime if self.boot_id == before.boot_id else None

    def jumped(self, before: Moment) -> float:
        """Seconds by which the clock on the wall was set since an earlier moment; 0 where that cannot be told."""
        passed = self.passed(before)
        step = 0.0 if passed is None else self.wall - before.wall - passed
        return step if abs(step) > STEP else 0.0
