"""The verb ``pve``: the configuration files of Proxmox VE on this node, as they stand, and which of its guests run.

Read-only. The API leaves out what it does not understand in a guest's file; who has to know which images belong to
somebody needs the file itself. Below ``/etc/pve`` no link is followed, and nothing but what is named here is read.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from collections.abc import Iterator
from typing import Any

from storage_admin.agent.folders import image_folders
from storage_admin.agent.folders.pools import held
from storage_admin.agent.lifeline import AgentIO
from storage_admin.agent.protocol import Arguments, HostError, Request, b64

#: pmxcfs itself takes no file above 1 MiB; there may be many nodes with many guests.
MAX_FILE = 1024 * 1024
MAX_TOTAL = 32 * 1024 * 1024
MAX_FILES = 20_000

KINDS = (("vm", "qemu-server"), ("container", "lxc"))
_SINGLE = ("storage.cfg", "corosync.conf")
_GUEST = re.compile(r"([1-9][0-9]{0,8})\.conf")
_NODE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_LXC_SOCKET = re.compile(rb"@/var/lib/lxc/([0-9]{1,9})/command$", re.MULTILINE)
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def run(request: Request, io: AgentIO) -> dict[str, Any]:
    """Read the files and look which guests run.

    Args:
        request: ``etc_pve`` (Proxmox VE's folder), ``root`` (where ``run`` and ``proc`` are looked for).
        io: the controller.

    Returns:
        ``proxmox``: whether there is such a folder; ``node``: this node's name; ``files``: ``name`` below the folder
        and ``content_b64``; ``failed``: ``name`` and ``why`` of what could not be read or is too much; ``running``: by
        kind and number of this node's guests whether they run, ``null`` where that cannot be told.

    Raises:
        RefusedError: ``invalid``; ``folder_not_listed``, where another folder than the usual one is named.
        StoppedError: the controller stopped the work.
        HostError: the folder is there and cannot be read.
    """
    args = Arguments(request.args, frozenset({"etc_pve", "root"}))
    etc_pve = image_folders.refuse_elsewhere(args.get("etc_pve", str, "/etc/pve"), "/etc/pve")
    root = image_folders.refuse_elsewhere(args.get("root", str, "/"), "/")
    try:
        folder = os.open(etc_pve, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return {"proxmox": False, "node": "", "files": [], "failed": [], "running": {}}
    except OSError as error:
        raise HostError(f"{etc_pve} cannot be read: {error.strerror}") from error
    with held(folder):
        files = _Files(folder, io)
        for name in _SINGLE:
            files.take(folder, name, name)
        _take_guests(files)
        node = _own_name(folder)
    return {
        "proxmox": True,
        "node": node,
        "files": [{"name": name, "content_b64": b64(content)} for name, content in files.found.items()],
        "failed": [{"name": name, "why": why} for name, why in files.failed.items()],
        "running": _running(node, files, root),
    }


class _Files:
    """What was read so far; ``failed`` says why something was not."""

    def __init__(self, folder: int, io: AgentIO) -> None:
        self.folder = folder
        self.found: dict[str, bytes] = {}
        self.failed: dict[str, str] = {}
        self._io = io
        self._total = 0

    def take(self, folder: int, name: str, shown: str) -> None:
        """One file; nothing where there is none."""
        self._io.check()
        if len(self.found) >= MAX_FILES or self._total >= MAX_TOTAL:
            self.failed[shown] = "there are more files than are read at once"
            return
        try:
            content = _content(folder, name)
        except FileNotFoundError:
            return  # gone to another node, or removed
        except OSError as error:
            self.failed[shown] = _why(error)
            return
        self.found[shown] = content
        self._total += len(content)

    def entries(self, folder: int, name: str, shown: str) -> Iterator[tuple[int, str]]:
        """The names in a folder, and a descriptor of it; nothing where there is none."""
        try:
            opened = os.open(name, _FOLDER_FLAGS, dir_fd=folder)
        except FileNotFoundError:
            return
        except OSError as error:
            self.failed[shown] = _why(error)
            return
        with held(opened):
            for entry in sorted(os.listdir(opened)):
                yield opened, entry


def _take_guests(files: _Files) -> None:
    for nodes, node in files.entries(files.folder, "nodes", "nodes"):
        if not _NODE.fullmatch(node):
            continue
        for _, folder in KINDS:
            for opened, name in _below(files, nodes, node, folder):
                if _GUEST.fullmatch(name):
                    files.take(opened, name, f"nodes/{node}/{folder}/{name}")


def _below(files: _Files, nodes: int, node: str, folder: str) -> Iterator[tuple[int, str]]:
    try:
        opened = os.open(node, _FOLDER_FLAGS, dir_fd=nodes)
    except OSError as error:
        if error.errno != errno.ENOENT:
            files.failed[f"nodes/{node}"] = _why(error)
        return
    with held(opened):
        yield from files.entries(opened, folder, f"nodes/{node}/{folder}")


def _content(folder: int, name: str) -> bytes:
    opened = os.open(name, _FILE_FLAGS, dir_fd=folder)
    with os.fdopen(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_FILE} bytes")
    return content


def _why(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "it is a symbolic link"
    return error.strerror or "it cannot be read"


def _own_name(folder: int) -> str:
    """This node's name: where ``local`` points to, which is only looked at; else the host's name."""
    try:
        name = os.path.basename(os.readlink("local", dir_fd=folder))
    except OSError:
        name = ""
    return name if _NODE.fullmatch(name) else socket.gethostname().partition(".")[0]


def _running(node: str, files: _Files, root: str) -> dict[str, dict[str, bool | None]]:
    """Whether the guests of this node run; of other nodes' nothing is known here."""
    found: dict[str, dict[str, bool | None]] = {}
    containers = _running_containers(root)
    for kind, folder in KINDS:
        above = f"nodes/{node}/{folder}/"
        numbers = [name[len(above) : -len(".conf")] for name in (*files.found, *files.failed) if name.startswith(above)]
        found[kind] = {
            number: _vm_runs(root, number) if kind == "vm" else None if containers is None else number in containers
            for number in numbers
        }
    return found


def _vm_runs(root: str, number: str) -> bool | None:
    """As Proxmox VE itself tells: the process of the pid file is there, and is this VM's (PVE::QemuServer::Helpers)."""
    try:
        with open(os.path.join(root, "run/qemu-server", number + ".pid"), "rb") as file:
            pid = file.read(32).strip()
        if not pid.isdigit():
            return None
        with open(os.path.join(root, "proc", pid.decode("ascii"), "cmdline"), "rb") as file:
            return b"\0-id\0" + number.encode("ascii") + b"\0" in file.read(1024 * 1024)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return None


def _running_containers(root: str) -> set[str] | None:
    """Containers whose monitor listens for commands (lxc-info does the same); ``None`` where that cannot be seen."""
    try:
        with open(os.path.join(root, "proc/net/unix"), "rb") as file:
            return {number.decode("ascii") for number in _LXC_SOCKET.findall(file.read(16 * 1024 * 1024))}
    except OSError:
        return None
