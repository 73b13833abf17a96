"""What a benchmark's figures depend on: the kernel, the tools, the filesystem and its device, the load."""

from __future__ import annotations

import os
import time
from typing import Any

from storage_admin.agent.bench import caches
from storage_admin.agent.host import facts
from storage_admin.agent.host.mounts import Mount, Mounts
from storage_admin.agent.protocol import read_text

_SYS_BLOCK = "/sys/dev/block"


def before(pool: int) -> dict[str, Any]:
    """The fields of the ``environment`` event; ``None`` where this host does not tell.

    Args:
        pool: descriptor of the pool's folder.
    """
    mount = Mounts.of_this_machine().of_descriptor(pool)
    status = os.fstatvfs(pool)
    return {
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "cpus": os.cpu_count(),
        "memory_bytes": facts.memory_bytes(),
        "tools": facts.tool_versions(("qemu-img", "fio", "bonnie++", "dd")),
        "filesystem": mount.filesystem if mount else None,
        "mount_options": _mount_options(mount) if mount else None,
        "mount_source": mount.source.decode("utf-8", "backslashreplace") if mount else None,
        "capacity_bytes": status.f_blocks * status.f_frsize,
        "available_bytes": status.f_bavail * status.f_frsize,
        "device": device(pool, mount),
        "drop_caches": caches.can_drop_all(),
        **now(),
    }


def now() -> dict[str, Any]:
    """What changes while a benchmark runs: ``load`` (of 1, 5 and 15 minutes) and ``time`` (UTC)."""
    load = [round(value, 2) for value in os.getloadavg()]
    return {"load": load, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def _mount_options(mount: Mount) -> str:
    """How a filesystem is mounted: options of the mount, then of the filesystem."""
    options = (mount.flags + b"," + mount.options).decode("utf-8", "backslashreplace")
    return ",".join(dict.fromkeys(options.split(",")))


def device(pool: int, mount: Mount | None) -> dict[str, Any] | None:
    """The disk below a folder, as /sys tells of it; ``None`` where there is none, as for a network filesystem."""
    numbers = os.fstat(pool).st_dev
    if not os.path.exists(_folder(numbers)) and mount is not None:
        try:
            numbers = os.stat(mount.source).st_rdev if mount.source.startswith(b"/") else 0
        except OSError:
            return None
    folder = _folder(numbers)
    if not os.path.exists(folder):
        return None
    real = os.path.realpath(folder)
    disk = real if os.path.isdir(os.path.join(real, "queue")) else os.path.dirname(real)
    rotational = read_text(f"{disk}/queue/rotational")
    return {
        "name": os.path.basename(real),
        "disk": os.path.basename(disk),
        "model": read_text(f"{disk}/device/model") or None,
        "rotational": rotational == "1" if rotational else None,
        "scheduler": _chosen(read_text(f"{disk}/queue/scheduler")) or None,
        "write_cache": read_text(f"{disk}/queue/write_cache") or None,
    }


def _folder(numbers: int) -> str:
    return f"{_SYS_BLOCK}/{os.major(numbers)}:{os.minor(numbers)}"


def _chosen(schedulers: str) -> str:
    """The one in brackets."""
    return next((name[1:-1] for name in schedulers.split() if name.startswith("[")), schedulers)
