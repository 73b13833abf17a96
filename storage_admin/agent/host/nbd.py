"""Images that are block devices of this host, by the kernel's module ``nbd`` and a qemu-nbd that outlives its agent.

Such a disk is a guest's. Where it carries the names and numbers of the host's own volume groups and filesystems, as a
clone does, LVM, udev, multipath and blkid must not come by it. They look for devices by their names in ``/dev``: so
its device is in a folder of root's there, whose name begins with a dot, for as long as it is attached. And partitions
of its own, whose names the kernel would put into ``/dev``, are there only where the module was loaded to make them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

from storage_admin.agent.host import locking
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.programs import tools
from storage_admin.agent.protocol import RefusedError, display, read_text

#: Where the devices of attached images are, each with what is noted of it; both are gone when the host starts anew.
FOLDER = "/dev/.storage-admin"
MISSING, PARTITIONS = "nbd_missing", "nbd_partitions"
_WHY = {
    MISSING: "the kernel of this host has no module nbd, as in containers, so that no image can be attached; "
    "browse its files, trim its filesystems or download it instead",
    PARTITIONS: "the module nbd was loaded with partitions (max_part), by which LVM of this host would find what is on "
    "an image; detach what uses it, then run: rmmod nbd && modprobe nbd max_part=0",
}
_NAME = re.compile(r"nbd([0-9]+)")


def against(root: str = "/") -> str:
    """What stands against attaching images here, as a refusal's code; empty where nothing does.

    Args:
        root: where ``sys`` and ``lib`` are looked for.
    """
    if partitions := read_text(os.path.join(root, "sys/module/nbd/parameters/max_part")):
        return "" if partitions == "0" else PARTITIONS
    modules = os.path.join(root, "lib/modules", os.uname().release, "modules.dep")
    with contextlib.suppress(OSError), open(modules, "rb") as file:
        return "" if b"/nbd.ko" in file.read() else MISSING
    return MISSING


def load(io: AgentIO) -> None:
    """Load the module, without partitions, where that was not done yet.

    Raises:
        RefusedError: ``nbd_missing``, ``nbd_partitions``, ``tool_missing``.
    """
    if not against() and not os.path.isdir("/sys/module/nbd"):
        done = tools.run(["modprobe", "nbd", "max_part=0"], io)
        if done.exit_code:
            raise RefusedError(MISSING, f"{_WHY[MISSING]} ({done.words()})")
    if code := against():
        raise RefusedError(code, _WHY[code])


def attached(root: str = "/") -> list[dict[str, Any]]:
    """The nbd devices that are connected now, whoever has connected them, as the kernel tells.

    Args:
        root: where ``dev``, ``sys`` and ``proc`` are looked for.

    Returns:
        For each ``device`` (its name), ``path``, ``pid`` of its process (of a thread, where that is gone), ``size`` in
        bytes, ``read_only``, ``file`` that the process has open; and of those that an agent has attached ``dev`` and
        ``inode`` of the image, ``job``, ``by`` and ``at`` (seconds since 1970), which of others are ``None``.
    """
    found = []
    for name in _devices(root):
        block = os.path.join(root, "sys/block", name)
        thread = _number(f"{block}/pid")
        if thread is None:
            continue  # connected to nothing
        pid, files, inodes = _process(root, thread)
        note = _note(root, name)
        if inodes and note.get("inode") not in inodes:
            note = {}
        path = os.path.join(FOLDER, name) if note else f"/dev/{name}"
        found.append(
            {"device": name, "path": path, "pid": pid, "size": (_number(f"{block}/size") or 0) * 512,
             "read_only": _number(f"{block}/ro") == 1, "file": files[0] if files else None}
            | {field: note.get(field) for field in ("dev", "inode", "job", "by", "at")}
        )  # fmt: skip
    return found


def _devices(root: str = "/") -> list[str]:
    """The names of all nbd devices, by their numbers."""
    try:
        names = os.listdir(os.path.join(root, "sys/block"))
    except FileNotFoundError:
        return []
    return sorted(filter(_NAME.fullmatch, names), key=lambda name: int(name[3:]))


def is_connected(name: str) -> bool:
    """Whether something serves a device."""
    return os.path.exists(f"/sys/block/{name}/pid")


def servers(name: str) -> list[int]:
    """The processes of root that an agent has started to serve a device, whether they do so yet or not."""
    wanted = f"--socket={FOLDER}/{name}.socket".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if wanted in file.read().split(b"\0") and os.fstat(file.fileno()).st_uid == 0:
                found.append(int(pid))
    return found


def _number(path: str) -> int | None:
    text = read_text(path)
    return int(text) if text.isdecimal() else None


def _process(root: str, thread: int) -> tuple[int, list[str], set[int]]:
    """The process that a thread belongs to, the files that it has open, and their inodes, where the kernel tells them.

    No file is looked at: that of a silent server would make one wait.
    """
    place, pid = os.path.join(root, "proc", str(thread)), thread
    files, inodes = [], set()
    with contextlib.suppress(OSError):
        with open(f"{place}/status", encoding="utf-8", errors="replace") as file:
            pid = next((int(line.split()[1]) for line in file if line.startswith("Tgid:")), thread)
        for descriptor in sorted(os.listdir(f"{place}/fd"), key=int):
            path = os.readlink(os.fsencode(f"{place}/fd/{descriptor}"))
            if path.startswith(b"/") and not path.startswith((b"/dev/", b"/proc/")):
                files.append(display(path))
                with open(f"{place}/fdinfo/{descriptor}", encoding="ascii") as file:
                    inodes |= {int(line.split()[1]) for line in file if line.startswith("ino:")}
    return pid, files, inodes


def _note(root: str, name: str) -> dict[str, Any]:
    """What was noted of a device when it was attached; nothing of one that no agent has attached."""
    try:
        with open(os.path.join(root, FOLDER[1:], f"{name}.json"), encoding="ascii") as file:
            note: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return {}
    return note


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No other agent attaches or detaches anything on this host meanwhile; what a killed one left is put right.

    Raises:
        RefusedError: ``busy``.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(FOLDER, 0o700)
    folder = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not locking.take_file(folder, 0.0):
            raise RefusedError("busy", "another job attaches or detaches an image on this host; try again")
        for name in filter(_NAME.fullmatch, os.listdir(folder)):
            if not is_connected(name):
                give_back(name)
        yield
    finally:
        os.close(folder)


def take(note: dict[str, Any]) -> str:
    """Take a device that serves nothing out of ``/dev``, where nobody else finds it from now on.

    Args:
        note: what :func:`attached` tells of it.

    Returns:
        Its name.

    Raises:
        RefusedError: ``busy``: there is none.
    """
    for name in _devices():
        with contextlib.suppress(FileNotFoundError):
            if not is_connected(name) and stat.S_ISBLK(os.lstat(f"/dev/{name}").st_mode):
                with open(os.path.join(FOLDER, f"{name}.json"), "w", encoding="ascii") as file:
                    json.dump(note, file)
                os.rename(f"/dev/{name}", os.path.join(FOLDER, name))
                return name
    raise RefusedError("busy", "all nbd devices of this host are in use; detach another image first")


def give_back(name: str) -> None:
    """Put a device that serves nothing any more back into ``/dev``."""
    place = os.path.join(FOLDER, name)
    if os.path.isdir(f"/sys/block/{name}") and not os.path.lexists(f"/dev/{name}"):
        os.rename(place, f"/dev/{name}")
    for left in (place, f"{place}.json", f"{place}.socket"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(left)
