"""The verbs ``beneath`` and ``occupied``: of disks of guests what lies below devices, and whether it frees what is
discarded; and what files occupy.

The target of a device that LVM made stands in the kernel's own table (``dmsetup table``), whether a thin pool passes
discards on in its status (the kernel's Documentation/admin-guide/device-mapper/thin-provisioning.rst).
"""

from __future__ import annotations

import os
import stat
from typing import Any

from storage_admin.agent.host import special_mounts
from storage_admin.agent.host.mounts import Mounts
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import INVALID, Arguments, HostError, RefusedError, Request, display, read_text, unb64

_DEVICES = "/sys/dev/block"


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Look at some devices; nothing of them is opened.

    Args:
        request: ``args``: ``paths_b64``, a list.
        io: the controller.

    Returns:
        ``devices``, in their order: ``target``: ``thin``, ``linear`` or what else the device mapper calls it, empty for
        what it did not make, or where nobody tells; ``discards``: whether the device takes discards at all,
        ``passes_on``: whether the thin pool below passes them on; each null where nobody tells.

    Raises:
        RefusedError: ``invalid``.
    """
    return {"devices": [_device(path, io) for path in _paths(request)]}


def occupied(request: Request, io: AgentIO) -> dict[str, Any]:
    """Look what some files occupy; nothing of them is opened.

    Args:
        request: ``args``: ``paths_b64``, a list of absolute paths.
        io: the controller.

    Returns:
        ``files``, in their order, each ``bytes`` that it occupies, and ``dev``, ``inode``, ``file_size``, ``mtime_ns``;
        null for what is no regular file, or lies where nobody answers.

    Raises:
        RefusedError: ``invalid``.
    """
    paths = _paths(request)
    folders = sorted({os.path.dirname(path) for path in paths if path.startswith(b"/") and b"\0" not in path})
    away = special_mounts.trusted(folders, Mounts.of_this_machine(), io.check)
    return {"files": [_file(path) if os.path.dirname(path) in {*folders} - away else None for path in paths]}


def _paths(request: Request) -> list[bytes]:
    args = Arguments(request.args, frozenset({"paths_b64"}))
    try:
        return [unb64(one) for one in args.take("paths_b64", list)]
    except (AttributeError, TypeError, ValueError) as error:
        raise RefusedError(INVALID, "paths_b64 is no list of paths") from error


def _file(path: bytes) -> dict[str, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return {
        "bytes": status.st_blocks * 512, "dev": status.st_dev, "inode": status.st_ino,
        "file_size": status.st_size, "mtime_ns": status.st_mtime_ns,
    }  # fmt: skip


def _device(path: bytes, io: AgentIO) -> dict[str, Any]:
    found: dict[str, Any] = {"target": "", "discards": None, "passes_on": None}
    number = _number(path)
    if not number:
        return found
    folder = f"{_DEVICES}/{number}"
    most = read_text(f"{folder}/queue/discard_max_bytes") or read_text(f"{folder}/../queue/discard_max_bytes")
    found["discards"] = int(most) > 0 if most.isdecimal() else None
    if read_text(f"{folder}/dm/uuid"):
        found.update(_mapped(number, io))
    return found


def _number(path: bytes) -> str:
    """A block device's number, as the kernel writes it; empty for all else."""
    try:
        # Nowhere else may a mere look wait for a server.
        status = os.stat(path) if path.startswith(b"/dev/") and b"\0" not in path else None
    except OSError:
        return ""
    if status is None or not stat.S_ISBLK(status.st_mode):
        return ""
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _mapped(number: str, io: AgentIO) -> dict[str, Any]:
    """Of a device of the device mapper."""
    words = _dmsetup("table", number, io)
    target = words[2] if len(words) > 2 else ""
    if target != "thin":
        return {"target": target}
    features = _dmsetup("status", words[3], io) if len(words) > 3 else []
    passes_on = "discard_passdown" in features
    known = passes_on or "no_discard_passdown" in features or "ignore_discard" in features
    found: dict[str, Any] = {"target": target, "passes_on": passes_on if known else None}
    if "ignore_discard" in features:
        found["discards"] = False
    return found


def _dmsetup(verb: str, number: str, io: AgentIO) -> list[str]:
    """The words of the first line; none where there is no such tool, or it fails."""
    major, _, minor = number.partition(":")
    try:
        done = tools.run(["dmsetup", verb, "--noflush", "--major", major, "--minor", minor], io)
    except (RefusedError, HostError):
        return []
    return display(done.stdout.partition(b"\n")[0]).split() if done.exit_code == 0 else []
