"""Snapshots that libvirt keeps of a domain: listed, created and deleted by its own calls."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from storage_admin.hosts.libvirt.process import ask
from storage_admin.hosts.libvirt.relay import refuse_to_write
from storage_admin.hosts.libvirt.uri import listening
from storage_admin.hosts.live_facts import Part, Snapshot, named, newest_first, since_1970
from storage_admin.hosts.models import Host

#: Seconds until a list is given up, until a new one is, and until a deletion is, which writes what the overlays hold.
LIST_TIMEOUT, CREATE_TIMEOUT, DELETE_TIMEOUT = 10.0, 120.0, 24 * 3600.0
#: The first libvirt that deletes snapshots whose disks are files of their own, as it gives its version.
DELETES_EXTERNAL = 9_000_000
#: The first one that goes back to them.
REVERTS_EXTERNAL = 9_009_000


@dataclass(frozen=True)
class Snapshots:
    """All of a domain, the newest first, and libvirt's version as a number."""

    found: tuple[Snapshot, ...]
    version: int

    @property
    def version_words(self) -> str:
        """libvirt's version as it is written."""
        return f"{self.version // 1_000_000}.{self.version // 1000 % 1000}"

    def named(self, name: str, made: int | None = None) -> Snapshot | None:
        """As :func:`storage_admin.hosts.live_facts.named`."""
        return named(self.found, name, made)


def of(host: Host, uid: str) -> Snapshots:
    """The snapshots of a domain.

    Raises:
        RefusedError: ``tool_missing``: libvirt there can only be read.
        HostError: libvirt does not answer, or knows no such domain.
    """
    return _asked(host, {"uid": uid, "do": "list"}, LIST_TIMEOUT)


def create(host: Host, uid: str, name: str, description: str, disks: Collection[str], *, quiesce: bool) -> Snapshots:
    """Has the disks of a running domain written to new overlays from now on; what was there is the snapshot.

    Of a domain that is off the images keep it themselves (internal).

    Args:
        disks: targets.
        quiesce: the guest's agent flushes its filesystems and holds them still meanwhile.

    Raises:
        RefusedError, HostError: as of :func:`of`; or libvirt refuses it.
    """
    request = {"uid": uid, "do": "create", "name": name, "description": description, "quiesce": quiesce}
    return _asked(host, request | {"disks": sorted(disks)}, CREATE_TIMEOUT)


def delete(host: Host, uid: str, name: str, created: int | None, tick: Callable[[], None]) -> Snapshots:
    """Deletes a snapshot; what was written since stays, in the image below. One that is gone is deleted.

    Args:
        created: seconds since the epoch, as libvirt has it: one of that name from another time is left alone.
        tick: called twice a second; what it raises ends the waiting, and not the deletion.

    Raises:
        RefusedError, HostError: as of :func:`of`; or libvirt refuses it.
    """
    return _asked(host, {"uid": uid, "do": "delete", "name": name, "created": created}, DELETE_TIMEOUT, tick)


def revert(host: Host, uid: str, name: str, created: int | None) -> Snapshots:
    """Gives the disks of a domain that is off the content of a snapshot again.

    Args:
        created: seconds since the epoch, as libvirt has it: to one of that name from another time nobody goes back.

    Raises:
        RefusedError, HostError: as of :func:`of`; or libvirt refuses it.
    """
    return _asked(host, {"uid": uid, "do": "revert", "name": name, "created": created}, CREATE_TIMEOUT)


def _asked(host: Host, request: dict[str, Any], seconds: float, tick: Callable[[], None] | None = None) -> Snapshots:
    refuse_to_write(host)
    with listening(host) as uri:
        refused = _("Nothing was changed: {contradiction}.")
        told = ask(uri, "snapshot", seconds, request, refused=refused, tick=tick)
    found = [_snapshot(one) for one in told["snapshots"]]
    return Snapshots(tuple(newest_first(found)), told["libvirt"])


def _snapshot(told: dict[str, Any]) -> Snapshot:
    created = since_1970(told["created"])
    return Snapshot(**told | {"created": created, "disks": tuple(Part(**disk) for disk in told["disks"])})
