"""Backups of guests, as a node's storages list them: of each guest the newest one that can be used.

Proxmox VE leaves out, without a word, the backups that a token may not see (PVE::Storage, ``check_volume_access``), and
lists a backup of Proxmox Backup Server that is being made, or has no manifest, with a size of one byte (PBSPlugin.pm,
``list_volumes``). A backup whose last verification failed cannot be counted on.
"""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.agent.protocol import HostError, RefusedError
from storage_admin.hosts.proxmox.client import Api
from storage_admin.hosts.proxmox.drives import CONTAINER, VM
from storage_admin.hosts.proxmox.permissions import Permissions
from storage_admin.hosts.proxmox.storages import StorageFacts, integer

#: Seconds after which no further storage is asked: a scan does not wait for backups.
TOGETHER = 60.0
#: How far a backup's time may be ahead of our clock, in seconds; one of later cannot be told from one of long ago.
AHEAD = 24 * 3600
#: Kinds of guests by ``subtype``, by ``format`` of Proxmox Backup Server, and by the name of vzdump's file.
_KINDS = {"qemu": VM, "lxc": CONTAINER, "openvz": CONTAINER, "pbs-vm": VM, "pbs-ct": CONTAINER}
_VZDUMP = re.compile(r"/vzdump-(qemu|lxc|openvz)-")


@dataclass(frozen=True)
class Backup:
    """The newest usable backup of a guest.

    Args:
        kind: of the guest; empty where the storage does not tell.
        at: when it was made, in seconds since the epoch.
        volume: the storage's name for it.
        passed_over: how many newer ones failed their verification.
    """

    vmid: int
    kind: str
    at: int
    volume: str
    passed_over: int = 0


@dataclass(frozen=True)
class Gap:
    """Why backups may be missing, in a sentence; of one guest alone where ``vmid`` is given."""

    detail: str
    vmid: int | None = None


@dataclass(frozen=True)
class Backups:
    """What a node's storages tell of backups.

    Args:
        storages: those that answered.
        gaps: why it may not be all.
    """

    newest: tuple[Backup, ...] = ()
    storages: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()


def read(client: Api, node: str, storages: Iterable[StorageFacts], may: Permissions) -> Backups:
    """The backups on a node's storages, one call for each storage. What does not answer is a gap, and no error."""
    usable, failed = list[Backup](), list[Backup]()
    answered, gaps = list[str](), list[Gap]()
    until = time.monotonic() + TOGETHER
    wanted = [one for one in storages if one.enabled and "backup" in one.content]
    for one in wanted:
        if not one.active:
            gaps.append(Gap(_("The storage {name} cannot be reached.").format(name=one.name)))
            continue
        if time.monotonic() > until:
            gaps.append(Gap(_("The storage {name} was not asked: others took too long.").format(name=one.name)))
            continue
        try:
            rows = client.rows("nodes", node, "storage", one.name, "content", params={"content": "backup"})
        except (HostError, RefusedError) as error:
            told = _("The storage {name} does not list its backups. {detail}")
            gaps.append(Gap(told.format(name=one.name, detail=error.detail)))
            continue
        answered.append(one.name)
        if undated := _sort(rows, usable, failed):
            told = _("{count} backups on {name} have no valid time and are not counted.")
            gaps.append(Gap(told.format(count=undated, name=one.name)))
    gaps += [
        Gap(right.sentence, guest_of(right.path)) for right in may.missing("backups", [one.name for one in wanted])
    ]
    return Backups(_newest(usable, failed), tuple(answered), tuple(dict.fromkeys(gaps)))


def _sort(rows: Iterable[Mapping[str, Any]], usable: list[Backup], failed: list[Backup]) -> int:
    """Adds the rows to those that can be used and those that failed; returns how many have no time that makes sense."""
    undated, latest = 0, time.time() + AHEAD
    for row in rows:
        vmid, at = integer(row.get("vmid")), integer(row.get("ctime"))
        if row.get("content", "backup") != "backup" or not vmid or not row.get("volid") or _is_unfinished(row):
            continue
        if not at or at > latest:
            undated += 1
            continue
        verified = row.get("verification")
        state = verified.get("state") if isinstance(verified, Mapping) else verified
        found = Backup(vmid, _kind(row), at, str(row["volid"]))
        (failed if state == "failed" else usable).append(found)
    return undated


def _is_unfinished(row: Mapping[str, Any]) -> bool:
    size = integer(row.get("size"))
    return size is not None and size <= 1


def _kind(row: Mapping[str, Any]) -> str:
    named = _VZDUMP.search(str(row["volid"]))
    words = (row.get("subtype"), row.get("format"), named[1] if named else "")
    return next((_KINDS[word] for word in words if isinstance(word, str) and word in _KINDS), "")


def _newest(usable: Iterable[Backup], failed: Iterable[Backup]) -> tuple[Backup, ...]:
    """The newest of each guest; one of which all failed has none."""
    found = dict[tuple[int, str], Backup]()
    for one in usable:
        best = found.get((one.vmid, one.kind))
        if best is None or one.at > best.at:
            found[one.vmid, one.kind] = one
    for one in failed:
        best = found.get((one.vmid, one.kind))
        if best is not None and one.at > best.at:
            found[one.vmid, one.kind] = replace(best, passed_over=best.passed_over + 1)
    return tuple(found[key] for key in sorted(found))


def guest_of(path: str) -> int | None:
    """The number of the guest that a path of rights is for; ``None`` where it is for more."""
    number = path.removeprefix("/vms/")
    return int(number) if number != path and number.isdecimal() else None
