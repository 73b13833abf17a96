"""Guests of Proxmox VE that the controller has locked, so that none starts while a file of theirs gives up its name.

Proxmox VE's hypervisors take no image locks, and over a network no door can be kept. What is left is the ``lock`` of a
guest's configuration, which every start asks for. The controller takes it; here is looked whether it is held, in the
files that all nodes of the cluster share, before the names change and after that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from storage_admin.agent.arguments import Arguments
from storage_admin.agent.folders import image_folders
from storage_admin.agent.protocol import HELD_LOCK, HostError, RefusedError

PVE_FOLDER = "/etc/pve"
#: The arguments by which a verb is told of them.
ARGS = frozenset({"guests", "etc_pve", "shared"})

_GUEST = re.compile(r"([1-9][0-9]{0,8})\.conf")
_LOCK = re.compile(rb"^lock:\s*(\S+)\s*$", re.MULTILINE)
#: pmxcfs itself takes no file above 1 MiB.
_MOST = 1024 * 1024


@dataclass(frozen=True)
class Held:
    """The guests whose locks are held, by number; none where no locks are needed or can be had.

    ``shared`` says whether other hosts of the controller's show the files, too.
    """

    guests: frozenset[str] = frozenset()
    folder: str = PVE_FOLDER
    shared: bool = False

    @classmethod
    def of(cls, args: dict[str, Any]) -> Held:
        """What a request says: ``guests``, a list of numbers, ``etc_pve``, ``shared``.

        Raises:
            RefusedError: ``invalid``.
        """
        told = Arguments({name: args[name] for name in ARGS & args.keys()}, ARGS)
        folder = image_folders.refuse_elsewhere(told.get("etc_pve", str, PVE_FOLDER), PVE_FOLDER)
        return cls(frozenset(map(str, told.get("guests", list, []))), folder, told.get("shared", bool, False))

    @property
    def is_asked_for(self) -> bool:
        """Whether the controller is asked again after the exchange."""
        return bool(self.guests) or self.shared

    def refuse_unlocked(self, *names: bytes) -> None:
        """Refuse where a guest is not locked so, or another one's configuration names one of the files.

        Args:
            names: of the files.

        Raises:
            RefusedError: ``guests_unknown``.
            HostError: the cluster's files cannot be read.
        """
        missing = set(self.guests)
        for number, content in _configurations(self.folder):
            if number not in self.guests and not any(name in content for name in names):
                continue
            missing.discard(number)
            lock = _LOCK.search(content.partition(b"\n[")[0])
            if lock is None or lock[1] != HELD_LOCK.encode():
                raise RefusedError("guests_unknown", f"guest {number} could start, its lock is not held; try again")
        if missing:
            raise RefusedError("guests_unknown", f"guest {min(missing)} is not in the cluster any more; scan the host")


def is_node() -> bool:
    """Whether this is a node of Proxmox VE."""
    return os.path.isdir(PVE_FOLDER)


def _configurations(folder: str) -> Iterator[tuple[str, bytes]]:
    nodes = os.path.join(folder, "nodes")
    try:
        for node in os.listdir(nodes):
            for kind in ("qemu-server", "lxc"):
                yield from _in(os.path.join(nodes, node, kind))
    except OSError as error:
        raise HostError(f"{nodes} cannot be read: {error.strerror}") from error


def _in(folder: str) -> Iterator[tuple[str, bytes]]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        if found := _GUEST.fullmatch(name):
            with open(os.path.join(folder, name), "rb") as file:
                yield found[1], file.read(_MOST)
